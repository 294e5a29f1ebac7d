"""Loading of a device: the model's weights, a page pool of the right size, the profile."""

from collections.abc import Callable

import torch

from coserve.devices.profiles.kept import load_profile, profile_path, profile_to_start_with
from coserve.devices.settings import DeviceSettings, LoadProgress
from coserve.devices.torch.adapter_memory import room_for_a_job
from coserve.devices.torch.device import TorchDevice
from coserve.devices.torch.process_memory import pool_bytes
from coserve.errors import BudgetError
from coserve.kernels import prepare_backends
from coserve.kernels.groups.base import RankGroup
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.memory.tensors.paged_states import num_state_pages
from coserve.models.backbone import Backbone, build_backbone, find_device
from coserve.models.source import ModelSource, find_fetched, find_model
from coserve.scheduling.profile import Profile


def open_device(
    settings: DeviceSettings,
    progress: LoadProgress | None = None,
    *,
    source: ModelSource | None = None,
    group: RankGroup | None = None,
) -> TorchDevice:
    """Load a model in this process, and take the memory.

    The first start on a device measures its profile, which takes some seconds.

    Args:
        settings: The same on all ranks of a group.
        progress: Called with the progress.
        source: The settings' model, if it has been found already.
        group: This process's rank of a model that several processes hold together; all ranks call
            this.

    Raises:
        ModelError: There is no such model or device, or it cannot be used.
        BudgetError: memory_bytes is too little.
        DeviceMemoryError: There is too little memory.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = find_device(settings.device)
    prepare_kernels(device, progress)
    if source is None:
        source = (
            find_model(settings.model) if settings.num_ranks == 1 else find_fetched(settings.model)
        )
    backbone = build_backbone(
        source,
        dtype=settings.dtype,
        device=device,
        seed=settings.seed,
        weight_format=settings.weights,
        max_positions=settings.max_positions,
        progress=_stage(progress, "loading weights"),
        group=group,
    )
    return device_on(backbone, settings, progress)


def device_on(
    backbone: Backbone, settings: DeviceSettings, progress: LoadProgress | None
) -> TorchDevice:
    """Return a device in this process on a model that is loaded.

    Of the settings, memory, pages and profile count.

    Raises:
        BudgetError: memory_bytes is too little for a request, or host_memory_bytes for a page.
        DeviceMemoryError: There is too little memory.
    """
    return torch_device(
        backbone,
        memory_bytes=settings.memory_bytes,
        host_memory_bytes=settings.host_memory_bytes,
        block_tokens=settings.block_tokens,
        profile=settings.profile,
        deterministic=settings.deterministic,
        may_be_provisional=settings.may_be_provisional,
        progress=_stage(progress, "measuring this device"),
    )


def prepare_kernels(device: torch.device, progress: LoadProgress | None = None) -> None:
    """Compile the kernels of a device, if that was not done before on this machine."""
    prepare_backends(device, _stage(progress, "compiling kernels"))
    if progress is not None:
        progress("loading weights", 0, 0)


def torch_device(
    backbone: Backbone,
    *,
    memory_bytes: int | None = None,
    host_memory_bytes: int = 0,
    block_tokens: int = 16,
    profile: Profile | None = None,
    deterministic: bool = False,
    may_be_provisional: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> TorchDevice:
    """Return a device in this process, on a model that is loaded.

    Args:
        backbone: The model.
        memory_bytes: Bytes of the page pool; None: a share of what is free. Where ranks hold the
            model together it is the bytes on the device of each; ranks on one CPU take their sum of
            its memory.
        host_memory_bytes: See `EngineConfig`.
        block_tokens: Tokens of a page.
        profile: Profile of the device; None: from disk, or measured now, which takes some seconds.
        deterministic: See `EngineConfig`.
        may_be_provisional: Whether a quick and cautious profile will do, which `MeasureDevice`
            replaces.
        progress: Called with the number of finished measurements and about how many there are.

    Raises:
        BudgetError: memory_bytes is too little for a request, or host_memory_bytes for a page.
        DeviceMemoryError: There is less memory than that.
    """
    backbone = backbone.deterministic(is_so=deterministic)
    page_bytes = kv_page_bytes(backbone, block_tokens)
    num_pages = (memory_bytes or _pool_bytes(backbone)) // page_bytes
    if num_pages < (least := 2 + num_state_pages(backbone.local, page_bytes)):
        what = (
            "two pages"
            if least == 2
            else f"{least} pages, of which a request's states fill {least - 2}"
        )
        raise BudgetError(f"the page pool needs {least * page_bytes} bytes or more, for {what}")
    if 0 < host_memory_bytes < page_bytes:
        raise BudgetError(f"host memory needs {page_bytes} bytes or more, for a page; 0 is none")
    path, is_provisional = "" if profile else str(profile_path(backbone)), False
    if profile is None and may_be_provisional:
        profile, is_provisional = profile_to_start_with(backbone, progress=progress)
    profile = profile or load_profile(backbone, progress=progress)
    return TorchDevice(
        backbone,
        num_pages=num_pages,
        num_host_pages=host_memory_bytes // page_bytes,
        block_tokens=block_tokens,
        profile=profile,
        profile_path=path,
        is_provisional=is_provisional,
    )


def _pool_bytes(backbone: Backbone) -> int:
    """Return the bytes for the page pool; of several ranks the bytes that the fullest device can
    bear.

    All ranks have loaded their weights when the first one looks, and none has taken its pool when
    the last one does.
    """
    group = backbone.group
    group.barrier()
    return group.agree_min(pool_bytes(backbone.device, room_for_a_job(backbone), group.size))


def _stage(progress: LoadProgress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(stage, done, total)
