"""The interface of PEFT methods, and adapters: one method's parameters on one backbone.

A method is one file in `adapters/methods/` with one config class, which says at which modules it
sits, its bypass there, the initial value of each parameter, and its form in PEFT's directory. A
bypass may read the site's input x, its output y before the sum and its weights, and tensors that
are derived from the parameters (see `graph.bypass.Bypass`). `adapters/methods/lora.py` is the one
with most settings; `docs/architecture.md` has a short one as a recipe.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coserve.adapters.attached import AdapterGraphs
from coserve.adapters.divided_files import DividedAdapter
from coserve.adapters.file_names import CONFIG_FILE, WEIGHTS_FILE
from coserve.adapters.frozen_weights import FROZEN, FrozenWeights
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.places import Place, Site
from coserve.adapters.reparametrization import Reparametrization
from coserve.adapters.tensor_files import write_tensors
from coserve.adapters.whole_files import replace_file
from coserve.errors import AdapterError
from coserve.graph.bypass import AttachedGraph, Bypass
from coserve.models.backbone import Backbone
from coserve.models.base import Architecture, Part
from coserve.models.bypasses import BoundBypass, Bypasses

# Prefix of parameters' names in PEFT's files.
PEFT_PREFIX = "base_model.model."


class AdapterConfig(ABC):
    """A PEFT method with its settings.

    Immutable. Raises ValueError when created with settings that no model could take.
    """

    peft_type: ClassVar[str]
    """PEFT's name of the method; in small letters, the name of its file, and the `type` in a job's
    settings.
    """
    job_defaults: ClassVar[Mapping[str, Any]] = {}
    """Settings of a job's adapter that differ from the class's defaults."""
    num_virtual_tokens: int = 0
    """Rows that the engine puts before every prompt and example, with the ids -1, -2, …."""
    is_model: ClassVar[bool] = False
    """Whether it is the backbone's own weights. A job then serves each of its steps, and its
    checkpoints are models in Hugging Face's layout.
    """

    @abstractmethod
    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        """Return the places where it sits: (part, node) by full module name.

        Args:
            every_target: whether each of several targets must match something, or just one of them.

        Raises:
            AdapterError: there are none.
        """

    @abstractmethod
    def bypass(self, place: Place, *, training: bool) -> Bypass:
        """Return the bypass at a place.

        Args:
            training: whether it has the parts that only training runs (dropout). The parameters are
                the same either way.
        """

    def shared(self, architecture: Architecture) -> Mapping[str, str]:
        """Return the parameters that are used at a second module: full name of the parameter by its
        full name there.
        """
        return {}

    def why_not_trained(self, architecture: Architecture) -> str:
        """Return why an adapter of this config can be served but not trained; "" if it can."""
        return ""

    @abstractmethod
    def initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        """Return the float32 value that a parameter starts from, whole or the part that this rank
        holds.

        Args:
            parameter: its name in the bypass.
        """

    def sizes(self, architecture: Architecture) -> "AdapterLayout":
        """Return the names and shapes of a job's tensors, which allocates none.

        Raises:
            AdapterError: it fits nowhere on this model.
        """
        return AdapterLayout.of(self, architecture)

    def create(self, backbone: Backbone, *, seed: int) -> "Adapter":
        """Return the adapter that a job begins with.

        Raises:
            AdapterError: it fits nowhere on this model.
        """
        return self.as_served(Adapter(backbone, self, seed=seed), is_fresh=True)

    def as_served(self, adapter: "Adapter", *, is_fresh: bool) -> "Adapter":
        """Return the adapter that versions are made of; by default the given one.

        Args:
            adapter: an adapter of this config.
            is_fresh: whether it was just created; otherwise PEFT's directory has it so.
        """
        return adapter

    def reparametrization(
        self, adapter: "Adapter", generator: torch.Generator
    ) -> Reparametrization | None:
        """Return the parameters that are trained in place of those of an adapter that is
        `as_served`; None: the adapter's own are trained.

        Args:
            generator: draws initial values.
        """
        return None

    def derived(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the derived tensors of the bypass at a site by their names there, made after each
        change of its parameters.

        Args:
            parameters: float32; whole, or the part that this rank holds, as are the derived
                tensors.
        """
        return {}

    def merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a site's own weights ("weight", "bias") with the adapter merged into them,
        float32.

        Raises:
            AdapterError: they cannot hold what the adapter adds.
        """
        raise AdapterError(
            f"{self.peft_type} adapters cannot be merged: they add what the model's weights cannot "
            f"have"
        )

    def misfits(self, architecture: Architecture) -> Iterator[tuple[str, str]]:
        """Yield settings that this model makes pointless, as (setting, what is wrong with it)."""
        yield from ()

    def to_peft_tensors(
        self, values: Mapping[str, Tensor], layout: "AdapterLayout"
    ) -> dict[str, Tensor]:
        """Return parameters (by full name) as PEFT's files have them; by default `to_peft_value` of
        each, under its own name.
        """
        return {
            PEFT_PREFIX + name: self.to_peft_value(layout.local_names[name], values[name])
            for name in values
        }

    def from_peft_tensors(
        self, tensors: Mapping[str, Tensor], layout: "AdapterLayout"
    ) -> dict[str, Tensor]:
        """Return parameters by full name from PEFT's tensors, exactly."""
        return {
            name: self.from_peft_value(local, tensors[PEFT_PREFIX + name])
            for name, local in layout.local_names.items()
        }

    def frozen_file_name(self, module: str, architecture: Architecture) -> str:
        """Return the name in PEFT's file of a module's weight that the adapter brings and does not
        train.
        """
        return f"{PEFT_PREFIX}{module}.weight"

    def to_peft_value(self, parameter: str, value: Tensor) -> Tensor:
        """Return a parameter (by its name in the bypass) as PEFT's files have it; by default as it
        is.
        """
        return value

    def from_peft_value(self, parameter: str, value: Tensor) -> Tensor:
        """Return a parameter (by its name in the bypass) from PEFT's form, exactly."""
        return value

    @abstractmethod
    def to_peft(self) -> dict[str, Any]:
        """Return this config as fields of PEFT's adapter_config.json."""

    def to_peft_of(self, architecture: Architecture) -> dict[str, Any]:
        """Return the fields that PEFT needs about the model."""
        return {}

    @classmethod
    @abstractmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Self:
        """Return the config of fields of PEFT's adapter_config.json.

        Raises:
            AdapterError: a field would change the numbers and is not supported; the message names
                it.
        """


class Adapter:
    """The parameters of one method on one backbone: float32 masters, and a compute copy in the
    backbone's dtype.

    Where the backbone is float32 the masters are the compute copy. Parameters are named as in PEFT,
    without its prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`. `at` has the sites of its
    modules on the backbone.
    """

    def __init__(
        self,
        backbone: Backbone,
        config: AdapterConfig,
        *,
        seed: int = 0,
        every_target: bool = True,
        masters: Mapping[str, Tensor] | None = None,
        frozen: FrozenWeights | None = None,
        frozen_weights: Mapping[str, Tensor] | None = None,
        graphs: AdapterGraphs | None = None,
    ) -> None:
        """Create an adapter.

        Args:
            seed: seed of the initial values, the same on any device.
            every_target: see `AdapterConfig.sites`.
            masters: parameters that are copied in place of initial values, whole or the part that
                this rank holds.
            frozen: weights that the adapter brings and does not train.
            frozen_weights: their tensors by module, whole or the part that this rank holds.
            graphs: the adapter's graphs, if they exist already.

        Raises:
            AdapterError: it fits nowhere on this model.
        """
        self.backbone, self.config = backbone, config
        if graphs is not None:
            self.graphs = graphs
        architecture = backbone.architecture
        self.layout = layout = AdapterLayout.of(
            config, architecture, every_target=every_target, frozen=frozen
        )
        self.frozen_weights = {
            module: self._own_frozen(module, tensor)
            for module, tensor in (frozen_weights or {}).items()
        }
        self.at = {
            module: Site(place=place, backbone=backbone, frozen=self._frozen_weight(module))
            for module, place in layout.places.items()
        }
        generator = torch.Generator().manual_seed(seed)
        self.masters: dict[str, Tensor] = {}
        self._compute: dict[Part, dict[str, Tensor]] = {}
        for name, shape in layout.shapes.items():
            module = layout.modules[name]
            if masters is not None:
                value = masters[name].to(backbone.device, torch.float32, copy=True)
            elif backbone.device.type == "meta":
                value = torch.empty(shape, device="meta")
            else:
                value = config.initial(layout.local_names[name], shape, self.at[module], generator)
            # A value that comes from a weight may have the strides in which a backend has laid
            # that, and PyTorch's fused AdamW reads a gradient in memory order.
            value = self.graphs.own(
                name, value.to(backbone.device), shape, backbone.ranks.rank
            ).contiguous()
            self.masters[name] = value
            part = layout.places[module].part
            local = name.removeprefix(backbone.architecture.prefix(part))
            self._compute.setdefault(part, {})[local] = value.to(backbone.dtype)
        for name, owner in layout.shared.items():
            part, local = self._place_of(name)
            owner_part, owner_local = self._place_of(owner)
            self._compute.setdefault(part, {})[local] = self._compute[owner_part][owner_local]
        self._tensors = {part: dict(tensors) for part, tensors in self._compute.items()}
        for site in self.at.values():
            if site.frozen is not None:
                self._tensors.setdefault(site.place.part, {})[
                    f"{site.place.node.name}.{FROZEN}"
                ] = site.frozen
        self._derive()

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens of the adapter's model, if it differs from the backbone's;
        else 0.
        """
        own = self.architecture.vocab_size
        return 0 if own == self.backbone.architecture.vocab_size else own

    @property
    def architecture(self) -> Architecture:
        """Return the architecture of the adapter's model, whose vocabulary may differ from the
        backbone's.
        """
        return self.layout.architecture

    def _own_frozen(self, module: str, tensor: Tensor) -> Tensor:
        """Return what this rank holds of a weight that the adapter brings."""
        assert self.layout.frozen is not None
        whole, rank = self.layout.frozen.shapes(self.architecture)[module], self.backbone.ranks.rank
        own = self.graphs.own(f"{module}.{FROZEN}", tensor, whole, rank)
        return own.to(self.backbone.device, self.backbone.dtype).contiguous()

    def _frozen_weight(self, module: str) -> Tensor | None:
        """Return the weight that the adapter brings for a module, if it brings one."""
        frozen = self.layout.frozen
        return (
            None
            if frozen is None
            else self.frozen_weights.get(frozen.owner(module, self.architecture))
        )

    def _place_of(self, name: str) -> tuple[Part, str]:
        """Return the part of a parameter, by its full name, and its name in the part's graph."""
        place = next(
            place for module, place in self.layout.places.items() if name.startswith(f"{module}.")
        )
        return place.part, name.removeprefix(self.architecture.prefix(place.part))

    @property
    def sites(self) -> dict[str, tuple[Part, str]]:
        """Return (part, node) by full module name."""
        return self.layout.sites

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.masters.values())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the masters."""
        return sum(tensor.nbytes for tensor in self.masters.values())

    @cached_property
    def parameter_parts(self) -> dict[str, tuple[Part, str]]:
        """Return (part, name in the part's graph) by full parameter name."""
        places = [(part, name) for part, tensors in self._compute.items() for name in tensors]
        prefix, shared = self.architecture.prefix, self.layout.shared
        return {
            full: (part, name)
            for part, name in places
            if (full := prefix(part) + name) not in shared
        }

    def parameters(self, part: Part) -> Mapping[str, Tensor]:
        """Return the compute copies of one part, by their names in its graph."""
        return self._compute.get(part, {})

    def tensors(self, part: Part) -> Mapping[str, Tensor]:
        """Return the compute copies of one part and the tensors that are derived from them, by
        their names in its graph.
        """
        return self._tensors.get(part, {})

    def attached(self, part: Part, *, training: bool = True) -> AttachedGraph:
        """Return the part's graph with this adapter's bypasses, as training differentiates it or as
        requests run it.
        """
        return self.graphs.by_training[training][part]

    def bypasses(self, *, training: bool = False) -> Bypasses:
        """Return the bypasses that forward spans of this adapter's rows carry."""
        return self._bypasses[training]

    def sync_compute_copy(self) -> None:
        """Update the compute copies and the derived tensors from the masters, after an optimizer
        step or a load.
        """
        copies, masters = [], []
        for name, (part, local) in self.parameter_parts.items():
            copy, master = self._compute[part][local], self.masters[name]
            if copy.data_ptr() != master.data_ptr():
                copies.append(copy)
                masters.append(master)
        if copies:
            torch._foreach_copy_(copies, masters)
        self._derive()

    def master_name(self, part: Part, name: str) -> str:
        """Return the full name of a parameter by its name in a part's graph."""
        full = self.architecture.prefix(part) + name
        return self.layout.shared.get(full, full)

    def checkpoint_copy(self) -> "Adapter":
        """Return a copy of everything that a checkpoint needs."""
        return self.snapshot()

    def state(self) -> dict[str, Tensor]:
        """Return copies of the tensors that a job needs to resume, beside the adapter's files."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Resume from such tensors; return those that are left.

        Raises:
            KeyError: one is missing.
        """
        return dict(state)

    def save(self, directory: Path) -> None:
        """Write its files in PEFT's format, float32, with this backbone as the base model and
        causal language modelling as the task. Each of several ranks writes the part that it holds
        (see `shared_files`).
        """
        fields = {**self.config.to_peft(), **self.config.to_peft_of(self.architecture)}
        fields["base_model_name_or_path"] = self.backbone.name
        content = (json.dumps(fields, indent=2) + "\n").encode()
        layout, ranks, frozen = self.layout, self.backbone.ranks, self.layout.frozen
        if ranks.size > 1:
            divided = DividedAdapter(
                form=self.config, layout=layout, graphs=self.graphs, ranks=ranks
            )
            divided.write(directory, self.masters, content, self.frozen_weights)
            return
        tensors = self.config.to_peft_tensors(self.masters, layout)
        if frozen is not None:
            tensors |= frozen.in_files(
                self.frozen_weights, self.architecture, self.config.frozen_file_name
            )
        write_tensors(
            directory / WEIGHTS_FILE,
            {name: each.contiguous().cpu() for name, each in tensors.items()},
        )
        replace_file(directory / CONFIG_FILE, content)

    def snapshot(self) -> "Adapter":
        """Return a copy of the parameters as they are now, which later training does not change."""
        return self.with_masters({name: master.clone() for name, master in self.masters.items()})

    def with_masters(self, masters: dict[str, Tensor]) -> "Adapter":
        """Return the same adapter with these tensors as its parameters, on any device: equal ones,
        or ones that are never computed with.
        """
        copy = Adapter.__new__(Adapter)
        copy.backbone, copy.config, copy.layout, copy.at = (
            self.backbone,
            self.config,
            self.layout,
            self.at,
        )
        copy.masters, copy.frozen_weights = masters, self.frozen_weights
        copy.graphs = self.graphs  # the graphs are the same
        computed = {name: master.to(self.backbone.dtype) for name, master in masters.items()}
        copy._compute = {
            part: {name: computed[self.master_name(part, name)] for name in tensors}
            for part, tensors in self._compute.items()
        }
        copy._tensors = {
            part: {**tensors, **copy._compute.get(part, {})}
            for part, tensors in self._tensors.items()
        }
        return copy

    def _derive(self) -> None:
        """Compute the derived tensors from the masters. They are new tensors, since those of other
        copies of the adapter stay as they are.
        """
        for module, specs in self.layout.derived.items():
            site = self.at[module]
            if self.backbone.device.type == "meta":
                derived: Mapping[str, Tensor] = {
                    spec.name: torch.empty(spec.shape, device="meta") for spec in specs
                }
            else:
                derived = self.config.derived(site, self.masters_at[module])
            assert derived.keys() == {spec.name for spec in specs}, (
                "what the bypass declares, and no more"
            )
            tensors = self._tensors.setdefault(site.place.part, {})
            for spec in specs:
                full, rank = f"{module}.{spec.name}", self.backbone.ranks.rank
                own = self.graphs.own_derived(full, derived[spec.name], spec.shape, rank)
                tensors[f"{site.place.node.name}.{spec.name}"] = own.to(self.backbone.dtype)

    @cached_property
    def masters_at(self) -> dict[str, dict[str, Tensor]]:
        """Return the parameters of each module by their names in the bypass."""
        by_module: dict[str, dict[str, Tensor]] = {module: {} for module in self.layout.places}
        for name, master in self.masters.items():
            by_module[self.layout.modules[name]][self.layout.local_names[name]] = master
        for name, owner in self.layout.shared.items():
            module = next(module for module in by_module if name.startswith(f"{module}."))
            by_module[module][name.removeprefix(f"{module}.")] = self.masters[owner]
        return by_module

    @cached_property
    def graphs(self) -> AdapterGraphs:
        """Return the graphs of the model's parts with the bypasses, and the part of each parameter
        that this rank holds.
        """
        return AdapterGraphs.on(self.config, self.layout, self.backbone)

    @cached_property
    def _bypasses(self) -> dict[bool, Bypasses]:
        return {
            training: Bypasses(
                {
                    part: {
                        site: BoundBypass(bypass=bypass, parameters=self.tensors(part))
                        for site, bypass in attached.bypasses.items()
                    }
                    for part, attached in parts.items()
                    if attached.bypasses
                },
                self.architecture,
            )
            for training, parts in self.graphs.by_training.items()
        }
