"""Settings of a device, as plain data that can be sent to another process, or written down."""

from collections.abc import Callable
from typing import Literal

import msgspec

from coserve.scheduling.profile import Profile

LoadProgress = Callable[[str, int, int], None]
"""Called during a start with its stage, how much of it is done, and of how much."""


class DeviceSettings(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Settings of a device and of the model on it."""

    model: str
    """Directory, hub id, or preset (see `coserve.models.source`)."""
    dtype: str = "auto"
    """Compute dtype: "float32", "bfloat16", "float16", or "auto" for the model's own."""
    weights: str = "dense"
    """Storage of the weights of linear layers: "dense" or "int8"."""
    device: str = "auto"
    """Name of the device, such as "cpu" or "cuda:0"; "auto": a GPU, if there is one."""
    seed: int = 0
    """Seed of random weights."""
    threads: int | None = None
    """Threads of the CPU; None: as many as PyTorch has."""
    max_positions: int | None = None
    """Length of the longest sequence (see `load_backbone`); None: the model's own."""
    memory_bytes: int | None = None
    """Bytes of the page pool; None: a share of what is free."""
    host_memory_bytes: int = 0
    """Bytes in host memory for pages that give way (`SwapOut`); 0: none."""
    block_tokens: int = 16
    """Tokens of a page."""
    profile: Profile | None = None
    """Profile of the device; None: from disk, or measured at the start."""
    deterministic: bool = False
    """Whether results are the same bit for bit in any company (see `EngineConfig`)."""
    may_be_provisional: bool = False
    """Whether a quick and cautious profile will do, which `MeasureDevice` replaces."""
    num_ranks: int = 1
    """Number of processes that hold the model together, each on a device of its own; `threads` and
    both memories are then those of each.
    """
    rank_timeout_s: float = 3600.0
    """Seconds for which a rank waits for another one before all of them are ended."""
    rank_transport: Literal["auto", "shared_memory", "torch_distributed"] = "auto"
    """How ranks exchange tensors; "auto": through shared memory on CPUs, by `torch.distributed` on
    GPUs."""
