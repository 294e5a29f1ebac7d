"""What tests read of recordings: the steps in them, and their frames as plain values."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from coserve.devices.messages.steps import StepBatch
from coserve.devices.process.wire import Call, framed
from coserve.devices.recording.device import read_frames


def steps_in(frames: Iterable[Any]) -> list[StepBatch]:
    """Return the steps that the device began."""
    return [
        frame.command
        for frame in frames
        if isinstance(frame, Call) and isinstance(frame.command, StepBatch)
    ]


def plain_frames(file: Path) -> list[Any]:
    """Return all frames of a file, as msgpack has them."""
    return [msgspec.msgpack.decode(frame) for frame in read_frames(file)]


def write_frames(file: Path, frames: Iterable[Any]) -> Path:
    """Write a file of such frames; returns it."""
    file.write_bytes(b"".join(map(framed, frames)))
    return file
