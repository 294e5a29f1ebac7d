"""A ledger of a step's time: a backend that records the time of each of its calls, by part.

All that takes long passes through the backend. What PyTorch does beside it (sums of residuals,
copies into saved tensors, keys and values into pages) is told from plain Python by PyTorch's own
profiler, in steps of their own: it would slow down the others.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from coserve.bench.machine import Clock, seconds_of
from coserve.devices.torch.requests import SAMPLING
from coserve.kernels.base import Backend
from coserve.kernels.trace import Trace, TracedCalls, TracedStep

PARTS = (
    "products",
    "attention",
    "adapters",
    "head and loss",
    "sampling",
    "elementwise",
    "Python",
    "waiting",
)

# What a backend's method is for, by a piece of its name; the first that fits.
_PARTS_BY_NAME = {
    "cross_entropy": "head and loss",
    "linear": "products",  # fused ones, which take along what adapters add
    "low_rank": "adapters",
    "adapter": "adapters",
    "drop": "adapters",
    "attention": "attention",
    "attend": "attention",
    "argmax": "sampling",
    "draw": "sampling",
    "norm": "elementwise",
    "silu": "elementwise",
    "rope": "elementwise",
    "signs": "elementwise",
    "product": "products",
    "input_gradient": "products",
    "weight_gradient": "products",
    "layout": "products",
}
_PREFIX = "coserve: "


def part_of(method: str) -> str:
    """Return the part of `PARTS` that a method of a backend belongs to."""
    return next((part for piece, part in _PARTS_BY_NAME.items() if piece in method), "elementwise")


class Ledger:
    """A recorder of the seconds of steps by part, by a clock (`machine.best_clock`), which is idle
    except while it measures a step.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._mode: Literal["off", "timed", "traced"] = "off"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._thread_s = 0.0

    def watch(self, backend: Backend, head: Collection[int]) -> Backend:
        """Return a backend that records its calls.

        Args:
            backend: The backend.
            head: Addresses of the head's weights, whose products count as the head's.
        """
        return cast(Backend, _WatchedBackend(backend, self, frozenset(head)))

    def timed(self, step: Callable[[], object]) -> dict[str, float]:
        """Return the seconds of a step by part; the sum is the step.

        "Python" includes what PyTorch does beside the backend. "waiting" is the time in which this
        thread did not run, outside of the backend's calls (none by a clock that stands still then).
        """
        self._seconds.clear()
        self._thread_s, self._mode = 0.0, "timed"
        thread_s, start_s = time.thread_time(), self._clock()
        try:
            step()
        finally:
            self._mode = "off"
        rest_s = self._clock() - start_s - sum(self._seconds.values())
        python_s = min(rest_s, time.thread_time() - thread_s - self._thread_s)
        return {**self._seconds, "Python": python_s, "waiting": rest_s - python_s}

    def traced(self, step: Callable[[], object]) -> dict[str, float]:
        """Return the seconds of PyTorch's operations beside the backend's calls: "elementwise", and
        "sampling".
        """
        self._mode = "traced"
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines on stderr
        try:
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                step()
        finally:
            self._mode = "off"
        spent: defaultdict[str, float] = defaultdict(float)
        _add_operations(
            (event for event in profiled.events() if event.cpu_parent is None), "elementwise", spent
        )
        return dict(spent)

    def run(
        self, part: str, call: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        """Make a call of the backend, and record its time."""
        if self._mode == "off":
            return call(*args, **named)
        if self._mode == "traced":
            with record_function(_PREFIX + part):
                return call(*args, **named)
        thread_s, start_s = time.thread_time(), self._clock()
        result = call(*args, **named)
        self._seconds[part] += self._clock() - start_s
        self._thread_s += time.thread_time() - thread_s
        return result

    def run_calls(self, calls: TracedCalls, step: TracedStep) -> Tensor:
        """Run traced calls, and record the time of each kernel for its part."""
        if self._mode != "timed":
            return cast(Tensor, self.run("products", calls.run, (step,), {}))
        thread_s, start_s = time.thread_time(), self._clock()
        result, by_kernel = calls.run_timed(step)
        # Kernels are timed by the wall clock, of which this clock may see a part.
        factor = (self._clock() - start_s) / sum(by_kernel.values())
        for name, seconds in by_kernel.items():
            self._seconds[part_of(name)] += factor * seconds
        self._thread_s += time.thread_time() - thread_s
        return result


class _WatchedBackend:
    """A backend whose methods go through a ledger."""

    def __init__(self, inner: Backend, ledger: Ledger, head: frozenset[int]) -> None:
        self._inner, self._ledger, self._head = inner, ledger, head

    @cached_property
    def for_losses(self) -> Backend:
        return cast(Backend, _WatchedBackend(self._inner.for_losses, self._ledger, self._head))

    @cached_property
    def fused(self) -> Mapping[str, Callable[..., Tensor | None]]:
        return {
            name: partial(self._run, part_of(name), kernel)
            for name, kernel in self._inner.fused.items()
        }

    def trace(
        self, dtype: torch.dtype, run: Callable[[Trace[Backend]], Tensor]
    ) -> TracedCalls | None:
        calls = self._inner.trace(dtype, run)
        return None if calls is None else _WatchedCalls(calls, self._ledger)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name.startswith("_") or not callable(method):
            return method
        watched = partial(self._run, part_of(name), method)
        setattr(self, name, watched)
        return watched

    def _run(self, part: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if part == "products" and any(
            isinstance(arg, Tensor) and arg.data_ptr() in self._head for arg in args[1:2]
        ):
            part = "head and loss"
        return self._ledger.run(part, call, args, named)


class _WatchedCalls(TracedCalls):
    def __init__(self, inner: TracedCalls, ledger: Ledger) -> None:
        self._inner, self._ledger = inner, ledger

    @property
    def max_rows(self) -> int:
        return self._inner.max_rows

    @property
    def max_prompt_pairs(self) -> int:
        return self._inner.max_prompt_pairs

    @property
    def rows_apart(self) -> bool:
        return self._inner.rows_apart

    @property
    def kept(self) -> Mapping[Hashable, int]:
        return self._inner.kept

    def fit(self, step: TracedStep) -> bool:
        return self._inner.fit(step)

    def run(self, step: TracedStep) -> Tensor:
        return self._ledger.run_calls(self._inner, step)

    def run_timed(self, step: TracedStep) -> tuple[Tensor, Mapping[str, float]]:
        return self._inner.run_timed(step)


def median_step(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the step of the median length."""
    return sorted(steps, key=lambda parts: sum(parts.values()))[len(steps) // 2]


def split_rest(timed: dict[str, float], traced: dict[str, float]) -> dict[str, float]:
    """Return a timed step with PyTorch's traced operations taken out of "Python".

    If tracing took longer than all of that, each operation counts for less.
    """
    spent = {part: timed.get(part, 0.0) for part in PARTS}
    factor = min(1.0, timed["Python"] / max(sum(traced.values()), 1e-9))
    for part, seconds in traced.items():
        spent[part] += factor * seconds
        spent["Python"] -= factor * seconds
    return {**spent, "Python": max(0.0, spent["Python"])}


def _add_operations(events: Iterable[Any], part: str, spent: defaultdict[str, float]) -> None:
    """Add the times of the outermost operations among these events and below, without those inside
    the backend's calls, which are timed.
    """
    for event in events:
        if event.name == SAMPLING:
            _add_operations(event.cpu_children, "sampling", spent)
        elif not event.name.startswith(_PREFIX):
            spent[part] += event.time_range.elapsed_us() / 1e6


def peak_flops_per_s(
    dtype: torch.dtype, clock: Clock = time.perf_counter, *, size: int = 2048
) -> float:
    """Return the FLOP/s of a large product in PyTorch: the fastest of a few, in this dtype or in
    float32.

    Kernels compute in float32 where instructions for a smaller dtype are slower.
    """

    def product_s(computed: torch.dtype) -> float:
        x, w = (torch.randn(size, size).to(computed) for _ in range(2))
        x @ w
        return min(seconds_of(lambda: x @ w, clock) for _ in range(5))

    return 2 * size**3 / min(product_s(computed) for computed in {dtype, torch.float32})
