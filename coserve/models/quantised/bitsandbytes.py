"""bitsandbytes: 8 bits with a scale for each row (LLM.int8(), arXiv 2208.07339), or 4 bits as
indices into a table of sixteen values, with a scale for each block of elements (QLoRA's nf4, arXiv
2305.14314, or fp4).

8 bits: weight int8 [out, in], SCB float32 [out]; w = weight * SCB / 127. 4 bits: weight uint8 [out
* in / 2, 1], two numbers a byte, the high one first; absmax [blocks], which may be quantised itself
by a table of 256, in blocks of their own; quant_state: the other fields, as the bytes of a JSON
object.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from coserve.errors import UnsupportedModelError, WeightsError
from coserve.models.quantised.base import Quantisation, Shape
from coserve.settings import is_whole

if TYPE_CHECKING:
    from torch import Tensor

_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")


@dataclass(frozen=True)
class BitsAndBytes(Quantisation):
    """A bitsandbytes checkpoint (see the module)."""

    bits: int
    """Bits of a number, 8 or 4."""

    parts = (".weight", ".SCB", ".weight.absmax", ".weight.quant_map", *_NESTED, *_STATES)
    unused = (".weight_format",)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        if not (config.get("load_in_8bit") or config.get("load_in_4bit")):
            raise UnsupportedModelError(
                "weights quantised by bitsandbytes must have load_in_8bit or load_in_4bit"
            )
        return cls(bits=8 if config.get("load_in_8bit") else 4)

    @property
    def needed(self) -> tuple[str, ...]:  # type: ignore[override]
        return (
            (".weight", ".SCB")
            if self.bits == 8
            else (".weight", ".weight.absmax", ".weight.quant_map")
        )

    @property
    def words(self) -> str:
        return f"bitsandbytes, {self.bits} bits"

    def shape(self, parts: Mapping[str, Shape]) -> Shape:
        return parts[".weight"] if self.bits == 8 else ()

    def dequantised(self, parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
        if self.bits == 8:
            return parts[".weight"].float() * (parts[".SCB"].float() / 127)[:, None]
        return _four_bits(parts, shape)


def _four_bits(parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
    import torch

    state = next((parts[name] for name in _STATES if name in parts), None)
    if state is None:
        raise WeightsError(
            "4 bits of bitsandbytes without their quant_state; save the model again, with "
            "safetensors"
        )
    fields = _fields_of(bytes(state.cpu().tolist()))
    if tuple(fields["shape"]) != shape:
        raise WeightsError(f"4 bits of a weight {fields['shape']}; the model needs {list(shape)}")
    scales = parts[".weight.absmax"]
    _check_blocks("blocksize", fields, scales.numel(), shape[0] * shape[1])
    if _NESTED[0] in parts:
        nested, table = (parts[name].float() for name in _NESTED)
        _check_blocks("nested_blocksize", fields, nested.numel(), scales.numel())
        each = nested.repeat_interleave(fields["nested_blocksize"])[: scales.numel()]
        scales = table[scales.long()] * each + fields["nested_offset"]
    packed = parts[".weight"].view(torch.uint8).flatten()
    indices = torch.stack((packed >> 4, packed & 15), -1).flatten()[: shape[0] * shape[1]]
    values = parts[".weight.quant_map"].float()[indices.long()]
    return (values * scales.float().repeat_interleave(fields["blocksize"])[: values.numel()]).view(
        shape
    )


def _fields_of(state: bytes) -> dict[str, Any]:
    """Return the fields of a quant_state.

    Raises:
        WeightsError: it does not describe the layout of the weight.
    """
    try:
        fields: dict[str, Any] = json.loads(state)
        tuple(fields["shape"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WeightsError(
            "4 bits of bitsandbytes with a quant_state that cannot be read; fetch the model again"
        ) from None
    return fields


def _check_blocks(name: str, fields: dict[str, Any], num_blocks: int, num_values: int) -> None:
    """Check that there are as many blocks of this size as the values need: they are laid out in
    memory.

    Raises:
        WeightsError: there are not.
    """
    size = fields.get(name)
    if not isinstance(size, int) or not is_whole(size, 1) or num_blocks != -(-num_values // size):
        raise WeightsError(
            f"4 bits of bitsandbytes with {num_blocks} blocks of {name} {size!r} for {num_values} "
            f"values"
        )
