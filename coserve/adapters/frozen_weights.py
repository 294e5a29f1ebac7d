"""Weights that an adapter's directory holds for embeddings and head beside the trained tensors, and
that training does not change.

PEFT writes them where the vocabulary was resized, or where the embeddings are among the targets
(`save_embedding_layers` of its `save_pretrained`). Rows of the adapter use them in place of the
model's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from coserve.graph.bypass import Bypass
from coserve.graph.tensors import TensorSpec
from coserve.models.base import HEAD, Architecture, Part

# The name of such a weight in the bypass of its module.
FROZEN = "frozen.weight"
HEAD_MODULE = HEAD.removesuffix(".weight")
Written = TypeVar("Written")


@dataclass(frozen=True, kw_only=True)
class FrozenWeights:
    """The modules that an adapter has frozen weights for, and the vocabulary that they are for."""

    vocab_size: int
    """Number of tokens of the adapter's model."""
    modules: tuple[str, ...]
    """Full names, of embeddings and head."""
    tied: bool = False
    """Whether the head's weight is the table of embeddings, which exists once."""

    def architecture(self, architecture: Architecture) -> Architecture:
        """Return the adapter's architecture, from that of the backbone."""
        return architecture.with_vocabulary(self.vocab_size)

    def sites(self, architecture: Architecture) -> dict[str, tuple[Part, str]]:
        """Return full module name -> (part, node) of the modules."""
        known: dict[str, tuple[Part, str]] = {
            architecture.embedding_name: ("embed", architecture.embedding_name),
            HEAD_MODULE: ("head", HEAD_MODULE),
        }
        return {module: known[module] for module in self.modules}

    def shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by the module that has it. architecture: of the
        adapter.
        """
        owners = [module for module in self.modules if not (self.tied and module == HEAD_MODULE)]
        found = self.sites(architecture)
        return {module: _weight(architecture, *found[module]).shape for module in owners}

    def owner(self, module: str, architecture: Architecture) -> str:
        """Return the module whose tensor is a module's weight."""
        return architecture.embedding_name if self.tied and module == HEAD_MODULE else module

    def in_files(
        self,
        tensors: Mapping[str, Written],
        architecture: Architecture,
        file_name: Callable[[str, Architecture], str],
    ) -> dict[str, Written]:
        """Return the weights by their names in PEFT's file.

        Args:
            tensors: the weights, or what a rank writes of them, by the module that has them; what
                is lacking is not written.
            architecture: that of the adapter.
            file_name: gives the name in the file for a module.
        """
        found = {module: tensors.get(self.owner(module, architecture)) for module in self.modules}
        return {
            file_name(module, architecture): tensor
            for module, tensor in found.items()
            if tensor is not None
        }


def with_frozen_weight(bypass: Bypass | None, shape: tuple[int, ...]) -> Bypass:
    """Return a module's bypass (None: nothing else is there) with a frozen weight in place of the
    model's.
    """
    own: Mapping[str, TensorSpec] = {"weight": TensorSpec(name=FROZEN, shape=shape, kind="derived")}
    return Bypass(graph=None if bypass is None else bypass.graph, own=own)


def _weight(architecture: Architecture, part: Part, node: str) -> TensorSpec:
    graph = architecture.graphs[part]
    return graph.spec[graph.node[node].input["weight"]]


def differs(tensor: Tensor, own: Tensor, max_rounding: float) -> bool:
    """Return whether a weight is another than the backbone's, beyond what rounding on the way could
    have done.

    Both may have been rounded: to bfloat16, at worst, or quantised (`max_rounding`).
    """
    if tensor.shape != own.shape:
        return True
    return not torch.allclose(
        tensor.to(own).float(), own.float(), rtol=2**-7, atol=1e-6 + max_rounding
    )
