"""AWQ as AutoAWQ writes it (`version: gemm`): w = (q - zero) * scale, by groups of inputs. Source:
arXiv 2306.00978, https://github.com/casper-hansen/AutoAWQ.

qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]. A word's eight
numbers, the lowest bits first, are those of columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from coserve.models.quantised.base import Quantisation, Shape, require, unpacked

if TYPE_CHECKING:
    from torch import Tensor

_BITS = 4
# Places of columns 0 to 7 in their word.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(Quantisation):
    """An AWQ checkpoint (see the module)."""

    parts = (".qweight", ".qzeros", ".scales")
    needed = parts

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        require("bits", config.get("bits", config.get("w_bit", _BITS)), (_BITS,))
        require(
            "version",
            str(config.get("version", config.get("checkpoint_format", "gemm"))).lower(),
            ("gemm",),
        )
        require("zero_point", config.get("zero_point", True), (True,))
        return cls()

    @property
    def words(self) -> str:
        return "AWQ, 4 bits"

    def shape(self, parts: Mapping[str, Shape]) -> Shape:
        return parts[".scales"][-1], parts[".qweight"][0]

    def dequantised(self, parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
        values, zeros = (
            unpacked(parts[part], _BITS)[..., _PLACES].flatten(-2)
            for part in (".qweight", ".qzeros")
        )
        scales = parts[".scales"].float()
        each = values.shape[0] // scales.shape[0]
        zeros, scales = (one.repeat_interleave(each, 0) for one in (zeros, scales))
        return (values.float().sub_(zeros).mul_(scales)).T
