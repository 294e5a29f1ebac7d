"""What an experiment has to say about the machine, and how it takes time."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from coserve.bench.vllm import vllm_version
from coserve.devices.profiles.kept import device_name
from coserve.kernels import find_backend
from coserve.kernels.plain import PlainBackend
from coserve.models.backbone import Backbone
from coserve.models.weights import weight_tensors
from coserve.version import VERSION

# Gives seconds.
Clock = Callable[[], float]

# Read in one go to find the bandwidth; much larger than any cache.
_BUFFER_BYTES = 512 << 20
# Begins the profiler's notes of what was held elsewhere than by PyTorch.
_ELSEWHERE = "held elsewhere"


def best_dtype(device: torch.device) -> str:
    """What a machine's matrix units are made for: bfloat16 where it has instructions for it,
    float32 elsewhere.
    """
    if device.type == "cuda":
        return "bfloat16"
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
        return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
    return "bfloat16" if platform.machine() == "arm64" else "float32"


def describe(device: torch.device, threads: int | None = None) -> str:
    """The device in words; threads: of a model that runs elsewhere than in this process."""
    if device.type == "cuda":
        return device_name(device)
    plain = ", plain kernels" if type(find_backend(device)) is PlainBackend else ""
    return f"{device_name(device, threads)} of {os.cpu_count()}{plain}"


def versions(vllm: Path | None = None) -> str:
    """Of what ran: ours and what is compared with it, as far as it is installed. vllm: Python of
    its environment.
    """
    found = [f"coserve {VERSION}", f"Python {platform.python_version()}"]
    for name in ("torch", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join([*found, f"vLLM {vllm_version(vllm)}"] if vllm is not None else found)


def own_cores() -> tuple[int, ...]:
    """Return the numbers of the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def now_s(device: torch.device) -> float:
    """The time, with everything done that was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    start = now_s(device)
    run()
    return now_s(device) - start


def best_clock() -> tuple[str, Clock]:
    """In words, and what takes the time of a step that is done when its calls return: where one
    thread does all of it, the time in which that thread ran, which other processes lengthen least.
    """
    if torch.get_num_threads() == 1:
        return "CPU time of the one thread", time.thread_time
    return "wall clock", time.perf_counter


def seconds_of(run: Callable[[], object], clock: Clock) -> float:
    """Of one call, by a clock."""
    start_s = clock()
    run()
    return clock() - start_s


class PeakMemory:
    """Bytes that PyTorch holds at most within its context, beyond what it held before, with what is
    held elsewhere at the same time. num_bytes: known afterwards.
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
        """Bytes that were, since the last call or the start."""
        if self._is_cuda:
            found = torch.cuda.max_memory_allocated(self._device) - self._before
            self.num_bytes = max(self.num_bytes, found + num_bytes)
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
    """Bytes that PyTorch holds at most during a call, beyond what it held before."""
    with PeakMemory(device) as peak:
        run()
    return peak.num_bytes


def _events(profiled: profile) -> list[dict[str, Any]]:
    """In the order of time; the profiler tells of single allocations in the file alone that it
    writes.
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


def read_bytes_per_s(device: torch.device, clock: Clock | None = None) -> float:
    """Bandwidth of streaming reads: the fastest of a few sums over a large buffer; clock: see
    `best_clock`.
    """
    buffer = torch.ones(_BUFFER_BYTES // 4, device=device)
    buffer.sum()
    found = [
        time_s(buffer.sum, device) if clock is None else seconds_of(buffer.sum, clock)
        for _ in range(5)
    ]
    return _BUFFER_BYTES / min(found)


def weight_bytes(backbone: Backbone) -> int:
    """Bytes of weights that a forward pass reads: all but a table of embeddings that is not also
    the head.
    """
    weights = {
        tensor.data_ptr(): tensor.nbytes
        for part, held in backbone.weights.items()
        for tensor in weight_tensors(held)
        if part != "embed"
    }
    return sum(weights.values())
