"""Opens the device of an engine: torch in this process, or a group of ranks, each a process of its own."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from coserve.devices.base import Device
from coserve.devices.rank_process import StartProcess, start_program
from coserve.devices.settings import DeviceSettings, LoadProgress
from coserve.engine.config import EngineConfig
from coserve.models.source import ModelSource
from coserve.settings import check_whole

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from coserve.models.backbone import Backbone


def open_device_of(
    source: ModelSource,
    settings: DeviceSettings,
    progress: LoadProgress | None,
    start_rank: StartProcess = start_program,
) -> Device:
    """Load a model that has been found, in this process or on as many ranks as the settings say.

    Args:
        source: the settings' model.
        progress: told what is being done, how much of it is done, and how much there is.
        start_rank: starts the process of a rank.

    Raises:
        ModelError: the device is not there, or the model cannot be used on it; or there are too few devices for the
            ranks. ValueError: the number of threads. BudgetError, DeviceMemoryError: see `device_on`.
    """
    import torch

    from coserve.devices.loading import prepare_kernels
    from coserve.devices.rank_places import check_places, crowding
    from coserve.models.backbone import build_backbone, find_device

    if settings.threads is not None:
        check_whole("threads", settings.threads, 1)
    check_places(settings.num_ranks, settings.device)
    if settings.num_ranks > 1:
        from coserve.devices.group_device import GroupDevice

        group = GroupDevice(settings, progress, start=start_rank)
        if group.info.device == "cpu" and (warning := crowding(settings.num_ranks, group.info.threads)):
            _log.warning("%s", warning)
        return group
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    place = find_device(settings.device)
    prepare_kernels(place, progress)
    backbone = build_backbone(
        source,
        dtype=settings.dtype,
        weight_format=settings.weights,
        device=place,
        seed=settings.seed,
        max_positions=settings.max_positions,
        progress=_stage(progress, "loading weights"),
    )
    return device_on(backbone, settings, progress)


def device_on(backbone: "Backbone", settings: DeviceSettings, progress: LoadProgress | None) -> Device:
    """Return a device in this process on a model that is loaded; of the settings, memory, pages and profile count.

    Raises:
        BudgetError: memory_bytes is too little for a request, or host_memory_bytes for a page. DeviceMemoryError.
    """
    from coserve.devices.loading import torch_device

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


def device_settings(config: EngineConfig, model: str) -> DeviceSettings:
    """Return what an engine's config says of its device."""
    return DeviceSettings(
        model=model,
        memory_bytes=config.memory_bytes,
        host_memory_bytes=config.host_memory_bytes,
        block_tokens=config.block_tokens,
        deterministic=config.deterministic,
        num_ranks=config.tensor_parallel,
    )


def _stage(progress: LoadProgress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(stage, done, total)
