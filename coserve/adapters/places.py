"""Places where adapters sit: modules of a model as nodes of its graphs, with their weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from coserve.graph.ir import Node
from coserve.graph.layouts import AnyState
from coserve.kernels.cuts import Cut
from coserve.kernels.weights import Weight, as_weight
from coserve.models.backbone import Backbone
from coserve.models.base import Architecture, Part


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a mixture. A row goes to some of them."""

    num_experts: int
    """Number of experts."""
    per_row: int
    """Number of experts that a row goes to."""
    outputs: int
    """Rows of each expert's matrix."""
    inputs: int
    """Columns of each expert's matrix."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A module as a node of a part of the model."""

    module: str
    """Full name of the module."""
    part: Part
    """Part of the model."""
    node: Node
    """The node in the part's graph."""
    inputs: int
    """Features of the rows that it takes; 0 if it takes ids."""
    outputs: int
    """Features of the rows that it gives."""
    weights: Mapping[str, tuple[int, ...]]
    """Shapes of its weights, by slot."""
    architecture: Architecture
    """Architecture of the adapter's model."""
    experts: "Experts | None" = None
    """Experts, if the module is the experts of a mixture."""

    @classmethod
    def of(cls, architecture: Architecture, module: str, part: Part, node: str) -> "Place":
        graph = architecture.graphs[part]
        found = graph.node[node]
        given, made = (graph.spec[slots[0][1]].shape for slots in (found.inputs, found.outputs))
        inputs, experts = prod(given) if given else 0, None
        if found.op == "expert_linear":
            matrices, chosen = (
                graph.spec[found.input[slot]].shape for slot in ("weight", "experts")
            )
            experts = Experts(
                num_experts=matrices[0], per_row=chosen[0], outputs=matrices[1], inputs=matrices[2]
            )
        return cls(
            module=module,
            part=part,
            node=found,
            inputs=inputs,
            outputs=prod(made),
            weights={
                slot: spec.shape
                for slot, spec in graph.slot_specs(found).items()
                if spec.kind == "weight"
            },
            architecture=architecture,
            experts=experts,
        )

    @property
    def has_bias(self) -> bool:
        return "bias" in self.node.input


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A place on a backbone that is loaded."""

    place: Place
    """The place."""
    backbone: Backbone
    """The backbone."""
    frozen: Tensor | None = None
    """The adapter's weight there, where it brings one of its own."""

    @property
    def weight(self) -> Weight:
        """Return the weight [out, in], as it is stored."""
        return as_weight(self._tensor("weight"))

    @property
    def bias(self) -> Tensor:
        """Return the bias [out], float32."""
        return self._tensor("bias").to(self.backbone.device, torch.float32)

    @property
    def dense_weight(self) -> Tensor:
        """Return the weight [out, in] in float32, on the backbone's device. It may be the weight
        itself and must not be changed.

        Where ranks divide the model, it is the part of the weight that this rank holds.
        """
        return self.weight.dense().to(self.backbone.device, torch.float32)

    @property
    def whole_weight(self) -> Tensor:
        """Return `dense_weight` of all ranks together. All ranks must call this."""
        own, cut, group = self.dense_weight, self.weight_state, self.backbone.group

        if not isinstance(cut, Cut):
            return own
        shape = list(own.shape)
        shape[cut.dim] = cut.width
        whole = own.new_zeros(shape)
        for rank, part in enumerate(group.all_gather(own, self.place.module)):
            cut.put(whole, part, rank)
        return whole

    def weight_rows(self, rows: Tensor) -> Tensor:
        """Return some rows of the whole weight in float32, by their numbers. All ranks must call
        this.
        """
        table = self.whole_weight if isinstance(self.weight_state, Cut) else self.weight.dense()
        return table[rows.to(table.device)].float()

    def sum_over_inputs(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors where each has some of the site's inputs; elsewhere
        the tensor itself.

        All ranks must call this.
        """
        state = self.weight_state
        is_divided = isinstance(state, Cut) and state.dim == -1
        return self.backbone.group.sum_(x.contiguous(), self.place.module) if is_divided else x

    @property
    def row_norms_squared(self) -> Tensor:
        """Return the sums of squares of the rows of `dense_weight`, over all inputs, float32
        [out].
        """
        # Not a cached_property: before Python 3.12 these take a lock, and ranks that are threads
        # would wait for it.
        found: Tensor | None = self.__dict__.get("row_norms")
        if found is None:
            found = self.__dict__["row_norms"] = self.sum_over_inputs(
                self.dense_weight.square().sum(1)
            )
        return found

    @property
    def weight_state(self) -> AnyState:
        """Return how ranks divide the weight."""
        local = self.backbone.local_of(self.place.architecture)
        return local.state(self.place.part, self.place.node.input["weight"])

    def _tensor(self, slot: str) -> Tensor:
        place = self.place
        if slot == "weight" and self.frozen is not None:
            return self.frozen
        weights: Mapping[str, Any] = self.backbone.weights[place.part]
        tensor: Tensor = weights[place.node.input[slot]]
        return tensor
