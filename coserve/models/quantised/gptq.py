"""GPTQ as AutoGPTQ and GPTQModel write it: w = (q - zero) * scale, by groups of inputs. Source:
arXiv 2210.17323, https://github.com/ModelCloud/GPTQModel.

qweight int32 [in * bits / 32, out], a word's numbers being those of consecutive inputs; qzeros
int32 [groups, out * bits / 32]; scales [groups, out]; g_idx int32 [in], the group of each input.
Zeros are stored less one, but not where `checkpoint_format` is gptq_v2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from coserve.models.quantised.base import Quantisation, Shape, require, unpacked

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Gptq(Quantisation):
    """A GPTQ checkpoint (see the module)."""

    bits: int
    """Bits of a number."""
    offset: int
    """Difference of zeros from their stored values."""

    parts = (".qweight", ".qzeros", ".scales", ".g_idx")
    needed = (".qweight", ".qzeros", ".scales")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        bits, layout = config.get("bits"), config.get("checkpoint_format") or "gptq"
        require("bits", bits, (2, 4, 8))
        require("checkpoint_format", layout, ("gptq", "gptq_v2"))
        return cls(bits=int(str(bits)), offset=int(layout == "gptq"))

    @property
    def words(self) -> str:
        return f"GPTQ, {self.bits} bits"

    def shape(self, parts: Mapping[str, Shape]) -> Shape:
        return parts[".qweight"][1], parts[".qweight"][0] * 32 // self.bits

    def dequantised(self, parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
        import torch

        values = unpacked(parts[".qweight"], self.bits).transpose(1, 2).flatten(0, 1)  # [in, out]
        scales = parts[".scales"].float()
        zeros = unpacked(parts[".qzeros"], self.bits).flatten(1).float()
        zeros = (zeros + self.offset).remainder_(2**self.bits)
        if (groups := parts.get(".g_idx")) is None:
            each = -(-values.shape[0] // scales.shape[0])
            groups = torch.arange(values.shape[0], device=values.device) // each
        groups = groups.long()
        return (values.float().sub_(zeros[groups]).mul_(scales[groups])).T
