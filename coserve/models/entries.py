"""The tensors of a checkpoint's files, by the files' headers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from coserve.errors import WeightsError
from coserve.models.base import Architecture
from coserve.models.stored import Index, PerExpert


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor in a file, by the file's header."""

    file: Path
    """The file."""
    name: str
    """Name in the file."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    kind: str
    """Type as safetensors writes it: F32, BF16, I8, …"""
    parts: "dict[str, TensorEntry]" = field(default_factory=dict)
    """Tensors that a quantised weight is made from, by the ends of their names."""
    at: tuple[int, slice] | None = None
    """Place within a tensor of all experts, if it is a part of one."""

    def read(self, reader: Any, index: Index = ()) -> Tensor:
        """Read the tensor, or only the bytes of a piece of it.

        Args:
            reader: Reader of its file.
            index: A slice for each dimension; () for all of it.
        """
        if self.at is not None:
            expert, rows = self.at
            own, *columns = index or (slice(None),)
            index = (expert, within(rows, own, self.shape[0]), *columns)
        tensor: Tensor = (
            reader.get_slice(self.name)[index] if index else reader.get_tensor(self.name)
        )
        return tensor


def within(outer: slice, inner: int | slice, length: int) -> slice:
    """Return the entries of a dimension that are some entries of a slice.

    Args:
        outer: The slice.
        inner: Entries within the slice.
        length: Number of entries of the dimension.
    """
    assert isinstance(inner, slice)
    first, stop, _ = inner.indices(length)
    return slice(outer.start + first, outer.start + stop)


def entries_of(file: Path) -> Iterator[TensorEntry]:
    """Yield all tensors of a file."""
    with open_file(file) as reader:
        for name in reader.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
            tensor = reader.get_slice(name)
            yield TensorEntry(
                file=file, name=name, shape=tuple(tensor.get_shape()), kind=tensor.get_dtype()
            )


def tensors_of_all_experts(architecture: Architecture) -> dict[str, PerExpert]:
    """Return the weights that some files hold as one tensor and others as one for each expert, by
    the name of the one tensor.
    """
    experts = [each for each in architecture.stored.values() if isinstance(each, PerExpert)]
    return {each.whole: each for each in experts if each.whole is not None}


def of_experts(entry: TensorEntry, stored: PerExpert) -> dict[str, TensorEntry]:
    """Return one tensor of all experts as the tensors that other files have for each."""
    num_parts = len(stored.patterns)
    if len(entry.shape) != 3 or entry.shape[0] != stored.num_experts or entry.shape[1] % num_parts:
        raise WeightsError(
            f"{entry.file}: {entry.name} has shape {list(entry.shape)}, not one of "
            f"{stored.num_experts} experts"
        )
    rows = entry.shape[1] // num_parts
    places = [
        (e, slice(i * rows, (i + 1) * rows))
        for e in range(stored.num_experts)
        for i in range(num_parts)
    ]
    return {
        name: replace(entry, shape=(rows, entry.shape[2]), at=place)
        for name, place in zip(stored.names, places, strict=True)
    }


@contextmanager
def open_file(file: Path) -> Iterator[Any]:
    """Yield a reader of a safetensors file.

    Raises:
        WeightsError: the file is damaged or incomplete.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is damaged or cut short ({error}); fetch it again") from None
