"""The frames of a recording that the engine adds to those of its device, and the reader of a
recording's file.

A recording may come from anyone. Reading one therefore checks everything that later decides about
memory, files or code: commands are of fixed kinds, names of files come from a fixed set,
directories that a command names are never read, the device's sizes have bounds, and no grammar
counts as tried.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from coserve.devices.messages.commands import DeviceInfo
from coserve.devices.recording.device import DeviceFrame, Files, read_frames
from coserve.engine.commands import AddRequest, EngineCommand
from coserve.engine.config import EngineConfig
from coserve.errors import DataError
from coserve.settings import check_whole
from coserve.tuning.examples import Example

FORMAT = 5

_MAX_THREADS = 4096
_MAX_BLOCK_TOKENS = 1 << 16
# The engine keeps books of every page, also where the pages themselves take no memory.
_MAX_PAGES = 1 << 24
_MAX_TOKENS = 1 << 31
# The largest number in a profile: beyond it, sums of predicted times overflow.
_MAX_PROFILE_NUMBER = 1e30


class RecordingHeader(msgspec.Struct, tag="Header", frozen=True, kw_only=True):
    """The first frame of a recording: the format, the device, and the engine's configuration."""

    format: int
    """Version of the format."""
    info: DeviceInfo
    """Description of the device."""
    config: EngineConfig
    """Configuration of the engine."""
    end_tokens: tuple[int, ...]
    """Ids that end every request."""
    has_tokenizer: bool
    """Whether the engine had a tokenizer, and so text and stop strings."""


class ReadFiles(msgspec.Struct, tag="Read", frozen=True, kw_only=True):
    """Contents of files that the command in the next frame has read; a replay reads no others."""

    directories: tuple[Files, ...] = ()
    """Files of the directories that the command names, in its order."""
    version: str = ""
    """Key of the adapter's version, where a thread has read the adapter beside steps."""
    examples: list[Example] = []
    """Training examples of a job that starts."""
    validation: list[Example] = []
    """Validation examples of a job that starts."""


Frame = DeviceFrame | EngineCommand | ReadFiles


def read_recording(path: str | Path) -> tuple[RecordingHeader, Iterator[Frame]]:
    """Read a recording's header, and return it with an iterator over the other frames.

    Raises:
        DataError: the file is not a recording, or its device cannot exist. The iterator raises it
            at a frame that is damaged.
    """
    try:
        frames = read_frames(path)
        header = msgspec.msgpack.decode(next(frames, b""), type=RecordingHeader)
        _check_device(header.info)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a recording of `coserve up --record`: {error}") from None
    if header.format != FORMAT:
        raise DataError(
            f"{path} is a recording of format {header.format}; this version reads format {FORMAT}"
        )
    return header, _frames(path, frames)


def _frames(path: str | Path, frames: Iterable[bytes]) -> Iterator[Frame]:
    """Decode the frames after the header; DataError names the one that is damaged."""
    decode = msgspec.msgpack.Decoder(Frame).decode
    for number, frame in enumerate(frames, 2):
        try:
            yield _with_untried_grammar(decode(frame))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is damaged at frame {number}: {error}") from None


def _with_untried_grammar(frame: Frame) -> Frame:
    """Return a frame whose grammar, if it has one, must pass a sandbox here before it is compiled.

    Its measured bytes say that it has passed one, and the writer of the file may have made them up.
    """
    if not isinstance(frame, AddRequest) or frame.params.grammar is None:
        return frame
    grammar = replace(frame.params.grammar, num_bytes=0)
    return msgspec.structs.replace(frame, params=replace(frame.params, grammar=grammar))


def _check_device(info: DeviceInfo) -> None:
    """Raise ValueError for sizes that no device has, which would take memory or time before
    anything is compared.
    """
    for name, least, most in (
        ("threads", 1, _MAX_THREADS),
        ("vocab_size", 1, _MAX_TOKENS),
        ("max_positions", 1, _MAX_TOKENS),
        ("num_pages", 1, _MAX_PAGES),
        ("num_host_pages", 0, _MAX_PAGES),
        ("page_bytes", 1, _MAX_TOKENS),
        ("whole_page_bytes", 0, _MAX_TOKENS),
        ("block_tokens", 1, _MAX_BLOCK_TOKENS),
        ("num_state_pages", 0, _MAX_PAGES),
        ("num_units", 1, _MAX_THREADS),
    ):
        check_whole(name, getattr(info, name), least, most)
    _check_numbers("profile", msgspec.to_builtins(info.profile))


def _check_numbers(where: str, value: Any) -> None:
    """Raise ValueError for a number that is not finite or too large: predictions would be
    meaningless.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(f"{where}.{name}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(where, inner)
    elif isinstance(value, int | float) and not (
        isfinite(value) and abs(value) <= _MAX_PROFILE_NUMBER
    ):
        raise ValueError(
            f"{where} must have finite numbers of at most {_MAX_PROFILE_NUMBER:g}, not {value!r}"
        )
