"""Diff pruning: a sparse difference z * w to the weights of linear layers, whose gates z are learned with it. Source:
arXiv 2012.07463 (sections 3.1 and 3.2). PEFT has none: directories have the same two files, with the difference itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.places import Place, Site
from coserve.adapters.reparametrization import HasMasters, Reparametrization
from coserve.adapters.settings import TargetedConfig
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.settings import check_number

# The interval that gates are stretched to before they are cut to [0, 1] (arXiv 1712.01312), and what they start from.
_LOW, _HIGH, _FIRST_GATE = -1.5, 1.5, 5.0
_LEAST = 1e-6
_DRAWS = "num_draws"


@dataclass(frozen=True, kw_only=True)
class DiffPruningConfig(TargetedConfig):
    """Diff pruning.

    fraction: of the elements of the differences, those that versions keep, the largest ones. penalty: of the loss for
    each gate that is expected to be open.
    """

    peft_type = "DIFF_PRUNING"
    job_defaults: ClassVar[Mapping[str, Any]] = {}
    peft_names: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("fraction", "penalty")},
        **TargetedConfig.target_names,
        **TargetedConfig.whole_names,
    }
    supported = "diff pruning of linear layers"

    target_modules: str | tuple[str, ...] = ("q_proj", "v_proj")
    fraction: float = 0.005
    penalty: float = 1.25e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("fraction", self.fraction, above=0, most=1)
        check_number("penalty", self.penalty, least=0)

    def target_bypass(self, place: Place, *, training: bool) -> Bypass:
        b = GraphBuilder()
        weight = b.parameter("difference", place.outputs, place.inputs)
        return Bypass(graph=b.build(b.apply("linear", "change", {"x": b.rows("x", place.inputs), "weight": weight})))

    def target_initial(self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator) -> Tensor:
        return torch.zeros(shape)

    def target_merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"weight": site.dense_weight + parameters["difference"]}

    def reparametrization(self, adapter: Adapter, generator: torch.Generator) -> Reparametrization | None:
        return GatedDifferences(self, adapter, seed=generator.initial_seed())


class GatedDifferences(Reparametrization):
    """Differences w and the logits of their gates; what is trained on has gates of this step's draw."""

    def __init__(self, config: DiffPruningConfig, adapter: Adapter, *, seed: int) -> None:
        """Begin with gates that are open.

        Raises:
            AdapterError: ranks hold parts of the differences, whose gates are drawn as a whole.
        """
        adapter.check_whole("trained with the random gates of diff pruning")
        self._config, self._seed, self._num_draws = config, seed, 0
        self._gated = tuple(name for name, local in adapter.layout.local_names.items() if local == "difference")
        self.parameters = {name: master.clone() for name, master in adapter.masters.items()}
        for name in self._gated:
            self.parameters[_gate(name)] = torch.full_like(adapter.masters[name], _FIRST_GATE)

    def apply(self, adapter: HasMasters) -> None:
        self._num_draws += 1
        super().apply(adapter)

    def compose(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(self._seed + self._num_draws)
        found = {name: value for name, value in parameters.items() if not name.endswith(_gate(""))}
        for name in self._gated:
            logits = parameters[_gate(name)]
            noise = torch.rand(logits.shape, generator=generator).clamp_(_LEAST, 1 - _LEAST).logit().to(logits.device)
            found[name] = found[name] * open_share(logits + noise)
        return found

    def published(self) -> dict[str, Tensor]:
        """Without noise, and only the largest."""
        found = {name: value for name, value in self.parameters.items() if not name.endswith(_gate(""))}
        for name in self._gated:
            found[name] = found[name] * open_share(self.parameters[_gate(name)])
        if not self._gated:
            return found
        sizes = torch.cat([found[name].abs().flatten() for name in self._gated])
        num_kept = max(1, round(self._config.fraction * sizes.numel()))
        least = sizes.kthvalue(sizes.numel() - num_kept + 1).values
        return {name: value * (value.abs() >= least) if name in self._gated else value for name, value in found.items()}

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """The number of gates that are expected to be open, weighed (arXiv 2012.07463, equation 5)."""
        expected = [torch.sigmoid(parameters[_gate(name)]).sum() for name in self._gated]
        return self._config.penalty * torch.stack(expected).sum() if expected else None

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), _DRAWS: torch.tensor(self._num_draws)}

    def load_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rest = super().load_state(state)
        self._num_draws = int(rest.pop(_DRAWS)) - 1  # it is about to be applied again
        return rest


def open_share(logits: Tensor) -> Tensor:
    """How far gates are open: the sigmoid, stretched and cut to [0, 1]."""
    return (torch.sigmoid(logits) * (_HIGH - _LOW) + _LOW).clamp(0, 1)


def _gate(name: str) -> str:
    return f"{name}.gate"
