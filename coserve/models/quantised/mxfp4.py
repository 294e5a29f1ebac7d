"""MXFP4, as gpt-oss is published: experts in 4-bit floats, 32 of which share a power of two.
Source: OCP Microscaling Formats 1.0.

blocks uint8 [experts, out, groups, 16], two numbers a byte, the low one first; scales uint8
[experts, out, groups], the exponent plus 127.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from coserve.models.quantised.base import Quantisation, Shape

if TYPE_CHECKING:
    from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Mxfp4(Quantisation):
    """An MXFP4 checkpoint (see the module)."""

    weight = ""
    parts = ("_blocks", "_scales")
    needed = parts

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        return cls()

    @property
    def words(self) -> str:
        return "MXFP4"

    def shape(self, parts: Mapping[str, Shape]) -> Shape:
        experts, out, groups, num_bytes = parts["_blocks"]
        return experts, groups * num_bytes * 2, out  # transformers' own layout without quantisation

    def dequantised(self, parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
        import torch

        blocks, exponents = parts["_blocks"], parts["_scales"].int() - 127
        table = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], device=blocks.device)
        values = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()]
        return torch.ldexp(values, exponents[..., None]).flatten(-2).mT
