"""Weights that stay in a checkpoint's files: mapped into memory's address space, read from disk
where they are touched, and dropped again.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coserve.errors import UnsupportedModelError, WeightsError
from coserve.models.base import HEAD, Architecture, Part
from coserve.models.files import some_of
from coserve.models.stored import AsItIs
from coserve.models.weights import check_tied_head, find_weights, stored_head

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class MappedFile:
    """A safetensors file (its format: `coserve.adapters.tensor_files`), which must not be changed
    while it is mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                # Private, so that PyTorch may take it for memory that can be written; nobody does.
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path} cannot be mapped into memory: {error}") from None
        length = int.from_bytes(self.map[:8], "little")
        self._first, self._fields = 8 + length, json.loads(self.map[8 : 8 + length])

    def tensor(self, name: str) -> "MappedTensor":
        """Return a tensor of the file.

        Raises:
            WeightsError: its type is not supported.
        """
        fields = self._fields[name]
        if fields["dtype"] not in _DTYPES:
            raise WeightsError(
                f"{self.path}: {name} is {fields['dtype']}; it must be one of {', '.join(_DTYPES)}"
            )
        start, end = (self._first + offset for offset in fields["data_offsets"])
        dtype = _DTYPES[fields["dtype"]]
        flat = torch.frombuffer(
            self.map, dtype=dtype, count=(end - start) // dtype.itemsize, offset=start
        )
        return MappedTensor(file=self, start=start, end=end, tensor=flat.view(fields["shape"]))

    def check_is_whole(self) -> None:
        """Check that the file has not become shorter: the missing part could not be read, and would
        end the process.

        Raises:
            WeightsError: it has.
        """
        try:
            num_bytes = self.path.stat().st_size
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read any more: {error}") from None
        if num_bytes < self.num_bytes:
            raise WeightsError(
                f"{self.path} had {self.num_bytes:,} bytes, and has {num_bytes:,} now; fetch it "
                f"again"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class MappedTensor:
    """Bytes [start, end) of a file as a tensor, in the checkpoint's dtype."""

    file: MappedFile
    """The file."""
    start: int
    """First byte."""
    end: int
    """Byte after the last one."""
    tensor: Tensor
    """The tensor."""

    def expect(self) -> None:
        """Have the system begin to read it."""
        self._advise(mmap.MADV_WILLNEED)

    def drop(self) -> None:
        """Release its memory in this process; it is read again where it is touched."""
        self._advise(mmap.MADV_DONTNEED)

    def _advise(self, advice: int) -> None:
        first = self.start - self.start % mmap.PAGESIZE
        if self.end > first:
            self.file.map.madvise(advice, first, self.end - first)


class MappedWeights(Mapping[Part, Mapping[str, MappedTensor]]):
    """Mapped weights of each part of a model, by the name in its graph."""

    def __init__(self, architecture: Architecture, directory: Path) -> None:
        """Map the files of a directory.

        Raises:
            WeightsError: as `load_weights`.
            UnsupportedModelError: the files have weights in another layout than the graphs.
        """
        if others := [
            name for name, stored in architecture.stored.items() if type(stored) is not AsItIs
        ]:
            raise UnsupportedModelError(
                f"jobs on another model than the one that serves read its weights right from its "
                f"files, where a "
                f"{architecture.config.model_type} has {some_of(others)} in another layout; serve "
                f"it to train on it"
            )
        entries = find_weights(architecture, directory)
        if quantised := [name for name, entry in entries.items() if entry.parts]:
            raise UnsupportedModelError(
                f"jobs on another model than the one that serves read its weights right from its "
                f"files, where "
                f"{some_of(quantised)} are quantised; serve it to train on it"
            )
        paths = {entry.file for entry in entries.values()}
        files = {path: MappedFile(path) for path in paths}
        found = {
            name: files[entry.file].tensor(entry.name)
            for name, stored in architecture.stored.items()
            if (entry := entries[stored.names[0]])
        }
        if architecture.tied:
            table = found[f"{architecture.embedding_name}.weight"]
            if (head := entries.get(stored_head(architecture))) is not None:
                check_tied_head(head, table.tensor)
                table.drop()
            found[HEAD] = table
        self._parts: dict[Part, dict[str, MappedTensor]] = {}
        for part in architecture.parts:
            prefix, names = architecture.prefix(part), architecture.graphs[part].with_kind("weight")
            self._parts[part] = {weight.name: found[prefix + weight.name] for weight in names}

    def __getitem__(self, part: Part) -> Mapping[str, MappedTensor]:
        return self._parts[part]

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
