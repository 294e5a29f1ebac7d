"""Descriptions of a graph's tensors: name, shape, kind and dtype.

A tensor is one of five kinds:

- "row": an activation, differentiable.
- "constant": given from outside for any row (tokens, positions, rotary tables); no gradient.
- "weight": of the backbone.
- "parameter": of an adapter.
- "derived": of an adapter; no gradient. It follows from the parameters and the backbone's weights.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

Kind = Literal["row", "constant", "weight", "parameter", "derived"]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A description of one tensor."""

    name: str
    """Name in the graph."""
    shape: tuple[int, ...]
    """Shape per row (kinds "row" and "constant"), or of the whole tensor."""
    kind: Kind
    """Kind of tensor; see the module's docstring."""
    dtype: torch.dtype | None = None
    """Dtype; None: the compute dtype of the model."""

    @property
    def per_row(self) -> bool:
        """Return whether every row has one of it."""
        return self.kind in ("row", "constant")

    def num_bytes(self, compute_dtype: torch.dtype) -> int:
        """Return its bytes, per row (kinds "row" and "constant") or in all."""
        return prod(self.shape) * (self.dtype or compute_dtype).itemsize
