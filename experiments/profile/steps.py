"""Measurement of the parts of a step, each beside its floor."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median, median_low
from typing import Any, TypeVar

from coserve.adapters.base import Adapter
from coserve.bench.machine import Clock, best_clock, read_bytes_per_s, seconds_of
from coserve.bench.train import LORA
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.errors import CoserveError
from coserve.models.backbone import Backbone
from coserve.models.weights import weight_tensors
from coserve.scheduling.plan import Plan
from coserve.scheduling.policies import make_policy
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from experiments.profile.floors import Floors, Work
from experiments.profile.ledger import PARTS, Ledger, median_step, peak_flops_per_s, split_rest

T = TypeVar("T")

_MEMORY_BYTES = 4 << 30
# Kinds of steps, and the policy that makes such ones of requests' rows and of a sequence of a job.
_POLICIES = {"decode": "inference-only", "fused": "slack", "backward": "tuning-only"}
# So that no step is cut for the sake of a deadline.
_RELAXED = Slo(ttft_s=1e3, tpot_s=1e3)


def run(
    backbone: Backbone, *, runs: int, streams: int = 8, context: int = 512, rows: int = 512
) -> dict[str, Any]:
    """Measure three kinds of steps, by part.

    Requests decode (`streams` of them, which draw their tokens, after `context` others); they
    decode beside a window of a job (its first of `rows` rows, as many as cost least beside them);
    the loss and the whole backward pass of all rows, by itself. Medians over `runs` turns, after
    one that warms up. In a turn the three run as they are and by part, in alternating order, so
    that other load affects both alike.

    Raises:
        CoserveError: The device is not a CPU; elsewhere calls do not wait for their results.
    """
    if backbone.device.type != "cpu":
        raise CoserveError(
            f"this experiment times calls, which on {backbone.device} do not wait: it needs "
            f"--device cpu"
        )
    clock_name, clock = best_clock()
    bench = _Bench(
        backbone, clock, streams=streams, context=context, rows=rows, turns=3 * (runs + 1)
    )
    whole: dict[str, list[float]] = {kind: [] for kind in _POLICIES}
    timed: dict[str, list[dict[str, float]]] = {kind: [] for kind in _POLICIES}
    traced: dict[str, list[dict[str, float]]] = {kind: [] for kind in _POLICIES}
    ways: list[Callable[[str], None]] = [
        lambda kind: whole[kind].append(bench.step(kind, partial(seconds_of, clock=clock))),
        lambda kind: timed[kind].append(bench.step(kind, bench.ledger.timed)),
    ]
    for _ in range(runs + 1):
        for measure in ways:
            for (
                kind
            ) in _POLICIES:  # in this order, since the backward pass is that of the window before
                measure(kind)
        for kind in _POLICIES:
            traced[kind].append(bench.step(kind, bench.ledger.traced))
        ways.reverse()
    speeds = {
        "flops_per_s": peak_flops_per_s(backbone.dtype, clock),
        "bytes_per_s": read_bytes_per_s(backbone.device, clock),
    }
    floors, window_rows = Floors(Adapter(backbone, LORA)), median_low(bench.windows)
    least = {
        "decode": floors.forward([context] * streams, 0),
        "fused": floors.forward([context] * streams, window_rows),
        "backward": floors.backward(rows),
    }
    steps = []
    for kind in _POLICIES:
        parts = split_rest(median_step(timed[kind][1:]), median_step(traced[kind][1:]))
        steps.append(
            {
                "step": kind,
                "step_ms": 1e3 * median(whole[kind][1:]),
                "timed_ms": 1e3 * sum(parts.values()),
                "parts_ms": {part: 1e3 * parts[part] for part in PARTS},
                "floor_ms": {
                    part: 1e3 * least[kind].get(part, Work()).seconds(**speeds) for part in PARTS
                },
            }
        )
    return {
        "clock": clock_name,
        "requests": streams,
        "context": context,
        "window_rows": window_rows,
        "rows": rows,
        **speeds,
        "steps": steps,
    }


class _Bench:
    """An engine with requests and a job that do not end before the last turn.

    `windows` has the rows of each measured window.
    """

    def __init__(
        self, backbone: Backbone, clock: Clock, *, streams: int, context: int, rows: int, turns: int
    ) -> None:
        self.ledger = Ledger(clock)
        self.windows: list[int] = []
        head = [tensor.data_ptr() for tensor in weight_tensors(backbone.weights["head"])]
        watched = replace(backbone, backend=self.ledger.watch(backbone.backend, head))
        self._engine = engine = Engine.from_backbone(
            watched, EngineConfig(memory_bytes=_MEMORY_BYTES)
        )
        engine.slo = _RELAXED
        random, vocab_size = Random(0), backbone.architecture.vocab_size
        # In each turn of all kinds requests decode twice, and once more beside the job's optimizer
        # step.
        params = SamplingParams(
            temperature=1.0, top_p=0.9, seed=0, max_tokens=4 * turns + 1, ignore_eos=True
        )
        engine.policy = make_policy("inference-only")
        for _ in range(streams):
            engine.add_tokens(random.choices(range(vocab_size), k=context), params, slo=_RELAXED)
        while (
            any(request.num_rows > 1 for request in engine.requests.running_progress())
            or engine.requests.waiting
        ):
            engine.step()
        examples = [
            Example(tokens=tuple(random.choices(range(vocab_size), k=rows)), trained=(True,) * rows)
            for _ in range(turns + 1)
        ]
        config = TuningConfig(batch_size=1, max_sequence_length=rows, max_pack_tokens=rows)
        engine.submit(examples, config, adapter=LORA)

    def step(self, kind: str, measure: Callable[[Callable[[], object]], T]) -> T:
        """Run until the next step of a kind, and measure it."""
        self._engine.policy = make_policy(_POLICIES[kind])
        while True:
            result = measure(self._engine.step)
            plan = self._engine.last_plan
            if _kind(plan) == kind:
                if kind == "fused":
                    self.windows.append(
                        sum(each.rows for each in plan.rows if each.kind == "window")
                    )
                return result
            if not self._engine.has_work:
                raise CoserveError(f"no step of kind {kind!r} came")


def _kind(plan: Plan) -> str | None:
    """Return the kind of a step; None for one that is not measured."""
    kinds = {rows.kind for rows in plan.rows}
    if plan.updates:
        return None
    if plan.losses or plan.tasklets:
        return "backward" if plan.losses and plan.tasklets and not kinds else None
    if any(rows.kind == "window" and rows.start for rows in plan.rows):
        return None
    return {frozenset({"decode"}): "decode", frozenset({"decode", "window"}): "fused"}.get(
        frozenset(kinds)
    )
