"""`coserve replay`: runs a recording of `coserve up --record` again."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coserve.errors import DataError

if TYPE_CHECKING:
    from coserve.devices.base import Device
    from coserve.engine.recorded_lines import RecordingHeader


class On(StrEnum):
    """Device that a recording is run on."""

    torch = "torch"
    process = "process"
    modelled = "modelled"


def replay(
    file: Annotated[Path, typer.Argument(help="Recording that coserve up --record has written.")],
    device: Annotated[
        On,
        typer.Option(
            help=(
                "torch; process: torch in another process; modelled: compare plans only, "
                "without a model."
            )
        ),
    ] = On.torch,
) -> None:
    """Run a recording again, and compare the plans, tokens and losses.

    The engine plans anew from the recorded commands, clock and results; the device does the same
    work. Plans must be equal on every machine; tokens and losses must be equal in float32 on the
    same kind of device.

    FILE need not be trusted: it is read as data, and only a temporary directory is written to. The
    model that it names must be on this machine; nothing is downloaded.

    The last line is JSON: steps, plans_equal, tokens_equal, max_loss_difference (null on a device
    that has no tokens or losses of its own). The status is 1 if plans or tokens differ.
    """
    from coserve.engine.recorded_lines import read_recording
    from coserve.engine.replay import replay as run
    from coserve.engine.replay import with_models_here

    header, lines = read_recording(file)
    header = with_models_here(header)
    opened = _open(header, device)
    try:
        report = run(header, lines, opened)
    finally:
        opened.close()
    if report.diverged is not None:
        print(f"after {report.steps} equal steps: {report.diverged}", file=sys.stderr)
    has_numbers = device is not On.modelled
    line = {
        "steps": report.steps,
        "plans_equal": report.plans_equal,
        "tokens_equal": report.tokens_equal if has_numbers else None,
        "max_loss_difference": report.max_loss_difference if has_numbers else None,
    }
    print(json.dumps(line))
    if not report.plans_equal or line["tokens_equal"] is False:
        raise typer.Exit(1)


def _open(header: "RecordingHeader", device: On) -> "Device":
    """Open the recorded device, or one like it."""
    from coserve.devices.settings import DeviceSettings

    info = header.info
    if device is On.modelled:
        from coserve.models.backbone import load_backbone
        from coserve.simulate.modelled_device import ModelledDevice

        backbone = load_backbone(
            info.model, dtype=info.dtype, device="meta", max_positions=info.max_positions
        )
        return ModelledDevice(
            backbone,
            info.profile,
            num_pages=info.num_pages,
            block_tokens=info.block_tokens,
            num_host_pages=info.num_host_pages,
        )
    _check_before_loading(header)
    settings = DeviceSettings(
        model=info.model,
        dtype=info.dtype,
        weights=info.weights,
        device=info.device,
        threads=info.threads,
        max_positions=info.max_positions,
        memory_bytes=info.num_pages * info.place_bytes,
        host_memory_bytes=info.num_host_pages * info.place_bytes,
        block_tokens=info.block_tokens,
        profile=info.profile,
        deterministic=info.deterministic,
    )
    if device is On.process:
        from coserve.devices.process.device import ProcessDevice

        return ProcessDevice(settings)
    from coserve.devices.loading import open_device

    return open_device(settings)


def _check_before_loading(header: "RecordingHeader") -> None:
    """Check, before any memory is taken, that the recorded device fits the model and this machine.

    Raises:
        DataError: The recorded device is not one of the model's, or needs more memory than is free.
    """
    from coserve.devices.counting import device_info
    from coserve.devices.torch.process_memory import available_bytes
    from coserve.engine.replay import check_same_device
    from coserve.models.backbone import find_device, load_backbone

    recorded, place = header.info, find_device(header.info.device)
    info = device_info(
        load_backbone(
            recorded.model,
            dtype=recorded.dtype,
            weights=recorded.weights,
            device="meta",
            max_positions=recorded.max_positions,
        ),
        num_pages=recorded.num_pages,
        block_tokens=recorded.block_tokens,
        threads=recorded.threads,
        profile=recorded.profile,
        num_host_pages=recorded.num_host_pages,
    )
    check_same_device(recorded, info)
    on_device = info.weight_bytes + info.num_pages * info.page_bytes
    on_host = info.num_host_pages * info.page_bytes + (on_device if place.type == "cpu" else 0)
    for device, num_bytes in ((place, on_device), (find_device("cpu"), on_host)):
        if num_bytes > (there := available_bytes(device)):
            raise DataError(
                f"the recorded device takes {num_bytes:,} bytes of memory ({device.type}), and "
                f"{there:,} are free "
                "here; --device modelled takes none"
            )
