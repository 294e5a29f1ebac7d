"""Decode steps and optimizer steps of several checkouts or settings, in turns, call by call.

    python benchmarks/between_commits.py before=/other/checkout now=. sparing=.:max_recompute=0.3 int8=.:weights=int8

Each side is a process with a home (kernels, profiles) of its own, and one works at a time, so that what else happens
on the machine meets all of them alike. Prints medians, least times, and the speed beside the first side, turn by turn.
Settings: weights=int8, deterministic=1, max_recompute=SHARE, and peft=1 for PEFT in place of the engine (no decoding).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

_CONTEXT, _STREAMS, _STEPS = 512, 4, 3
_LENGTHS = (512, 1024)
_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Measure, print, and end with a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="+", metavar="NAME=DIRECTORY[:SETTING=VALUE…]")
    parser.add_argument("--model", default="dummy:smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--homes", type=Path, help="kept, so that the device is measured once [a temporary folder]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        texts = [side.partition("=")[::2] for side in given.sides]
        sides = {name: _start(name, text, given, given.homes or Path(home)) for name, text in texts}
        found: dict[str, dict[str, list[float]]] = {}
        for kind, turns in (("decode", 6 * given.turns), *((f"train {n}", given.turns) for n in _LENGTHS)):
            for turn in range(turns + 1):  # the first warms up
                for name, side in sides.items():
                    took_s = _ask(side, kind)
                    if turn and took_s is not None:
                        found.setdefault(kind, {}).setdefault(name, []).append(took_s)
            # PEFT's side does not decode.
            for name, row in _told(found.get(kind, {})).items():
                print(f"{kind:>12} {name:>14}", *(f"{key} {value}" for key, value in row.items()), flush=True)
        for side in sides.values():
            side.kill()
    result = {kind: _told(by_side) for kind, by_side in found.items()}
    print(json.dumps({"model": given.model, "dtype": given.dtype, "turns": given.turns, "rows": result}))


def _told(by_side: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    first = next(iter(by_side.values()), [])
    return {
        name: {
            "median_ms": round(1e3 * median(taken), 1),
            "least_ms": round(1e3 * min(taken), 1),
            "speed_of_first": round(median(a / b for a, b in zip(first, taken, strict=True)), 3),
        }
        for name, taken in by_side.items()
    }


def _start(name: str, text: str, given: argparse.Namespace, home: Path) -> "subprocess.Popen[str]":
    directory, *settings = text.split(":")
    place = str(Path(directory).resolve())
    environment = {**os.environ, "PYTHONPATH": place, "COSERVE_HOME": str(home / name)}
    # -P: without this folder, whose names are other packages', too.
    command = [sys.executable, "-P", "-W", "ignore", __file__, "--side", given.model, given.dtype, *settings]
    return subprocess.Popen(
        command, cwd=place, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _ask(side: "subprocess.Popen[str]", kind: str) -> float | None:
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write(kind + "\n")
    side.stdin.flush()
    if not (line := side.stdout.readline()):
        raise SystemExit("a side ended: see its error above")
    found: float | None = json.loads(line)
    return found


# -- one side -----------------------------------------------------------------------


def _run_side(model: str, dtype: str, settings: dict[str, str]) -> None:
    """Answer each line with the seconds of what it asks for. Imports are the checkout's."""
    import torch

    from coserve.models import load_backbone

    weights: dict[str, Any] = {"weights": settings["weights"]} if "weights" in settings else {}
    backbone = load_backbone(model, dtype=dtype, **weights)
    if "deterministic" in settings:
        backbone = backbone.deterministic()
    kinds: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        kind = line.strip()
        if kind not in kinds:
            if "peft" in settings:
                kinds[kind] = _peft(backbone, kind)
            elif kind == "decode":
                kinds[kind] = _decoding(backbone)
            else:
                kinds[kind] = _training(backbone, int(kind.split()[1]), float(settings.get("max_recompute", 0)))
        with torch.inference_mode(False):
            print(json.dumps(kinds[kind]()), flush=True)


def _engine(backbone: Any, policy: str) -> Any:
    from coserve import Engine, EngineConfig

    make = getattr(Engine, "from_backbone", Engine)
    return make(backbone, EngineConfig(policy=policy, memory_bytes=_MEMORY_BYTES))


def _tokens(backbone: Any, seed: int, number: int) -> list[int]:
    return Random(seed).choices(range(backbone.architecture.vocab_size), k=number)


def _decoding(backbone: Any) -> Callable[[], float]:
    from coserve import SamplingParams, Slo

    engine = _engine(backbone, "inference-only")
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    for seed in range(_STREAMS):
        engine.add_tokens(_tokens(backbone, seed, _CONTEXT), params, slo=Slo(ttft_s=1e3, tpot_s=1e3))
    while not _decodes_all(engine):
        engine.step()

    def steps() -> float:
        start_s = time.perf_counter()
        for _ in range(_STEPS):
            engine.step()
        return (time.perf_counter() - start_s) / _STEPS

    return steps


def _decodes_all(engine: Any) -> bool:
    rows = engine.last_plan.rows if engine.last_plan else ()
    return len(rows) == _STREAMS and all(each.kind == "decode" for each in rows)


def _training(backbone: Any, length: int, max_recompute: float) -> Callable[[], float]:
    from coserve import Example, LoraConfig, TuningConfig
    from coserve.engine.job import JobEvent

    engine = _engine(backbone, "tuning-only")
    config = TuningConfig(batch_size=1, shuffle=False, num_epochs=1000, max_sequence_length=length)
    if max_recompute:
        config = replace(config, max_recompute=max_recompute)
    tokens = [_tokens(backbone, seed, length) for seed in range(4)]
    examples = [Example(tokens=tuple(each), trained=(True,) * length) for each in tokens]
    engine.submit(examples, config, adapter=LoraConfig(r=16, alpha=32, target_modules="all-linear"))

    def step() -> float:
        start_s = time.perf_counter()
        while not any(isinstance(event, JobEvent) and event.kind == "step" for event in engine.step()):
            pass
        return time.perf_counter() - start_s

    return step


def _peft(backbone: Any, kind: str) -> Callable[[], Any]:
    import torch

    from coserve import LoraConfig, TuningConfig
    from coserve.bench.baselines import PeftTrainer

    if kind == "decode":
        return lambda: None
    lora = LoraConfig(r=16, alpha=32, target_modules="all-linear")
    trainer = PeftTrainer(backbone, lora, TuningConfig().optimizer)
    tokens = torch.tensor([_tokens(backbone, 0, int(kind.split()[1]))])
    return lambda: trainer.step_s(tokens)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        _run_side(sys.argv[2], sys.argv[3], dict(setting.split("=") for setting in sys.argv[4:]))
    else:
        main()
