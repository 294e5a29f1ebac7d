"""float8 weights with a scale for each block, as DeepSeek and Qwen publish them: w = weight *
weight_scale_inv, blocks of `weight_block_size`; or one scale. Source: arXiv 2412.19437. Activations
are not quantised here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from coserve.models.quantised.base import Quantisation, Shape, by_blocks, require

if TYPE_CHECKING:
    from torch import Tensor

_SCALE = ".weight_scale_inv"


@dataclass(frozen=True)
class Fp8(Quantisation):
    """A float8 checkpoint (see the module)."""

    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: one scale."""

    parts = (".weight", _SCALE)
    needed = parts
    unused = (".activation_scale", ".input_scale", ".k_scale", ".v_scale")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        require("fmt", config.get("fmt") or "e4m3", ("e4m3", "float8_e4m3fn"))
        block = config.get("weight_block_size")
        return cls(block=None if block is None else (int(block[0]), int(block[1])))

    @property
    def words(self) -> str:
        return "float8"

    def shape(self, parts: Mapping[str, Shape]) -> Shape:
        return parts[".weight"]

    def dequantised(self, parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
        return parts[".weight"].float() * by_blocks(parts[_SCALE].float(), shape, self.block)
