"""How a quantised checkpoint holds a weight: in several tensors, from which it is made in float32.

A weight is made when it is loaded, one at a time, and is then stored as any other (`--weights`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from coserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

    from coserve.models.base import Architecture

Shape = tuple[int, ...]


class Quantisation(ABC):
    """The weights of one checkpoint; an instance holds what its configuration says.

    weight: what a weight's own name ends with, after its module's. parts: what the names of its
    tensors end with. needed: the parts without which it is no quantised weight (a module that was
    left out has a plain one). unused: tensors that say nothing of weights, such as scales of
    activations.
    """

    weight: ClassVar[str] = ".weight"
    parts: ClassVar[tuple[str, ...]]
    needed: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """From a quantization_config; UnsupportedModelError says what of it is not read, and what
        is.
        """

    @property
    @abstractmethod
    def words(self) -> str:
        """For people, such as "AWQ, 4 bits"."""

    @abstractmethod
    def shape(self, parts: Mapping[str, Shape]) -> Shape:
        """The weight's shape, by those of its tensors; of one whose tensors do not say it, ()."""

    @abstractmethod
    def dequantised(self, parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
        """The weight in float32. parts: its tensors, those that there are. shape: that it must
        have.
        """

    def check_layout(self, architecture: "Architecture") -> None:
        """UnsupportedModelError if the family's checkpoints hold matrices in another layout than
        linear layers do.
        """
        from coserve.models.stored import Transposed

        if self.weight and any(
            type(stored) is Transposed for stored in architecture.stored.values()
        ):
            raise UnsupportedModelError(
                f"quantised weights of a {architecture.config.model_type} are not read; give the "
                f"model in float32, "
                "float16 or bfloat16"
            )

    def split(self, name: str) -> tuple[str, str] | None:
        """A tensor's weight, and which part of that it is; None: it is none."""
        for part in sorted(self.parts, key=len, reverse=True):
            if name.endswith(part):
                return name.removesuffix(part) + self.weight, part
        return None


def require(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """UnsupportedModelError unless a field of the configuration has one of these values."""
    if value not in known:
        raise UnsupportedModelError(
            f"weights quantised with {name}={value!r} are not read; {name} must be "
            f"{' or '.join(map(str, known))}"
        )


def unpacked(packed: "Tensor", bits: int) -> "Tensor":
    """Whole numbers out of int32 words [..., n], the lowest bits first -> uint8 [..., n, 32 /
    bits].
    """
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    found: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return found.to(torch.uint8)


def by_blocks(scales: "Tensor", shape: Shape, block: tuple[int, int] | None) -> "Tensor":
    """What there is one of for each block of a matrix, as it is to be broadcast to its elements.

    scales: [blocks of rows, blocks of columns], the last of which may be cut; without a block, one
    for each row, or one.
    """
    if block is None:
        return scales.reshape(-1, 1)
    if min(block) < 1:
        raise ValueError(f"blocks of {list(block)}")
    wanted = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"scales {list(scales.shape)} of blocks {list(block)}, of which there are "
            f"{list(wanted)}"
        )
    for dim in (0, 1):
        scales = scales.repeat_interleave(min(block[dim], shape[dim]), dim).narrow(
            dim, 0, shape[dim]
        )
    return scales
