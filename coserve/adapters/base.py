"""What a PEFT method is, and an adapter: one method's parameters on one backbone.

A method is one file in `adapters/methods/` with one config class, which answers: at which modules it sits, the bypass
there, the initial value of each parameter, and its form in PEFT's directory. How the methods of the papers answer (x:
the site's input, y: the site's output before the sum):

- LoRA: bypass(x) = B (A x) alpha / r at linear layers. See `adapters/methods/lora.py`.
- IA3: y * l = y + y * (l - 1). Reads "output"; one `mul` with the parameter l - 1 [out], which starts at zero.
- Bottleneck adapters: y + W_up gelu(W_down y). Reads "output" of o_proj and down_proj; `linear`, `gelu`, `linear`;
  W_up starts at zero.
- Prompt tuning: virtual tokens are rows with negative ids, whose embedding is zero. A bypass at the embedding node: a
  `virtual` `embedding` from the constant "tokens" into the parameter table [virtual tokens, hidden].
- Prefix tuning: the same rows, with a bypass at rope_k and v_proj of every block that reads "output" and gives P[j] - y
  on virtual rows and zero elsewhere (one more operator, three lines), so that their keys and values are parameters.
- Selective masks (diff pruning): bypass(x) = (M * D) x, a `linear` with a parameter D [out, in] of which the optimizer
  moves only what the mask M selects.
- Full weights need no bypass: every operator has the gradients of its weights, and `compile_program(asked=...)` takes
  the backbone's own names.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coserve.graph.bypass import AttachedGraph, Bypass, attach
from coserve.graph.tensors import TensorSpec
from coserve.models.backbone import Backbone
from coserve.models.base import Architecture, Part
from coserve.models.bypasses import BoundBypass, Bypasses


class AdapterConfig(ABC):
    """A PEFT method with its settings. Immutable; ValueError when created with settings that no model could take.

    peft_type: PEFT's name of it; in small letters, that of its file and the `type` in a job's settings.
    job_defaults: settings of a job's adapter that differ from the class's defaults.
    """

    peft_type: ClassVar[str]
    job_defaults: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def sites(self, architecture: Architecture, *, every_target: bool = True) -> dict[str, tuple[Part, str]]:
        """Full module name -> (part, node) of every place it sits at; AdapterError if there is none.

        every_target: whether each of several targets must match something, or just one of them.
        """

    @abstractmethod
    def bypass(self, module: str, inputs: int, outputs: int, *, training: bool) -> Bypass:
        """The bypass at a module whose node takes rows of `inputs` features (0: of ids) and gives rows of `outputs`.

        training: with what only training does (dropout). The parameters are the same either way.
        """

    @abstractmethod
    def initial(self, parameter: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The float32 value that a parameter (by its name in the bypass) starts from, on the generator's device."""

    def misfits(self, architecture: Architecture) -> Iterator[tuple[str, str]]:
        """Settings that this model makes pointless, as (setting, what is wrong with it)."""
        yield from ()

    def to_peft_value(self, parameter: str, value: Tensor) -> Tensor:
        """A parameter (by its name in the bypass) as PEFT's files have it; here: as it is."""
        return value

    def from_peft_value(self, parameter: str, value: Tensor) -> Tensor:
        """The inverse of `to_peft_value`, exactly."""
        return value

    @abstractmethod
    def to_peft(self) -> dict[str, Any]:
        """The fields of PEFT's adapter_config.json that say what this config says."""

    @classmethod
    @abstractmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_peft`; AdapterError, naming the field, for anything that would change the numbers and is
        not supported.
        """


@dataclass(frozen=True, kw_only=True)
class AdapterLayout:
    """What an adapter's tensors are, before there are any.

    sites: full module name -> (part, node). shapes, local_names: full parameter name -> its shape, and its name in the
    bypass.
    """

    sites: dict[str, tuple[Part, str]]
    shapes: dict[str, tuple[int, ...]]
    local_names: dict[str, str]

    @classmethod
    def of(cls, config: AdapterConfig, architecture: Architecture, *, every_target: bool = True) -> Self:
        """Of a method on a model; AdapterError if it fits nowhere. every_target: see `AdapterConfig.sites`."""
        sites = config.sites(architecture, every_target=every_target)
        found = [
            (f"{module}.{tensor.name}", tensor)
            for module, (part, node) in sites.items()
            for tensor in _bypass_at(config, architecture, module, part, node).graph.with_kind("parameter")
        ]
        return cls(
            sites=sites,
            shapes={name: tensor.shape for name, tensor in found},
            local_names={name: tensor.name for name, tensor in found},
        )

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def largest(self) -> str:
        """The name of the largest tensor."""
        return max(self.shapes, key=lambda name: prod(self.shapes[name]), default="")


class Adapter:
    """The parameters of one method on one backbone: float32 masters, and a compute copy in the backbone's dtype.

    Where the backbone is float32 the masters are the compute copy. Parameters are named as in PEFT, without its prefix:
    `model.layers.0.self_attn.q_proj.lora_A.weight`.
    """

    def __init__(self, backbone: Backbone, config: AdapterConfig, *, seed: int = 0, every_target: bool = True) -> None:
        """A fresh adapter; AdapterError if it fits nowhere on this model.

        seed: of the initial values, which do not depend on the device. every_target: see `AdapterConfig.sites`.
        """
        self.backbone = backbone
        self.config = config
        layout = AdapterLayout.of(config, backbone.architecture, every_target=every_target)
        self.sites, self.local_names = layout.sites, layout.local_names
        generator = torch.Generator().manual_seed(seed)
        self.masters: dict[str, Tensor] = {}
        self._compute: dict[Part, dict[str, Tensor]] = {}
        modules = {f"{module}.": part for module, (part, _) in self.sites.items()}
        for name, shape in layout.shapes.items():
            local = self.local_names[name]
            if backbone.device.type == "meta":
                value = torch.empty(shape, device="meta")
            else:
                value = config.initial(local, shape, generator).to(backbone.device)
            self.masters[name] = value
            part = modules[name.removesuffix(local)]
            prefix = backbone.architecture.prefix(part)
            self._compute.setdefault(part, {})[name.removeprefix(prefix)] = value.to(backbone.dtype)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.masters.values())

    @property
    def num_bytes(self) -> int:
        """Of the masters."""
        return sum(tensor.nbytes for tensor in self.masters.values())

    @cached_property
    def parameter_parts(self) -> dict[str, tuple[Part, str]]:
        """Full parameter name -> (part, name in the part's graph)."""
        prefix = self.backbone.architecture.prefix
        return {prefix(part) + name: (part, name) for part, tensors in self._compute.items() for name in tensors}

    def parameters(self, part: Part) -> Mapping[str, Tensor]:
        """The compute copies of one part, by their name in its graph."""
        return self._compute.get(part, {})

    def attached(self, part: Part, *, training: bool = True) -> AttachedGraph:
        """The part's graph with this adapter's bypasses, as training differentiates it or as requests run it."""
        return self._attached[training][part]

    def bypasses(self, *, training: bool = False) -> Bypasses:
        """What forward spans of this adapter's rows carry."""
        return self._bypasses[training]

    def sync_compute_copy(self) -> None:
        """Bring the compute copies up to the masters, after an optimizer step or a load."""
        for name, (part, local) in self.parameter_parts.items():
            copy, master = self._compute[part][local], self.masters[name]
            if copy.data_ptr() != master.data_ptr():
                copy.copy_(master)

    def snapshot(self) -> "Adapter":
        """A copy of the parameters as they are now, which later training does not touch."""
        return self.with_masters({name: master.clone() for name, master in self.masters.items()})

    def with_masters(self, masters: dict[str, Tensor]) -> "Adapter":
        """The same adapter with these tensors as its parameters, wherever they are."""
        copy = Adapter.__new__(Adapter)
        copy.backbone, copy.config, copy.sites = self.backbone, self.config, self.sites
        copy.local_names = self.local_names
        copy.masters = masters
        copy._attached = self._attached  # the graphs are the same
        prefix, dtype = self.backbone.architecture.prefix, self.backbone.dtype
        copy._compute = {
            part: {name: masters[prefix(part) + name].to(dtype) for name in tensors}
            for part, tensors in self._compute.items()
        }
        return copy

    @cached_property
    def _attached(self) -> dict[bool, dict[Part, AttachedGraph]]:
        graphs = self.backbone.architecture.graphs
        shared: dict[tuple[Any, ...], AttachedGraph] = {}
        result: dict[bool, dict[Part, AttachedGraph]] = {}
        for training in (True, False):
            result[training] = {}
            for part, graph in graphs.items():
                bypasses = {
                    node: self._bypass(module, training=training)
                    for module, (place, node) in self.sites.items()
                    if place == part
                }
                key = (graph, tuple(bypasses.items()))
                if key not in shared:
                    shared[key] = attach(graph, bypasses)
                result[training][part] = shared[key]
        return result

    @cached_property
    def _bypasses(self) -> dict[bool, Bypasses]:
        return {
            training: Bypasses(
                {
                    part: {
                        site: BoundBypass(bypass=bypass, parameters=self.parameters(part))
                        for site, bypass in attached.bypasses.items()
                    }
                    for part, attached in parts.items()
                    if attached.bypasses
                },
                self.backbone.architecture,
            )
            for training, parts in self._attached.items()
        }

    def _bypass(self, module: str, *, training: bool) -> Bypass:
        return _bypass_at(self.config, self.backbone.architecture, module, *self.sites[module], training=training)


def _bypass_at(
    config: AdapterConfig, architecture: Architecture, module: str, part: Part, node: str, *, training: bool = False
) -> Bypass:
    graph = architecture.graphs[part]
    specs: dict[str, TensorSpec] = graph.slot_specs(graph.node[node])
    first, output = (specs[slots[0]].shape for slots in (graph.node[node].inputs[0], graph.node[node].outputs[0]))
    inputs, outputs = first[-1] if first else 0, output[-1]
    return config.bypass(module, inputs, outputs, training=training)
