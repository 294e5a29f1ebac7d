"""Cost of structured output in a decode step: eight requests that each follow a JSON schema, beside
the same eight without.

    OMP_NUM_THREADS=1 python -m experiments.structured [--model dummy:smollm2-135m]

Steps alternate. Both engines run in this process; times are of the whole process
(`time.process_time`): the thread that computes masks counts, too, and other processes do not. The
vocabulary is made up: bytes, and pieces of letters as a tokenizer has them. Prints medians, their
ratio, and one line of JSON.
"""

import argparse
import time
from random import Random
from statistics import median

from coserve.devices.grammars.grammar import Grammar
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.models import load_backbone
from experiments.results import add_save_option, print_result

NUM_REQUESTS, STEPS, WARM_UP = 8, 150, 10
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": "string"},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}


def made_up_pieces(number: int) -> list[bytes]:
    """Return every byte, then words with and without a space before them."""
    random, pieces = Random(0), [bytes([byte]) for byte in range(256)]
    vocabulary = set(pieces)
    while len(vocabulary) < number:
        word = "".join(
            random.choices('etaoinshrdlucmfwypvbgkjqxz{}":,[]0123456789', k=random.randint(2, 8))
        )
        vocabulary.add((random.choice(("", " ")) + word).encode())
    return [*pieces, *sorted(vocabulary - {*pieces})]


def engine_of(model: str, num_pieces: int) -> Engine:
    """Return an engine for requests that decode."""
    backbone = load_backbone(model, dtype="float32")
    engine = Engine.from_backbone(backbone, EngineConfig(memory_bytes=256 << 20))
    pieces = made_up_pieces(num_pieces)
    vocab_size = engine.device.info.vocab_size
    engine.use_vocabulary([*pieces, *[b""] * vocab_size][:vocab_size], ())
    return engine


def add(engine: Engine, grammar: Grammar | None, temperature: float) -> None:
    """Add requests that last until the end."""
    for seed in range(NUM_REQUESTS):
        params = SamplingParams(
            max_tokens=2 * (STEPS + WARM_UP), temperature=temperature, seed=seed, grammar=grammar
        )
        engine.add_tokens([seed + 1] * 32, params)
    for _ in range(WARM_UP):
        engine.step()


def measure(model: str, num_pieces: int, temperature: float) -> dict[str, float]:
    """Return the medians of a step of each, and of the ratio of consecutive steps."""
    plain, masked = (engine_of(model, num_pieces) for _ in range(2))
    add(plain, None, temperature)
    add(masked, Grammar.json_schema(SCHEMA), temperature)
    times: dict[str, list[float]] = {"plain": [], "masked": []}
    for turn in range(STEPS):
        order = [("plain", plain), ("masked", masked)]
        for name, engine in order if turn % 2 else reversed(order):
            if len(engine.requests.running) < NUM_REQUESTS:
                add(engine, None if name == "plain" else Grammar.json_schema(SCHEMA), temperature)
            start = time.process_time()
            engine.step()
            times[name].append(1e3 * (time.process_time() - start))
    ratios = [masked / plain for plain, masked in zip(times["plain"], times["masked"], strict=True)]
    return {
        "plain_ms": median(times["plain"]),
        "masked_ms": median(times["masked"]),
        "ratio": median(ratios),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="dummy:smollm2-135m")
    parser.add_argument("--vocabulary", type=int, default=49_152)
    add_save_option(parser)
    options = parser.parse_args()
    rows = {}
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        rows[name] = measure(options.model, options.vocabulary, temperature)
        print(name, "  ".join(f"{key} {value:.3f}" for key, value in rows[name].items()))
    print_result("structured", rows, options.save)


if __name__ == "__main__":
    main()
