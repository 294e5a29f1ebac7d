"""Facts about the machine, clocks, and peak memory, for measurements."""

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

# Returns seconds.
Clock = Callable[[], float]

# Bytes that are read to measure the bandwidth; much larger than any cache.
_BUFFER_BYTES = 512 << 20
# Prefix of the profiler's records of memory that PyTorch does not hold.
_ELSEWHERE = "held elsewhere"


def best_dtype(device: torch.device) -> str:
    """Return the dtype that a device's matrix units are made for: bfloat16 with instructions for
    it, else float32.
    """
    if device.type == "cuda":
        return "bfloat16"
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
        return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
    return "bfloat16" if platform.machine() == "arm64" else "float32"


def describe(device: torch.device, threads: int | None = None) -> str:
    """Return the device in words.

    Args:
        device: The device.
        threads: CPU threads of a model in another process; None: those of this process.
    """
    if device.type == "cuda":
        return device_name(device)
    plain = ", plain kernels" if type(find_backend(device)) is PlainBackend else ""
    return f"{device_name(device, threads)} of {os.cpu_count()}{plain}"


def versions(vllm: Path | None = None) -> str:
    """Return the versions of coserve and of what it is compared with, as far as it is installed.

    Args:
        vllm: Python of an environment with vLLM.
    """
    names = [f"coserve {VERSION}", f"Python {platform.python_version()}"]
    for name in ("torch", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            names.append(f"{name} {version(name)}")
    return ", ".join([*names, f"vLLM {vllm_version(vllm)}"] if vllm is not None else names)


def own_cores() -> tuple[int, ...]:
    """Return the numbers of the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def now_s(device: torch.device) -> float:
    """Return the time once the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call."""
    start = now_s(device)
    run()
    return now_s(device) - start


def best_clock() -> tuple[str, Clock]:
    """Return the name and the function of the best clock for steps that are done when their calls
    return.

    If one thread does all work, that is its CPU time, which other processes lengthen least.
    """
    if torch.get_num_threads() == 1:
        return "CPU time of the one thread", time.thread_time
    return "wall clock", time.perf_counter


def seconds_of(run: Callable[[], object], clock: Clock) -> float:
    """Return the seconds of a call, by a clock."""
    start_s = clock()
    run()
    return clock() - start_s


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


def read_bytes_per_s(device: torch.device, clock: Clock | None = None) -> float:
    """Return the bandwidth of streaming reads: the fastest of a few sums over a large buffer.

    Args:
        device: The device.
        clock: Clock of `best_clock`; None: the wall clock.
    """
    buffer = torch.ones(_BUFFER_BYTES // 4, device=device)
    buffer.sum()
    times_s = [
        time_s(buffer.sum, device) if clock is None else seconds_of(buffer.sum, clock)
        for _ in range(5)
    ]
    return _BUFFER_BYTES / min(times_s)


def weight_bytes(backbone: Backbone) -> int:
    """Return the bytes of weights that a forward pass reads: all but a table of embeddings that is
    not also the head.
    """
    weights = {
        tensor.data_ptr(): tensor.nbytes
        for part, held in backbone.weights.items()
        for tensor in weight_tensors(held)
        if part != "embed"
    }
    return sum(weights.values())
