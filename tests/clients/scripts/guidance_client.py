"""guidance, by its client for vLLM: `python guidance_client.py URL MODEL`; a line for each thing
that works."""

import re
import sys

from guidance import assistant, gen, json, select, user
from guidance._schema import SamplingParams
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
LIKELIEST = SamplingParams(top_k=1, top_p=None, min_p=None, repetition_penalty=None)


class City(BaseModel, extra="forbid"):
    """A city."""

    is_large: bool
    has_river: bool


def asked(program: object) -> object:
    """Return the model after it has answered a greeting as a program says."""
    model = VLLMModel(MODEL, LIKELIEST, base_url=URL, api_key="none", echo=False)
    with user():
        model += "hello"
    with assistant():
        model += program
    return model


assert asked(gen("text", max_tokens=40))["text"].strip() == "Hello!"
print("chat")

assert re.fullmatch("[0-9]{3}", asked(gen("number", regex="[0-9]{3}"))["number"])
print("regular expressions")

assert asked(select(["yes", "no"], name="word"))["word"] in ("yes", "no")
print("choices")

City.model_validate_json(asked(json("city", schema=City))["city"])
print("structured output")
