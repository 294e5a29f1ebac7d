"""compressed-tensors, as llm-compressor writes them: w = (q - zero) * scale, with a scale for a
tensor, each row, each group of a row, or each block. Source:
https://github.com/vllm-project/compressed-tensors.

`pack-quantized`: weight_packed int32 [out, in * bits / 32], each number plus 2^(bits - 1),
weight_shape [2]; weight_zero_point, packed likewise along out; weight_g_idx, the group of each
input. `int-quantized`, `float-quantized` and `naive-quantized`: weight int8 or float8 [out, in].
Activations are not quantised here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from coserve.errors import UnsupportedModelError
from coserve.models.quantised.base import Quantisation, Shape, by_blocks, require, unpacked

if TYPE_CHECKING:
    from torch import Tensor

_PACKED = "pack-quantized"
_FORMATS = (_PACKED, "int-quantized", "float-quantized", "naive-quantized")
_SCALE, _ZERO, _GROUPS = ".weight_scale", ".weight_zero_point", ".weight_g_idx"


@dataclass(frozen=True)
class CompressedTensors(Quantisation):
    """A checkpoint of compressed-tensors (see the module)."""

    bits: int
    """Bits of a number."""
    kind: str
    """Type of a number, int or float."""
    is_packed: bool
    """Whether numbers are packed into int32 words."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: a row, or all."""

    parts = (".weight", ".weight_packed", _SCALE, ".weight_shape", _ZERO, _GROUPS)
    unused = (
        ".input_scale",
        ".input_zero_point",
        ".output_scale",
        ".output_zero_point",
        ".k_scale",
        ".v_scale",
    )

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        require("format", config.get("format"), _FORMATS)
        groups = (config.get("config_groups") or {}).values()
        found = {
            _kind(weights) for group in groups if (weights := group.get("weights")) is not None
        }
        if len(found) != 1:
            raise UnsupportedModelError(
                f"compressed-tensors with {len(found)} kinds of weights are not read; all must be "
                f"of one type, number "
                "of bits and size of groups"
            )
        (kind, bits, block), is_packed = found.pop(), config["format"] == _PACKED
        require("type", kind, ("int",) if is_packed else ("int", "float"))
        require("num_bits", bits, (2, 4, 8) if is_packed else (8,))
        return cls(bits=int(str(bits)), kind=kind, is_packed=is_packed, block=block)

    @property
    def needed(self) -> tuple[str, ...]:  # type: ignore[override]
        return (".weight_packed" if self.is_packed else ".weight", _SCALE)

    @property
    def words(self) -> str:
        return f"compressed-tensors, {self.kind}{self.bits}"

    def shape(self, parts: Mapping[str, Shape]) -> Shape:
        return () if self.is_packed else parts[".weight"]

    def dequantised(self, parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
        scales, zeros = parts[_SCALE].float(), parts.get(_ZERO)
        if self.is_packed:
            middle = 2 ** (self.bits - 1)
            values = (
                unpacked(parts[".weight_packed"], self.bits)
                .flatten(1)[:, : shape[1]]
                .float()
                .sub_(middle)
            )
            if zeros is not None:
                zeros = unpacked(zeros.T, self.bits).flatten(1)[:, : shape[0]].T.float() - middle
        else:
            values = parts[".weight"].float()
        if (groups := parts.get(_GROUPS)) is not None and int(
            groups.min()
        ) >= 0:  # -1: there is no other order
            scales = scales[:, groups.long()]
            zeros = None if zeros is None else zeros[:, groups.long()]
        else:
            scales = by_blocks(scales, shape, self.block)
            zeros = None if zeros is None else by_blocks(zeros, shape, self.block)
        return (values if zeros is None else values.sub_(zeros)).mul_(scales)


def _kind(weights: Mapping[str, Any]) -> tuple[str, Any, tuple[int, int] | None]:
    """Return the type, bits and block of a group's weights."""
    group, block = weights.get("group_size"), weights.get("block_structure")
    if isinstance(block, list | tuple):
        return str(weights.get("type")), weights.get("num_bits"), (int(block[0]), int(block[1]))
    each = (1, int(group)) if group and int(group) > 0 else None
    return str(weights.get("type")), weights.get("num_bits"), each
