"""What is known of a graph's tensors before there are any: name, shape, kind and type.

A tensor is one of five kinds. "row": an activation, `shape` per row, differentiable. "constant":
given from outside for any row (tokens, positions, rotary tables), `shape` per row, no gradient.
"weight": of the backbone, whole shape. "parameter": of an adapter, whole shape. "derived": of an
adapter, whole shape, no gradient: it follows from the parameters and the backbone's weights.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

Kind = Literal["row", "constant", "weight", "parameter", "derived"]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor's name, shape and type; `dtype` None is the compute dtype of the model, whatever it
    is.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    dtype: torch.dtype | None = None

    @property
    def per_row(self) -> bool:
        """Whether there is one of it for every row."""
        return self.kind in ("row", "constant")

    def num_bytes(self, compute_dtype: torch.dtype) -> int:
        """Bytes per row (kinds "row" and "constant") or in all."""
        return prod(self.shape) * (self.dtype or compute_dtype).itemsize
