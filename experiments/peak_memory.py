"""Maximum memory of a piece of work, in PyTorch and elsewhere."""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# Prefix of the profiler's records of memory that PyTorch does not hold.
_ELSEWHERE = "held elsewhere"


class PeakMemory:
    """A context that measures the most bytes that PyTorch holds beyond those before, with what is
    held elsewhere at the same time.

    `num_bytes` is known after the context.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device, self._is_cuda = device, device.type == "cuda"
        self._running = ExitStack()
        self._profile: profile | None = None  # of a CPU
        self._before = 0

    def __enter__(self) -> "PeakMemory":
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile = self._running.enter_context(profiler)
        return self

    def held_elsewhere(self, num_bytes: int) -> None:
        """Record the bytes that were held elsewhere since the last call or the start."""
        if self._is_cuda:
            peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
            self.num_bytes = max(self.num_bytes, peak_bytes + num_bytes)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with record_function(f"{_ELSEWHERE} {num_bytes}"):
                pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._profile is None:
            self.held_elsewhere(0)
            return
        self._running.close()
        if kind is None:
            self.num_bytes = _most_bytes(_events(self._profile))


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that PyTorch holds during a call, beyond those before."""
    with PeakMemory(device) as peak:
        run()
    return peak.num_bytes


def _events(profiled: profile) -> list[dict[str, Any]]:
    """Return the events of a profile in order of time; the profiler reports single allocations only
    in a file.
    """
    with TemporaryDirectory() as place:
        trace = Path(place) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=itemgetter("ts"))


def _most_bytes(events: Iterable[dict[str, Any]]) -> int:
    held = most = most_now = 0
    for event in events:
        if event["name"] == "[memory]":
            held += event["args"]["Bytes"]
            most_now = max(most_now, held)
        elif event.get("cat") == "user_annotation" and event["name"].startswith(_ELSEWHERE):
            most, most_now = max(most, most_now + int(event["name"].removeprefix(_ELSEWHERE))), held
    return max(most, most_now)
