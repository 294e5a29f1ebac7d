"""Devices of torch, with a page pool of the right size and the profile of the model there."""

from collections.abc import Callable

from coserve.devices.process_memory import pool_bytes
from coserve.devices.profiling import load_profile
from coserve.devices.torch_device import TorchDevice
from coserve.errors import BudgetError
from coserve.memory.paged_kv import kv_page_bytes
from coserve.models.backbone import Backbone
from coserve.scheduling.latency import Profile


def torch_device(
    backbone: Backbone,
    *,
    memory_bytes: int | None = None,
    block_tokens: int = 16,
    profile: Profile | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TorchDevice:
    """A device in this process.

    Args:
        memory_bytes: of the page pool; None: a share of what is free.
        profile: None: from disk, or measured now, which takes some seconds.
        progress: told how many measurements are done, and of about how many.

    Raises:
        BudgetError: memory_bytes is too little for a request. DeviceMemoryError: there is not so much.
    """
    page_bytes = kv_page_bytes(backbone, block_tokens)
    num_pages = (memory_bytes or pool_bytes(backbone.device)) // page_bytes
    if num_pages < 2:
        raise BudgetError(f"the page pool needs {2 * page_bytes} bytes or more, for two pages")
    profile = profile or load_profile(backbone, progress=progress)
    return TorchDevice(backbone, num_pages=num_pages, block_tokens=block_tokens, profile=profile)
