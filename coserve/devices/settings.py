"""What a device is to be: plain data, so that it can be told to another process, or written
down.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from coserve.scheduling.profile import Profile

# Told what a start is at, how much of it is done, and of how much.
LoadProgress = Callable[[str, int, int], None]


class DeviceSettings(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A model on a device.

    model: a directory, a hub id, or a preset (see `coserve.models.source`). dtype: "float32",
    "bfloat16", "float16", or "auto" for the model's own. weights: how those of linear layers are
    stored: "dense" or "int8". device: such as "cpu" or "cuda:0"; "auto" takes a GPU if there is
    one. seed: of random weights. threads: of the CPU; None: those that PyTorch has. max_positions:
    see `load_backbone`. memory_bytes: of the page pool; None: a share of what is free.
    block_tokens: tokens of a page. host_memory_bytes: for pages that give way (`SwapOut`); 0: none.
    profile: None: from disk, or measured at the start. deterministic: see `EngineConfig`.
    num_ranks: processes that hold the model together, each on a device of its own; then `threads`
    and both memories are those of each. rank_timeout_s: for which a rank waits for another one
    before all of them are ended.
    """

    model: str
    dtype: str = "auto"
    weights: str = "dense"
    device: str = "auto"
    seed: int = 0
    threads: int | None = None
    max_positions: int | None = None
    memory_bytes: int | None = None
    host_memory_bytes: int = 0
    block_tokens: int = 16
    profile: Profile | None = None
    deterministic: bool = False
    may_be_provisional: bool = False
    """Whether a quick and cautious profile will do, which `MeasureDevice` replaces."""
    num_ranks: int = 1
    rank_timeout_s: float = 3600.0
    rank_transport: Literal["auto", "shared_memory", "torch_distributed"] = "auto"
    """How ranks exchange tensors; "auto": through shared memory on CPUs, by `torch.distributed` on
    GPUs."""
