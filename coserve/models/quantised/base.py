"""Layout of a quantised checkpoint: a weight is several tensors, from which it is made in float32.

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
    """The quantisation of one checkpoint; an instance holds what its configuration says."""

    weight: ClassVar[str] = ".weight"
    """End of a weight's own name, after its module's."""
    parts: ClassVar[tuple[str, ...]]
    """Ends of the names of a weight's tensors."""
    needed: ClassVar[tuple[str, ...]]
    """Parts without which it is not a quantised weight (a module that was left out has a plain
    one).
    """
    unused: ClassVar[tuple[str, ...]] = ()
    """Tensors that do not concern weights, such as scales of activations."""

    @classmethod
    @abstractmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the quantisation of a quantization_config.

        Raises:
            UnsupportedModelError: a part of it is not supported; the message says what is.
        """

    @property
    @abstractmethod
    def words(self) -> str:
        """Return a description for people, such as "AWQ, 4 bits"."""

    @abstractmethod
    def shape(self, parts: Mapping[str, Shape]) -> Shape:
        """Return the weight's shape, by those of its tensors; () if these do not determine it."""

    @abstractmethod
    def dequantised(self, parts: "Mapping[str, Tensor]", shape: Shape) -> "Tensor":
        """Return the weight in float32.

        Args:
            parts: Its tensors, as far as there are any.
            shape: Shape that it must have.
        """

    def check_layout(self, architecture: "Architecture") -> None:
        """Check that the family's checkpoints store matrices in the layout of linear layers.

        Raises:
            UnsupportedModelError: they do not.
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
        """Return the weight that a tensor belongs to, and which part of it that is; None: it
        belongs to none.
        """
        for part in sorted(self.parts, key=len, reverse=True):
            if name.endswith(part):
                return name.removesuffix(part) + self.weight, part
        return None


def require(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Check that a field of the configuration has one of these values.

    Raises:
        UnsupportedModelError: it has another one.
    """
    if value not in known:
        raise UnsupportedModelError(
            f"weights quantised with {name}={value!r} are not read; {name} must be "
            f"{' or '.join(map(str, known))}"
        )


def unpacked(packed: "Tensor", bits: int) -> "Tensor":
    """Unpack whole numbers from int32 words [..., n], the lowest bits first: uint8 [..., n, 32 /
    bits].
    """
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    found: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return found.to(torch.uint8)


def by_blocks(scales: "Tensor", shape: Shape, block: tuple[int, int] | None) -> "Tensor":
    """Return values, one for each block of a matrix, in a shape that broadcasts to its elements.

    Args:
        scales: The values, [blocks of rows, blocks of columns], the last of which may be cut;
            without a block, one for each row, or one.
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
