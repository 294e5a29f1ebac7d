"""Files that the ranks of a group write together, each its own pieces, without waiting for one
another.

Every rank opens the same files and writes its pieces in place. Until all have, a file has a name
that nothing reads (`pending`). The process that has given the command waits for all ranks, and then
gives the files their names (`named_when_written`); where one rank failed, none of the files
appears.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from coserve.kernels.groups.base import Ranks
from coserve.models.regions import Blocks

_PENDING = ".written-by-ranks"
# Types in the order of tensors in a safetensors file: the widest first.
_TYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(_NAMES)}


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor of a file that ranks write together."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Dtype in the file."""
    blocks: Blocks
    """Function that yields what this rank writes of the tensor."""


def write_shared_tensors(path: Path, tensors: Mapping[str, FileTensor], ranks: Ranks) -> None:
    """Write this rank's pieces of a safetensors file, which is durable but has no name yet; see the
    module.

    Args:
        path: name of the file once it is whole.
        tensors: all tensors of the file, the same on every rank but for their blocks.
        ranks: which rank this is.

    Raises:
        OSError: it cannot be written.
    """
    header, starts, num_bytes = _header(tensors)
    descriptor = os.open(pending(path), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        # Every rank sets the same size, so that nothing written is cut off.
        os.ftruncate(descriptor, num_bytes)
        if ranks.rank == 0:
            _write_at(descriptor, memoryview(header), 0)
        for name, tensor in tensors.items():
            for block in tensor.blocks():
                rows = block.rows.detach().to("cpu", tensor.dtype).contiguous()
                content = rows.view(torch.uint8).reshape(-1).numpy().data
                length = len(content) // len(block.starts)
                for row, start in enumerate(block.starts):
                    place = starts[name] + start * tensor.dtype.itemsize
                    _write_at(descriptor, content[row * length : (row + 1) * length], place)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_shared_bytes(path: Path, content: bytes, ranks: Ranks) -> None:
    """Write a small file on rank 0; other ranks do nothing.

    Raises:
        OSError: it cannot be written.
    """
    if ranks.rank == 0:
        with pending(path).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def pending(path: Path) -> Path:
    """Return the name of a file until all ranks have written it."""
    return path.with_name(path.name + _PENDING)


@contextmanager
def named_when_written(directory: Path) -> Iterator[None]:
    """Give the files that ranks write in a directory their names once the context ends without an
    error, with which all ranks must be done. After an error they are removed, as are those of an
    earlier writer.
    """
    _remove_pending(directory)
    try:
        yield
    except BaseException:
        _remove_pending(directory)
        raise
    found = _pending_in(directory)
    # The file that marks a directory as an adapter or a model comes last.
    for path in sorted(found, key=lambda path: (path.name.endswith(f".json{_PENDING}"), path.name)):
        path.replace(path.with_name(path.name.removesuffix(_PENDING)))
    if found:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def torch_type(name: str) -> torch.dtype | None:
    """Return the dtype of safetensors' name; None for one that is not written here."""
    return _TYPES.get(name)


def _pending_in(directory: Path) -> list[Path]:
    return list(directory.glob(f"*{_PENDING}"))


def _remove_pending(directory: Path) -> None:
    for path in _pending_in(directory):
        path.unlink(missing_ok=True)


def _header(tensors: Mapping[str, FileTensor]) -> tuple[bytes, dict[str, int], int]:
    """Return the bytes before the tensors, the first byte of each tensor, and the size of the file.

    The layout is that of safetensors itself.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = dict[str, tuple[int, int]]()
    end = 0
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name)):
        tensor, start = tensors[name], end
        end += prod(tensor.shape) * tensor.dtype.itemsize
        ends[name] = start, end
        fields[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    content = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    first = 8 + len(content)
    header = len(content).to_bytes(8, "little") + content
    return header, {name: first + start for name, (start, _) in ends.items()}, first + end


def _write_at(descriptor: int, content: memoryview, start: int) -> None:
    """Write all of some bytes; the system may take a part at a time."""
    while content:
        written = os.pwrite(descriptor, content, start)
        content, start = content[written:], start + written
