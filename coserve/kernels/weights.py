"""Weights of linear layers: dense, several in one piece, quantised. Callers never branch on the
storage class.

A weight is [out, in] and multiplies rows [n, in]; that of experts is [experts, out, in]. Each class
asks the backend for the products of its own storage; how fast these are is up to the backend.
Another kind of storage is one more class, with a `format` by which users ask for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from coserve.errors import ModelError
from coserve.kernels.cuts import Cut

if TYPE_CHECKING:
    from coserve.kernels.base import Backend


class Weight(ABC):
    """A matrix [out, in] of a linear layer, or those of experts [experts, out, in]."""

    format: ClassVar[str] = ""
    """Name of this storage for `--weights`; "": users cannot ask for it."""
    scales_rows: ClassVar[bool] = False
    """Whether the stored form of an element depends on the other elements of its row."""

    @classmethod
    def from_dense(cls, weight: Tensor) -> "Weight":
        """Return a float weight in this storage."""
        raise AssertionError(f"{cls.__name__} is not asked for by name")

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return (out, in), after the number of experts if it is a weight of experts."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the stored tensors; their bytes are what a product reads."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the matrix in the compute dtype (of a quantised weight: dequantised)."""

    @abstractmethod
    def product(self, backend: "Backend", x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b; x [n, in], bias [out] -> [n, out]."""

    @abstractmethod
    def input_gradient(
        self, backend: "Backend", grad: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        """Return dx = dy W; grad [n, out] -> [n, in], added to `onto` in place if that is given."""

    def grouped_product(self, backend: "Backend", x: Tensor, ends: Tensor) -> Tensor:
        """Return the product of each group of rows with the matrix of its own expert; see
        `Backend.grouped_product`.
        """
        return backend.grouped_product(x, self.dense(), ends)

    def grouped_input_gradient(self, backend: "Backend", grad: Tensor, ends: Tensor) -> Tensor:
        """Return dx = dy W of each expert's group; grad [m, out] -> [m, in]."""
        return backend.grouped_product(grad, self.dense().mT, ends)

    @abstractmethod
    def cut(self, cut: Cut, rank: int) -> "Weight":
        """Return what a rank holds of the weight where ranks divide it."""

    @abstractmethod
    def joined(self, others: Sequence["Weight"]) -> tuple["Weight", list["Weight"]]:
        """Join with others of this class.

        Returns:
            One weight, row after row, and a view of it for each of the weights.
        """

    @property
    def max_rounding(self) -> float:
        """Return how far an element may be from the one that was loaded, beside the rounding to the
        compute dtype.
        """
        return 0.0


class DenseWeight(Weight):
    """A float tensor, row after row, as every product reads it."""

    format = "dense"

    @classmethod
    def from_dense(cls, weight: Tensor) -> "DenseWeight":
        return cls(weight.contiguous())

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def dense(self) -> Tensor:
        return self.tensor

    def product(self, backend: "Backend", x: Tensor, bias: Tensor | None = None) -> Tensor:
        return backend.product(x, self.tensor, bias)

    def input_gradient(
        self, backend: "Backend", grad: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        return backend.input_gradient(grad, self.tensor, onto)

    def cut(self, cut: Cut, rank: int) -> Weight:
        return DenseWeight(cut.take(self.tensor, rank))

    def joined(self, others: Sequence[Weight]) -> tuple[Weight, list[Weight]]:
        tensors = [self.tensor, *(other.tensors()[0] for other in others)]
        whole = torch.cat(tensors)
        parts = torch.split(whole, [tensor.shape[0] for tensor in tensors])
        return DenseWeight(whole), [DenseWeight(part) for part in parts]


class Int8Weight(Weight):
    """Whole numbers from -127 to 127 and one scale per output channel (of each expert): W[i, j] =
    values[i, j] * scales[i].

    Weight-only: rows stay in the compute dtype, and sums are float32.

    Args:
        values: int8 [..., out, in].
        scales: float32 [..., out].
        dtype: the compute dtype.
    """

    format = "int8"
    scales_rows = True

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.values, self.scales, self._dtype = values, scales, dtype

    @classmethod
    def quantised(cls, weight: Tensor) -> "Int8Weight":
        """Return the nearest to a float weight: symmetric, a channel's largest magnitude becomes
        127.
        """
        if weight.ndim > 2:  # one expert after the other, so that little is in float32 at a time
            parts = zip(*(cls.quantised(one).tensors() for one in weight), strict=True)
            values, scales = (torch.stack(each) for each in parts)
            return cls(values, scales, weight.dtype)
        wide = weight.float()
        scales = wide.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny).div_(127)
        values = (wide / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return cls(values.contiguous(), scales, weight.dtype)

    @classmethod
    def from_dense(cls, weight: Tensor) -> "Int8Weight":
        return cls.quantised(weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.values, self.scales

    def dense(self) -> Tensor:
        return (self.values.float() * self.scales[..., None]).to(self._dtype)

    @property
    def max_rounding(self) -> float:
        return float(self.scales.max()) / 2

    def product(self, backend: "Backend", x: Tensor, bias: Tensor | None = None) -> Tensor:
        return backend.int8_product(x, self.values, self.scales, bias)

    def input_gradient(
        self, backend: "Backend", grad: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        return backend.int8_input_gradient(grad, self.values, self.scales, onto)

    def grouped_product(self, backend: "Backend", x: Tensor, ends: Tensor) -> Tensor:
        return backend.int8_grouped_product(x, self.values, self.scales, ends)

    def grouped_input_gradient(self, backend: "Backend", grad: Tensor, ends: Tensor) -> Tensor:
        return backend.int8_grouped_input_gradient(grad, self.values, self.scales, ends)

    def cut(self, cut: Cut, rank: int) -> Weight:
        """Return a rank's piece; scales are those of whole rows, so that numbers do not depend on
        the ranks.
        """
        scales = self.scales if cut.dim == -1 else cut.along(cut.dim + 1).take(self.scales, rank)
        return Int8Weight(cut.take(self.values, rank), scales, self._dtype)

    def joined(self, others: Sequence[Weight]) -> tuple[Weight, list[Weight]]:
        values, scales = (
            torch.cat(parts) for parts in zip(*(w.tensors() for w in (self, *others)), strict=True)
        )
        sizes = [weight.shape[0] for weight in (self, *others)]
        parts = zip(torch.split(values, sizes), torch.split(scales, sizes), strict=True)
        return Int8Weight(values, scales, self._dtype), [
            Int8Weight(*part, self._dtype) for part in parts
        ]


class JoinedWeight(Weight):
    """One of several weights that are multiplied with the same rows and lie in one piece of memory,
    so that `piece_of` all of them needs one product.
    """

    def __init__(self, own: Weight, piece: "Piece") -> None:
        self._own, self._piece = own, piece

    @property
    def shape(self) -> tuple[int, ...]:
        return self._own.shape

    def tensors(self) -> tuple[Tensor, ...]:
        return self._own.tensors()

    def dense(self) -> Tensor:
        return self._own.dense()

    @property
    def max_rounding(self) -> float:
        return self._own.max_rounding

    def product(self, backend: "Backend", x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._own.product(backend, x, bias)

    def input_gradient(
        self, backend: "Backend", grad: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        return self._own.input_gradient(backend, grad, onto)

    def cut(self, cut: Cut, rank: int) -> Weight:
        return self._own.cut(cut, rank)

    def joined(self, others: Sequence[Weight]) -> tuple[Weight, list[Weight]]:
        raise AssertionError("a weight is joined once")


class Piece:
    """Several weights and their biases, row after row in one piece of memory.

    Args:
        whole: the weight of all of them [sum(sizes), in].
        parts: the weight of each, within `whole`.
        bias: biases of all of them [sum(sizes)]; None: they have none.
        sizes: rows of each.
    """

    def __init__(
        self, whole: Weight, parts: Sequence[Weight], bias: Tensor | None, sizes: list[int]
    ) -> None:
        self.whole, self.bias, self.sizes = whole, bias, sizes
        self.members: list[Weight] = [JoinedWeight(part, self) for part in parts]
        self.biases: list[Tensor | None] = (
            [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        )


def join(
    weights: Sequence[Weight], biases: Sequence[Tensor | None]
) -> tuple[list[Weight], list[Tensor | None]]:
    """Return the same weights and biases [out] in one piece each; as they are where only some have
    a bias.
    """
    present = [bias for bias in biases if bias is not None]
    if len(present) not in (0, len(weights)):
        return list(weights), list(biases)
    whole, parts = weights[0].joined(weights[1:])
    piece = Piece(
        whole,
        parts,
        torch.cat(present) if present else None,
        [weight.shape[0] for weight in weights],
    )
    return piece.members, piece.biases


def piece_of(weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> Piece | None:
    """Return the piece that weights were joined to with their biases; None if these are not all of
    its members in order.
    """
    first = weights[0]
    if not isinstance(first, JoinedWeight):
        return None
    piece = first._piece
    # `is_` and `map` stay within the interpreter's C code: every step comes here for each layer.
    if len(weights) != len(piece.members) or not all(map(is_, weights, piece.members)):
        return None
    return piece if all(map(is_, biases, piece.biases)) else None


def as_dense(weight: Weight) -> Tensor | None:
    """Return the float tensor that a weight is stored as; None where it is stored otherwise."""
    own = weight._own if isinstance(weight, JoinedWeight) else weight
    return own.tensor if isinstance(own, DenseWeight) else None


def weight_formats() -> tuple[str, ...]:
    """Return the storages of linear layers that `--weights` may ask for."""
    return tuple(each.format for each in Weight.__subclasses__() if each.format)


def weight_class(weight_format: str) -> type[Weight]:
    """Return the storage of this name.

    Raises:
        ModelError: there is none of this name; the message lists the known ones.
    """
    for each in Weight.__subclasses__():
        if each.format and each.format == weight_format:
            return each
    raise ModelError(f"weights {weight_format!r} is not one of {', '.join(weight_formats())}")


def as_weight(value: Tensor | Weight) -> Weight:
    """Return a weight as it is, or a plain tensor (a parameter) as one."""
    return value if isinstance(value, Weight) else DenseWeight(value)
