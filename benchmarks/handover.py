"""What a prompt costs a decode instance that computes it, and one that a prefill instance hands it over to.

    .venv/bin/python benchmarks/handover.py [--model dummy:smollm2-135m] [--tokens 256,1024]

Two engines in one process take turns. Of the decode instance: CPU seconds of all its threads and seconds, from a
request to its first token, without the time in which the other engine takes steps. The last line is JSON.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from coserve import Engine, EngineConfig, SamplingParams
from coserve.handover.decode import DecodeEnd
from coserve.handover.prefill import PrefillEnd
from coserve.handover.transport import LocalTransport, local_pair


class Measured:
    """Time inside a block, summed."""

    def __init__(self) -> None:
        self.cpu_s = self.wall_s = 0.0

    def __enter__(self) -> None:
        self._started = time.process_time(), time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.cpu_s += time.process_time() - self._started[0]
        self.wall_s += time.perf_counter() - self._started[1]


def main() -> None:
    """The experiment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="dummy:smollm2-135m")
    parser.add_argument("--tokens", default="256,1024")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    engines = [
        Engine.load(given.model, EngineConfig(memory_bytes=1 << 28), dtype="float32", with_text=False) for _ in range(2)
    ]
    decode, prefill = engines
    rng, rows = Random(0), []
    with TemporaryDirectory(dir="/dev/shm") as directory:
        ends: list[LocalTransport] = []

        def connect() -> LocalTransport:
            mine, other = local_pair()
            ends.append(other)
            return mine

        def accept() -> list[LocalTransport]:
            found, ends[:] = list(ends), []
            return found

        there = PrefillEnd(prefill, accept)  # type: ignore[arg-type]
        here = DecodeEnd(decode, connect, Path(directory), min_tokens=1)
        for _ in range(2):
            here.poll()
            there.poll()

        def first_token(num_tokens: int, *, is_handed: bool) -> Measured:
            measured = Measured()
            prompt = [rng.randrange(decode.device.info.vocab_size) for _ in range(num_tokens)]
            with measured:
                name = decode.add_tokens(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
                if is_handed:
                    here.added(name)
            while decode.has_requests:
                with measured:
                    here.poll()
                    here.take(decode.step())
                there.poll()
                there.take(prefill.step())
            return measured

        for num_tokens in map(int, given.tokens.split(",")):
            for is_handed in (False, True):
                first_token(num_tokens, is_handed=is_handed)
            pairs = [
                (first_token(num_tokens, is_handed=False), first_token(num_tokens, is_handed=True))
                for _ in range(given.rounds)
            ]
            num_bytes = (num_tokens - 1) // decode.config.block_tokens * decode.device.info.page_bytes
            row: dict[str, float] = {"tokens": num_tokens, "bytes": num_bytes}
            for index, side in enumerate(("computed", "handed_over")):
                row[f"{side}_cpu_ms"] = round(1e3 * median(pair[index].cpu_s for pair in pairs), 2)
                row[f"{side}_ms"] = round(1e3 * median(pair[index].wall_s for pair in pairs), 2)
            row["cpu_ratio"] = round(median(pair[0].cpu_s / pair[1].cpu_s for pair in pairs), 1)
            rows.append(row)
            print(row)
        stats = here.stats()
        assert stats is not None and stats.num_not_handed_over == 0, stats
    print(json.dumps({"model": given.model, "rows": rows}))


if __name__ == "__main__":
    main()
