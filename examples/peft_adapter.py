"""Serve an adapter in PEFT's format, beside the base model, in the same batch.

python examples/peft_adapter.py MODEL ADAPTER      # directories, or hub ids for the model
"""

import sys

from coserve import Engine, SamplingParams
from coserve.engine.request import Chunk


def main(model: str, adapter: str) -> None:
    """Answer one prompt with the base and with the adapter."""
    engine = Engine.load(model)
    engine.load_adapter("mine", adapter)
    prompt, greedy = "The sky is", SamplingParams(max_tokens=12, temperature=0)
    for name in (None, "mine"):
        engine.add(prompt, greedy, adapter=name, request_id=name or "base")
    texts = {"base": "", "mine": ""}
    while engine.has_work:  # both run in the same steps
        for event in engine.step():
            if isinstance(event, Chunk):
                texts[event.request] += event.text
    print(f"base: {texts['base']!r}")
    print(f"mine: {texts['mine']!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
