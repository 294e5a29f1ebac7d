"""The backbone's own weights as what a job trains: float32 masters, which are copied into the
served weights after each step.

There is one copy of the weights in the compute dtype: the one that serves. So training changes the
served weights step by step, and needs no bypass: every operator has the gradients of its weights.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from coserve.adapters.attached import AdapterGraphs
from coserve.adapters.base import Adapter, AdapterConfig
from coserve.adapters.file_names import FULL_FILE
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.whole_files import replace_file
from coserve.errors import AdapterError
from coserve.graph.bypass import AttachedGraph
from coserve.kernels.weights import Weight
from coserve.models.backbone import Backbone
from coserve.models.base import HEAD, Architecture, Part
from coserve.models.restoring import HeldWeights, read_weights
from coserve.models.saving import save_model
from coserve.models.saving_pieces import save_model_pieces
from coserve.models.shared_files import write_shared_bytes
from coserve.models.source import find_model


class FullWeights(Adapter):
    """The backbone's weights in the role of an adapter.

    `masters` are by full name. A head that is the table of embeddings has none of its own.
    """

    def __init__(
        self, backbone: Backbone, config: AdapterConfig, names: Mapping[str, tuple[Part, str]]
    ) -> None:
        """Copy the masters from the served weights.

        Args:
            names: (part, name in its graph) of the weights that are trained, by full name.

        Raises:
            AdapterError: they cannot be trained.
        """
        if backbone.weight_format != "dense":
            raise AdapterError(
                f"{backbone.weight_format} weights cannot be trained; start the server with dense "
                f"ones"
            )
        self.backbone, self.config, self.at = backbone, config, {}
        self.layout = AdapterLayout.of(config, backbone.architecture)
        self._names = dict(names)
        self.masters = {
            name: self._served(name).to(torch.float32, copy=True).contiguous() for name in names
        }
        self._compute, self._tensors = {}, {}

    @property
    def sites(self) -> dict[str, tuple[Part, str]]:
        """Return (part, name in its graph) by weight: the places that the backward pass has to
        reach.
        """
        return self._names

    def parameters(self, part: Part) -> Mapping[str, Tensor]:
        """Return the weights of one part, by name in its graph; the backbone has them, too."""
        return self._of_part.get(part, {})

    @cached_property
    def _of_part(self) -> dict[Part, dict[str, Tensor]]:
        found: dict[Part, dict[str, Tensor]] = {}
        for name, (part, local) in self._names.items():
            found.setdefault(part, {})[local] = self._served(name)
        if self.backbone.architecture.tied and self._table in self._names:
            found.setdefault("head", {})[HEAD] = self._served(self._table)
        return found

    def tensors(self, part: Part) -> Mapping[str, Tensor]:
        return {}

    def master_name(self, part: Part, name: str) -> str:
        full = super().master_name(part, name)
        return self._table if full == HEAD and HEAD not in self._names else full

    @cached_property
    def graphs(self) -> AdapterGraphs:
        """Return the backbone's graphs as they are, and the part of each weight that this rank
        holds.
        """
        local, names = self.backbone.local, self._names.items()
        attached = {
            part: AttachedGraph(graph=graph, bypasses={}) for part, graph in local.graphs.items()
        }
        if not local.divided:
            return AdapterGraphs(by_training={True: attached, False: attached})
        return AdapterGraphs(
            by_training={True: attached, False: attached},
            states={name: local.state(part, tensor) for name, (part, tensor) in names},
            summed=tuple(
                sorted(
                    name for name, (part, tensor) in names if tensor in local.divided[part].summed
                )
            ),
        )

    def sync_compute_copy(self) -> None:
        """Publish the masters to the served weights, in place."""
        for name, master in self.masters.items():
            self._served(name).copy_(master)

    @torch.inference_mode()
    def restore(self, directory: Path | None = None) -> None:
        """Begin again with the weights of the model's files, or of a directory that `save` wrote.

        Raises:
            ModelError: there are none.
        """
        source = find_model(self.backbone.name if directory is None else str(directory))
        read_weights(self.backbone.architecture, source, self._held)
        self.sync_compute_copy()
        for name, master in self.masters.items():
            master.copy_(self._served(name))  # rounded, as they were when they were loaded

    def snapshot(self) -> Adapter:
        """Return a version: the served weights, as they are at any time."""
        return Adapter(self.backbone, self.config)

    def checkpoint_copy(self) -> Adapter:
        copy = FullWeights.__new__(FullWeights)
        copy.__dict__.update(self.__dict__)
        copy.masters = {name: master.clone() for name, master in self.masters.items()}
        return copy

    def state(self) -> dict[str, Tensor]:
        """Return the masters as they are; the model's files have them in the dtypes that it came
        in.
        """
        return {f"{name}/value": master.clone() for name, master in self.masters.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rest = dict(state)
        for name, master in self.masters.items():
            master.copy_(rest.pop(f"{name}/value"))
        self.sync_compute_copy()
        return rest

    def save(self, directory: Path) -> None:
        """Write a model in Hugging Face's layout, and which of its weights were trained. Each of
        several ranks writes the part that it holds (see `shared_files`).
        """
        architecture, ranks = self.backbone.architecture, self.backbone.ranks
        source = find_model(self.backbone.name)
        content = (json.dumps(self.config.to_peft(), indent=2) + "\n").encode()
        if ranks.size > 1:
            save_model_pieces(architecture, source, directory, self._held, ranks)
            write_shared_bytes(directory / FULL_FILE, content, ranks)
            return
        save_model(architecture, source, directory, self.masters, keeps_tie=True)
        replace_file(directory / FULL_FILE, content)

    @property
    def _held(self) -> HeldWeights:
        return HeldWeights(
            weights=self.masters, states=self.graphs.states, rank=self.backbone.ranks.rank
        )

    @property
    def _table(self) -> str:
        return f"{self.backbone.architecture.embedding_name}.weight"

    def _served(self, name: str) -> Tensor:
        part, local = self._names[name]
        weight = self.backbone.weights[part][local]
        return weight.tensors()[0] if isinstance(weight, Weight) else weight


def weight_places(architecture: Architecture) -> dict[str, tuple[Part, str]]:
    """Return (part, name in its graph) of every weight that a model owns, by full name."""
    return {
        name: (part, tensor.name)
        for part in architecture.parts
        for tensor in architecture.graphs[part].with_kind("weight")
        if (name := architecture.prefix(part) + tensor.name) in architecture.weight_shapes
    }
