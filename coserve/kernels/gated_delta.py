"""What crosses to a backend for gated delta layers: rows of sequences, and the state that each
sequence carries.

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
    """The sizes above, and eps of the lengths of queries and keys.

    A state is float32 [state_size]: the last K - 1 rows before the convolution [K - 1, C], then a
    matrix for each value head [Hv, Dk, Dv]. That of a sequence without rows is zero.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    eps: float = 1e-6

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
    """conv [C, 1, K], a_log and dt_bias [Hv]."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


class GatedDeltaRows(NamedTuple):
    """x [B, T, C]: queries, keys and values before the convolution. b and a [B, T, Hv]: of the
    gates.
    """

    x: Tensor
    b: Tensor
    a: Tensor


class GatedDeltaGradients(NamedTuple):
    """Of the rows, in their dtype; of the state before them [B, state_size] and of the weights, in
    float32.
    """

    rows: GatedDeltaRows
    state: Tensor
    weights: GatedDeltaWeights
