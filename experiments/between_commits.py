"""Speed of several checkouts or settings, in turns, call by call.

    python -m experiments.between_commits before=/other/checkout now=. int8=.:weights=int8

    python -m experiments.between_commits before=/other/checkout now=. --kinds decode,train,http

Each side is a process with a home (kernels, profiles) of its own, and one works at a time, so that
other load on the machine affects all of them alike. Prints medians, minimum times, and the speed
beside the first side, turn by turn. Settings: weights=int8, deterministic=1, max_recompute=SHARE,
and peft=1 for PEFT in place of the engine (decode and train; it does not decode).

Kinds: decode, a step of four requests; train, an optimizer step of one sequence; coserve, the
streams and the job of `coserve bench coserve` under slack, with the SLO of the first side on all: a
token of a job, and of a stream; plan, the sum of all plans of the checkout's own `plan_time.py`,
minimum times of the thread; http, a chat of one token on the built-in model, over HTTP.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import cached_property, partial
from inspect import signature
from io import StringIO
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

_CONTEXT, _STREAMS, _STEPS = 512, 4, 3
_LENGTHS = (512, 1024)
_MEMORY_BYTES = 2 << 30
_KINDS = ("decode", "train", "coserve", "plan", "http")
# Seconds that streams run beside a job in each turn, and a stream's SLO in units of a step in which
# they run alone.
_PHASE_S, _OBJECTIVE_STEPS = 4.0, 2.5
_PLAN_REPEATS = 10
_CHATS = 10
_START_LIMIT_S = 300.0


def main() -> None:
    """Measure, print, and end with a line of JSON."""
    # Sides run in other checkouts, which may lack this module.
    from experiments.results import add_save_option, print_result

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sides", nargs="+", metavar="NAME=DIRECTORY[:SETTING=VALUE…]")
    parser.add_argument("--model", default="dummy:smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument(
        "--homes", type=Path, help="kept, so that the device is measured once [a temporary folder]"
    )
    parser.add_argument(
        "--kinds", default="decode,train", help=f"of {', '.join(_KINDS)} [decode,train]"
    )
    add_save_option(parser)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(_KINDS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; there are: {', '.join(_KINDS)}")
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as home:
        texts = [side.partition("=")[::2] for side in options.sides]
        for kind in kinds:
            sides = {
                name: _start(name, text, options, options.homes or Path(home))
                for name, text in texts
            }
            try:
                rows = _in_turns(kind, sides, options.turns)
            finally:
                for side in sides.values():
                    _end(side)
            for row, by_side in rows.items():
                for name, numbers in _told(by_side).items():
                    told = " ".join(f"{key} {value}" for key, value in numbers.items())
                    print(f"{row:>14} {name:>14} {told}", flush=True)
            seconds |= rows
    result = {kind: _told(by_side) for kind, by_side in seconds.items()}
    print_result(
        "between_commits",
        {"model": options.model, "dtype": options.dtype, "turns": options.turns, "rows": result},
        options.save,
    )


def _in_turns(
    kind: str, sides: "dict[str, subprocess.Popen[str]]", turns: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each side, by measurement."""
    if kind == "train":
        calls = [(f"train {length}", turns) for length in _LENGTHS]
    elif kind == "coserve":
        solo_s = [_ask(side, "solo").get("step", 0.0) for side in sides.values()]
        calls = [(f"coserve {_OBJECTIVE_STEPS * solo_s[0]}", turns)]
    else:
        calls = [(kind, {"decode": 6, "http": 12, "plan": 1}[kind] * turns)]
    rows: dict[str, dict[str, list[float]]] = {}
    for call, number in calls:
        for turn in range(number + 1):  # the first warms up
            # What a side leaves undone when its call has ended meets each of the others as often.
            for name, side in list(sides.items())[:: -1 if turn % 2 else 1]:
                for what, seconds in _ask(side, call).items():
                    row = f"{kind} {what}" if kind == "coserve" else call
                    if turn:
                        rows.setdefault(row, {each: [] for each in sides})[name].append(seconds)
    # PEFT's side does not decode.
    return {
        row: {name: taken for name, taken in by_side.items() if taken}
        for row, by_side in rows.items()
    }


def _told(by_side: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    first = next(iter(by_side.values()), [])
    return {
        name: {
            "median_ms": round(1e3 * median(taken), 3),
            "least_ms": round(1e3 * min(taken), 3),
            "speed_of_first": round(median(a / b for a, b in zip(first, taken, strict=True)), 3),
        }
        for name, taken in by_side.items()
    }


def _start(
    name: str, text: str, options: argparse.Namespace, home: Path
) -> "subprocess.Popen[str]":
    directory, *settings = text.split(":")
    place = str(Path(directory).resolve())
    environment = {**os.environ, "PYTHONPATH": place, "COSERVE_HOME": str(home / name)}
    # -P: without this folder, whose names are other packages', too.
    command = [
        sys.executable,
        "-P",
        "-W",
        "ignore",
        __file__,
        "--side",
        options.model,
        options.dtype,
        *settings,
    ]
    return subprocess.Popen(
        command,
        cwd=place,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(side: "subprocess.Popen[str]", call: str) -> dict[str, float]:
    """Let a side run a call, and return its seconds; nothing if the side does not have the call."""
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write(call + "\n")
    side.stdin.flush()
    if not (line := side.stdout.readline()):
        raise SystemExit("a side ended: see its error above")
    result: dict[str, float] = json.loads(line)
    return result


def _end(side: "subprocess.Popen[str]") -> None:
    """End a side and what it has started."""
    assert side.stdin is not None
    side.stdin.close()
    try:
        side.wait(30)
    except subprocess.TimeoutExpired:
        side.kill()


# -- one side -----------------------------------------------------------------------


class _Side:
    """A checkout's own modules, imported when they are needed."""

    def __init__(
        self, model: str, dtype: str, settings: dict[str, str], running: ExitStack
    ) -> None:
        self._model, self._dtype, self._settings, self._running = model, dtype, settings, running

    def run(self) -> None:
        """Answer each line of stdin with the seconds of the call."""
        calls: dict[str, Callable[[], dict[str, float]]] = {}
        for line in sys.stdin:
            call = line.strip()
            if call not in calls:
                calls[call] = self._call(*call.partition(" ")[::2])
            print(json.dumps(calls[call]()), flush=True)

    def _call(self, kind: str, number: str) -> Callable[[], dict[str, float]]:
        """Prepare calls of a kind."""
        if kind == "plan":
            return _planning()
        if kind == "http":
            return _chatting(self._running)
        if "peft" in self._settings:
            return _peft(self._backbone, kind, number)
        if kind == "decode":
            return _decoding(self._backbone)
        if kind == "train":
            return _training(
                self._backbone, int(number), float(self._settings.get("max_recompute", 0))
            )
        return (
            partial(_solo, self._streams)
            if kind == "solo"
            else partial(_phase, self._streams, float(number))
        )

    @cached_property
    def _backbone(self) -> Any:
        from coserve.models import load_backbone

        weights: dict[str, Any] = {
            name: value for name, value in self._settings.items() if name == "weights"
        }
        backbone: Any = load_backbone(self._model, dtype=self._dtype, **weights)
        return backbone.deterministic() if "deterministic" in self._settings else backbone

    @cached_property
    def _streams(self) -> Any:
        """Return the streams and the job of `coserve bench coserve`."""
        from coserve.bench import coserve as experiment
        from coserve.bench.train import LORA

        return experiment._Bench(
            _engine(self._backbone, "slack"), LORA, streams=_STREAMS, num_jobs=1
        )


def _engine(backbone: Any, policy: str) -> Any:
    from coserve import Engine, EngineConfig

    make = getattr(Engine, "from_backbone", Engine)
    # Measuring a device takes minutes; only plans that weigh requests against jobs need more than a
    # quick profile.
    quick = policy != "slack" and "may_be_provisional" in signature(make).parameters
    more: dict[str, Any] = {"may_be_provisional": True} if quick else {}
    return make(backbone, EngineConfig(policy=policy, memory_bytes=_MEMORY_BYTES), **more)


def _tokens(backbone: Any, seed: int, number: int) -> list[int]:
    return Random(seed).choices(range(backbone.architecture.vocab_size), k=number)


def _decoding(backbone: Any) -> Callable[[], dict[str, float]]:
    from coserve import SamplingParams, Slo

    engine = _engine(backbone, "inference-only")
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    for seed in range(_STREAMS):
        engine.add_tokens(
            _tokens(backbone, seed, _CONTEXT), params, slo=Slo(ttft_s=1e3, tpot_s=1e3)
        )
    while not _decodes_all(engine):
        engine.step()

    def steps() -> dict[str, float]:
        start_s = time.perf_counter()
        for _ in range(_STEPS):
            engine.step()
        return {"step": (time.perf_counter() - start_s) / _STEPS}

    return steps


def _decodes_all(engine: Any) -> bool:
    rows = engine.last_plan.rows if engine.last_plan else ()
    return len(rows) == _STREAMS and all(each.kind == "decode" for each in rows)


def _training(backbone: Any, length: int, max_recompute: float) -> Callable[[], dict[str, float]]:
    from coserve import Example, LoraConfig, TuningConfig

    engine = _engine(backbone, "tuning-only")
    config = TuningConfig(batch_size=1, shuffle=False, num_epochs=1000, max_sequence_length=length)
    if max_recompute:
        config = replace(config, max_recompute=max_recompute)
    tokens = [_tokens(backbone, seed, length) for seed in range(4)]
    examples = [Example(tokens=tuple(each), trained=(True,) * length) for each in tokens]
    engine.submit(examples, config, adapter=LoraConfig(r=16, alpha=32, target_modules="all-linear"))

    def step() -> dict[str, float]:
        start_s = time.perf_counter()
        # The module of an event of a job is not the same in every checkout.
        while not any(
            getattr(event, "job", None) and event.kind == "step" for event in engine.step()
        ):
            pass
        return {"step": time.perf_counter() - start_s}

    return step


def _peft(backbone: Any, kind: str, number: str) -> Callable[[], dict[str, float]]:
    import torch

    from coserve import LoraConfig, TuningConfig
    from coserve.bench.baselines import PeftTrainer

    if kind != "train":
        return dict[str, float]
    lora = LoraConfig(r=16, alpha=32, target_modules="all-linear")
    trainer = PeftTrainer(backbone, lora, TuningConfig().optimizer)
    tokens = torch.tensor([_tokens(backbone, 0, int(number))])
    return lambda: {"step": trainer.step_s(tokens)}


def _solo(bench: Any) -> dict[str, float]:
    """Run the streams alone, and return the seconds of a step."""
    from coserve import Slo

    bench.slo = Slo(ttft_s=2.0, tpot_s=2.0)
    return {"step": median(bench.phase("inference-only", _PHASE_S).step_s)}


def _phase(bench: Any, tpot_s: float) -> dict[str, float]:
    """Run streams beside the job, and return the seconds of a token of each."""
    from coserve import Slo

    bench.slo = Slo(ttft_s=2.0, tpot_s=tpot_s)
    phase = bench.phase("slack", _PHASE_S)
    return {"tuning": 1 / phase.tuning_tokens_per_s, "tpot": 1e-3 * phase.tpot_ms(0.5)}


def _planning() -> Callable[[], dict[str, float]]:
    """Return a call that makes every plan of the checkout's `plan_time.py`, and sums up their
    times.
    """

    def plans() -> dict[str, float]:
        folders = ("experiments", "benchmarks")  # older checkouts have the latter
        path = next(
            path for path in (Path(name) / "plan_time.py" for name in folders) if path.exists()
        )
        script = runpy.run_path(str(path), {"__name__": "plan_time"})
        script["main"].__globals__["REPEATS"] = _PLAN_REPEATS
        with redirect_stdout(StringIO()) as output:
            script["main"]()
        plans = json.loads(output.getvalue().splitlines()[-1])
        return {"step": 1e-6 * sum(plan["min_us"] for plan in plans["plans"])}

    return plans


def _chatting(running: ExitStack) -> Callable[[], dict[str, float]]:
    """Start a server, and return a call that asks for a token some times, one after the other."""
    import httpx

    from coserve.client.ports import free_port

    port = free_port()
    command = [
        sys.executable,
        "-P",
        "-W",
        "ignore",
        "-m",
        "coserve",
        "up",
        "tiny",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    running.callback(server.wait, 60)
    running.callback(server.terminate)
    client = running.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60))
    end_s = time.monotonic() + _START_LIMIT_S
    while not _is_ready(client):
        if time.monotonic() > end_s or server.poll() is not None:
            raise SystemExit("the server did not start")
        time.sleep(0.2)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 1,
        "temperature": 0,
    }

    def chats() -> dict[str, float]:
        times_s = []
        for _ in range(_CHATS):
            start_s = time.perf_counter()
            client.post("/v1/chat/completions", json=body).raise_for_status()
            times_s.append(time.perf_counter() - start_s)
        return {"step": median(times_s)}

    return chats


def _is_ready(client: Any) -> bool:
    """Return whether a server answers, and no longer measures its device."""
    import httpx

    try:
        if client.get("/ready").status_code != 200:
            return False
        profile = client.get("/v1/status").json().get("profile") or {}
        return bool(profile.get("state", "measured") == "measured")
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        with ExitStack() as running:
            _Side(
                sys.argv[2],
                sys.argv[3],
                dict(setting.split("=") for setting in sys.argv[4:]),
                running,
            ).run()
    else:
        main()
