"""Facts about the machine, and clocks, for measurements."""

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

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
