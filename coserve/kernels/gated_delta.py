"""Gated delta layers as a backend gets them: rows of sequences, and the state that each sequence
carries.

Shapes: B sequences of T rows each, Hk key heads (and as many query heads), Hv value heads (a
multiple of Hk), Dk and Dv widths of a key and a value head, K rows that the short convolution sees,
C = 2 * Hk * Dk + Hv * Dv its channels.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Rows that are worked on at once, and the most that a gradient is asked of.
CHUNK_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """Sizes of a layer.

    A state is float32 [state_size]: the last K - 1 rows before the convolution [K - 1, C], then a
    matrix for each value head [Hv, Dk, Dv]. That of a sequence without rows is zero.
    """

    num_key_heads: int
    """Key heads (Hk)."""
    num_value_heads: int
    """Value heads (Hv)."""
    key_dim: int
    """Width of a key head (Dk)."""
    value_dim: int
    """Width of a value head (Dv)."""
    kernel_size: int
    """Rows that the short convolution sees (K)."""
    eps: float = 1e-6
    """Added to the squared lengths of queries and keys."""

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def tail_size(self) -> int:
        return (self.kernel_size - 1) * self.num_channels

    @property
    def state_size(self) -> int:
        return self.tail_size + self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedDeltaWeights:
    """Weights of a layer."""

    conv: Tensor
    """The short convolution [C, 1, K]."""
    a_log: Tensor
    """Logarithms of the decay rates [Hv]."""
    dt_bias: Tensor
    """Biases of the decays' gates [Hv]."""


class GatedDeltaRows(NamedTuple):
    """Rows of B sequences."""

    x: Tensor
    """Queries, keys and values before the convolution [B, T, C]."""
    b: Tensor
    """Input of the gates beta [B, T, Hv]."""
    a: Tensor
    """Input of the decays [B, T, Hv]."""


class GatedDeltaGradients(NamedTuple):
    """Gradients of a layer."""

    rows: GatedDeltaRows
    """Gradients of the rows, in their dtype."""
    state: Tensor
    """Gradient of the states before the rows, float32 [B, state_size]."""
    weights: GatedDeltaWeights
    """Gradients of the weights, float32."""
