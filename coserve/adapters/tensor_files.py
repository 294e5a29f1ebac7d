"""Tensors in safetensors files, whose names and shapes are known, and can be checked, before any is
read.

Format: eight bytes with the header's length, the header as JSON, the tensors
(https://huggingface.co/docs/safetensors/index#format).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coserve.adapters.whole_files import replace_file
from coserve.errors import AdapterError
from coserve.settings import MOST_WHOLE, is_whole, shown

# Maximum bytes of names and shapes: enough for some fifty thousand tensors.
_MAX_HEADER_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """The description of a tensor in a file."""

    dtype: str
    """Dtype by safetensors' name, such as "BF16"."""
    shape: tuple[int, ...]
    """Shape of the tensor."""

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


class TensorFile:
    """An open file; its tensors are read one by one."""

    def __init__(self, path: Path, headers: Mapping[str, TensorHeader], stack: ExitStack) -> None:
        """stack: closes it."""
        self.headers = headers
        self._path, self._stack = path, stack
        self._file: Any = None

    def read_finite(
        self, name: str, dtype: torch.dtype, at: tuple[slice, ...] = ()
    ) -> torch.Tensor:
        """Return one tensor, on the CPU, as it is stored, or a block of it: a slice for each of its
        dimensions.

        Raises:
            AdapterError: one of its numbers is NaN or infinite, or would be in `dtype`, which it is
                computed with.
        """
        tensor = self.read(name, at)
        if bool(torch.isfinite(tensor.to(dtype)).all()):
            return tensor
        fault = f"numbers that are too large for {str(dtype).removeprefix('torch.')}"
        if not bool(torch.isfinite(tensor.float()).all()):
            fault = (
                "numbers that are NaN"
                if bool(torch.isnan(tensor.float()).any())
                else "infinite numbers"
            )
        raise AdapterError(
            f"{self._path}: {shown(name)[1:-1]} has {fault}; every answer with it would be wrong"
        )

    def read(self, name: str, at: tuple[slice, ...] = ()) -> torch.Tensor:
        """Return one tensor, or a block of it, on the CPU, whatever its numbers are."""
        from safetensors import safe_open

        if self._file is None:  # not before: this maps the whole file, whatever its size
            self._file = self._stack.enter_context(safe_open(self._path, framework="pt"))
        tensor: torch.Tensor = self._file.get_slice(name)[at] if at else self._file.get_tensor(name)
        return tensor


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file; raise AdapterError if it is missing, unreadable, or damaged."""
    from safetensors import SafetensorError

    try:
        if not path.is_file():
            raise AdapterError(
                f"{path.parent} has no {path.name}; save the adapter with safetensors"
            )
        with ExitStack() as stack:
            yield TensorFile(path, _read_headers(path), stack)
    except PermissionError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is damaged or cut short ({error}); fetch it again") from None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, whole or not at all. A tensor that has two names is written
    twice.
    """
    from safetensors.torch import save

    found, addresses = dict[str, torch.Tensor](), set[int]()
    for name, tensor in tensors.items():
        value = tensor.cpu()
        found[name] = value.clone() if value.data_ptr() in addresses else value
        addresses.add(value.data_ptr())
    replace_file(path, save(found, metadata={"format": "pt"}))


def _read_headers(path: Path) -> dict[str, TensorHeader]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise AdapterError(
                f"{path} is damaged, or no safetensors file: its header would have {length:,} "
                f"bytes; "
                f"{_MAX_HEADER_BYTES:,} are allowed"
            )
        content = file.read(length)
    try:
        fields = json.loads(content)
        return {name: _header(each) for name, each in fields.items() if name != "__metadata__"}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise AdapterError(
            f"{path} is damaged or cut short (its header is none); fetch it again"
        ) from None


def _header(fields: Mapping[str, Any]) -> TensorHeader:
    dtype, shape = fields["dtype"], fields["shape"]
    if not isinstance(dtype, str) or not all(is_whole(size, 0, MOST_WHOLE) for size in shape):
        raise ValueError
    return TensorHeader(dtype=dtype, shape=tuple(shape))
