"""instructor: `python instructor_client.py URL MODEL`; a line for each thing that works."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
SETTINGS = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_retries": 0,
    "temperature": 0,
    "max_tokens": 200,
}


class City(BaseModel, extra="forbid"):
    is_large: bool
    has_river: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=URL, api_key="none"), mode=mode)
    assert isinstance(client.chat.completions.create(response_model=City, **SETTINGS), City), mode
    print({instructor.Mode.TOOLS: "tools", instructor.Mode.JSON_SCHEMA: "structured output"}[mode])
parts = list(client.chat.completions.create_partial(response_model=City, **SETTINGS))
assert parts[-1].has_river is not None
print("stream")
