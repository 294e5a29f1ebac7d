"""Opening of an engine's device: torch in this process, or a group of ranks, each a process of its
own.
"""

import logging

from coserve.devices.base import Device
from coserve.devices.process.child import StartProcess, start_program
from coserve.devices.settings import DeviceSettings, LoadProgress
from coserve.engine.config import EngineConfig
from coserve.models.source import ModelSource
from coserve.settings import check_whole

_log = logging.getLogger(__name__)


def open_device_of(
    source: ModelSource,
    settings: DeviceSettings,
    progress: LoadProgress | None,
    start_rank: StartProcess = start_program,
) -> Device:
    """Load a model that has been found, in this process or on as many ranks as the settings say.

    Args:
        source: The settings' model.
        progress: Called with what is being done, how much of it is done, and how much there is.
        start_rank: Starts the process of a rank.

    Raises:
        ModelError: the device is not there, or the model cannot be used on it; or there are too few
            devices for the ranks.
        ValueError: the number of threads is not valid.
        BudgetError: see `coserve.devices.loading.open_device`.
        DeviceMemoryError: see `coserve.devices.loading.open_device`.
    """
    from coserve.devices.ranks.places import check_places, crowding

    if settings.threads is not None:
        check_whole("threads", settings.threads, 1)
    check_places(settings.num_ranks, settings.device)
    if settings.num_ranks > 1:
        from coserve.devices.ranks.group_device import GroupDevice

        group = GroupDevice(settings, progress, start=start_rank)
        if group.info.device == "cpu" and (
            warning := crowding(settings.num_ranks, group.info.threads)
        ):
            _log.warning("%s", warning)
        return group
    from coserve.devices.loading import open_device

    return open_device(settings, progress, source=source)


def device_settings(config: EngineConfig, model: str) -> DeviceSettings:
    """Return the device's settings by an engine's configuration."""
    return DeviceSettings(
        model=model,
        memory_bytes=config.memory_bytes,
        host_memory_bytes=config.host_memory_bytes,
        block_tokens=config.block_tokens,
        deterministic=config.deterministic,
        num_ranks=config.tensor_parallel,
    )
