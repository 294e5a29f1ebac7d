"""The lines of a recording that say what an engine was asked, and the reader of a recording's file.

A recording may come from anyone. Reading one therefore checks everything that later decides about memory, files or
code: names of files and methods come from fixed sets, the device's sizes have bounds, and no grammar counts as tried.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from coserve.devices.messages import DeviceInfo
from coserve.devices.recording import DeviceLine, read_frames
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.request_queue import ImportedBlocks
from coserve.errors import DataError
from coserve.scheduling.slo import Slo
from coserve.settings import check_whole
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

FORMAT = 4
# The files that a directory of an adapter or a checkpoint may have in a recording. Replaying writes them to a
# directory, so any other name is an error of the recording.
FileName = Literal["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "job.json"]
FILE_NAMES: tuple[FileName, ...] = get_args(FileName)
Files = dict[FileName, bytes]

_MAX_THREADS = 4096
_MAX_BLOCK_TOKENS = 1 << 16
# The engine keeps books of every page, also where the pages themselves take no memory.
_MAX_PAGES = 1 << 24
_MAX_TOKENS = 1 << 31
# The largest number in a profile: beyond it, sums of predicted times overflow.
_MAX_PROFILE_NUMBER = 1e30


class Header(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first frame of a recording: the format, the device, and the engine's configuration."""

    format: int
    info: DeviceInfo
    config: EngineConfig
    end_tokens: tuple[int, ...]
    has_tokenizer: bool


# -- what an engine is asked: the arguments of its methods ---------------------------------


class Step(msgspec.Struct, tag="step", frozen=True):
    """A call of `TokenEngine.step`."""


class AddTokens(msgspec.Struct, tag="add_tokens", frozen=True, kw_only=True):
    """A call of `TokenEngine.add_tokens`."""

    prompt: list[int]
    params: SamplingParams
    adapter: str | None
    slo: Slo | None
    request_id: str | None
    arrival_s: float | None
    tenant: str
    priority: int = 0
    batch_due_s: float | None = None
    without_jobs: bool = False


class UseVocabulary(msgspec.Struct, tag="use_vocabulary", frozen=True):
    """A call of `TokenEngine.use_vocabulary`."""

    pieces: tuple[bytes, ...]
    special: tuple[int, ...]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """A call of `TokenEngine.cancel`."""

    request: str


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """A call of `TokenEngine.stop`."""

    request: str
    index: int
    num_tokens: int


class Hold(msgspec.Struct, tag="hold", frozen=True):
    """A call of `TokenEngine.hold`."""

    request: str


class Arrive(msgspec.Struct, tag="arrive", frozen=True):
    """A call of `TokenEngine.arrive`."""

    request: str
    blocks: ImportedBlocks | None


class FlushCommands(msgspec.Struct, tag="flush_commands", frozen=True):
    """A call of `TokenEngine.flush_commands`, also where a command follows that recordings leave out."""


class SaveVersion(msgspec.Struct, tag="save_adapter", frozen=True):
    """A call of `TokenEngine.save_adapter`, which writes nothing when it is replayed."""

    label: str


class FinishLoad(msgspec.Struct, tag="finish_load", frozen=True):
    """A call of `TokenEngine.finish_load`; key: of the version."""

    name: str
    key: str
    files: Files


class LoadFiles(msgspec.Struct, tag="load_adapter", frozen=True):
    """A call of `TokenEngine.load_adapter`."""

    name: str
    files: Files
    model: str = ""


class EnsureFiles(msgspec.Struct, tag="ensure_adapter", frozen=True):
    """A call of `TokenEngine.ensure_adapter`; there are no files if the engine has the adapter."""

    name: str
    files: Files
    model: str = ""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """A call of `TokenEngine.unload_adapter`."""

    name: str


class SubmitExamples(msgspec.Struct, tag="submit_examples", frozen=True, kw_only=True):
    """A call of `TokenEngine.submit_examples`; checkpoint: its files."""

    examples: list[Example]
    config: TuningConfig
    adapter: dict[str, Any] | str | None
    name: str | None
    validation: list[Example]
    job_id: str | None
    checkpoint: Files | None
    tenant: str
    alone_until_step: int = 0
    model: str = ""


JobMethod = Literal["pause_job", "resume_job", "cancel_job", "forget_job", "checkpoint"]


class OnJob(msgspec.Struct, tag="on_job", frozen=True):
    """A call of one of the methods of `TokenEngine` that take a job's id alone."""

    method: JobMethod
    job: str


# fmt: off
Input = (
    Step | AddTokens | UseVocabulary | Cancel | Stop | Hold | Arrive
    | LoadFiles | EnsureFiles | FinishLoad | UnloadAdapter | SubmitExamples | OnJob
    | FlushCommands | SaveVersion
)
# fmt: on


def read_recording(path: str | Path) -> tuple[Header, Iterator[DeviceLine | Input]]:
    """Read a recording's header, and return it with an iterator over the lines.

    Raises:
        DataError: the file is not a recording, or its device cannot exist. The iterator raises it at a line that is
            damaged.
    """
    try:
        frames = read_frames(path)
        header = msgspec.msgpack.decode(next(frames, b""), type=Header)
        _check_device(header.info)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no recording of `coserve up --record`: {error}") from None
    if header.format != FORMAT:
        raise DataError(f"{path} is a recording of format {header.format}; this version reads format {FORMAT}")
    return header, _lines(path, frames)


def _lines(path: str | Path, frames: Iterable[bytes]) -> Iterator[DeviceLine | Input]:
    """Decode the frames after the header; DataError names the one that is damaged."""
    decode = msgspec.msgpack.Decoder(DeviceLine | Input).decode
    for number, frame in enumerate(frames, 2):
        try:
            yield _with_untried_grammar(decode(frame))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is damaged at frame {number}: {error}") from None


def _with_untried_grammar(line: DeviceLine | Input) -> DeviceLine | Input:
    """Return a line whose grammar, if it has one, must pass a sandbox here before it is compiled.

    Its measured bytes say that it has passed one, and the writer of the file may have made them up.
    """
    if not isinstance(line, AddTokens) or line.params.grammar is None:
        return line
    grammar = replace(line.params.grammar, num_bytes=0)
    return msgspec.structs.replace(line, params=replace(line.params, grammar=grammar))


def _check_device(info: DeviceInfo) -> None:
    """Raise ValueError for sizes that no device has, which would take memory or time before anything is compared."""
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
    """Raise ValueError for a number that is not finite or too large: predictions would be meaningless."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(f"{where}.{name}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(where, inner)
    elif isinstance(value, int | float) and not (isfinite(value) and abs(value) <= _MAX_PROFILE_NUMBER):
        raise ValueError(f"{where} must have finite numbers of at most {_MAX_PROFILE_NUMBER:g}, not {value!r}")
