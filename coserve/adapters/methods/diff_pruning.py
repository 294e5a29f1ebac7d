"""Diff pruning: a sparse difference z * w to the weights of linear layers, whose gates z are
learned with it. Source: arXiv 2012.07463 (sections 3.1 and 3.2). PEFT has none: directories have
the same two files, with the difference itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.places import Place, Site
from coserve.adapters.reparametrization import HasMasters, Reparametrization
from coserve.adapters.settings import TargetedConfig
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.graph.layouts import WHOLE, AnyState
from coserve.kernels.groups.base import RankGroup
from coserve.models.shares import owned
from coserve.settings import check_number

# The interval that gates are stretched to before they are cut to [0, 1] (arXiv 1712.01312), and
# what they start from.
_LOW, _HIGH, _FIRST_GATE = -1.5, 1.5, 5.0
_LEAST = 1e-6
_DRAWS = "num_draws"
# Half of a float's bits.
_HALF = 16


@dataclass(frozen=True, kw_only=True)
class DiffPruningConfig(TargetedConfig):
    """Diff pruning's settings."""

    peft_type = "DIFF_PRUNING"
    job_defaults: ClassVar[Mapping[str, Any]] = {}
    peft_names: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("fraction", "penalty")},
        **TargetedConfig.target_names,
        **TargetedConfig.whole_names,
    }
    supported = "diff pruning of linear layers"

    target_modules: str | tuple[str, ...] = ("q_proj", "v_proj")
    """Linear layers whose weights differ; see `Targets`."""
    fraction: float = 0.005
    """Share of the elements of the differences that versions keep, the largest ones."""
    penalty: float = 1.25e-7
    """Addition to the loss for each gate that is expected to be open."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("fraction", self.fraction, above=0, most=1)
        check_number("penalty", self.penalty, least=0)

    def target_bypass(self, place: Place, *, training: bool) -> Bypass:
        b = GraphBuilder()
        weight = b.parameter("difference", place.outputs, place.inputs)
        return Bypass(
            graph=b.build(
                b.apply("linear", "change", {"x": b.rows("x", place.inputs), "weight": weight})
            )
        )

    def target_initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        return torch.zeros(shape)

    def target_merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"weight": site.dense_weight + parameters["difference"]}

    def reparametrization(
        self, adapter: Adapter, generator: torch.Generator
    ) -> Reparametrization | None:
        return GatedDifferences(self, adapter, seed=generator.initial_seed())


class GatedDifferences(Reparametrization):
    """Differences w and the logits of their gates. Training computes with gates of this step's
    draw.
    """

    def __init__(self, config: DiffPruningConfig, adapter: Adapter, *, seed: int) -> None:
        """Begin with gates that are open."""
        self._graphs, self._group, self._shapes = (
            adapter.graphs,
            adapter.backbone.group,
            adapter.layout.shapes,
        )
        self._config, self._seed, self._num_draws = config, seed, 0
        self._gated = tuple(
            name for name, local in adapter.layout.local_names.items() if local == "difference"
        )
        self.parameters = {name: master.clone() for name, master in adapter.masters.items()}
        for name in self._gated:
            self.parameters[_gate(name)] = torch.full_like(adapter.masters[name], _FIRST_GATE)

    def apply(self, adapter: HasMasters) -> None:
        self._num_draws += 1
        super().apply(adapter)

    def compose(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # A draw follows from its number alone, so that a job that resumes draws the same gates.
        generator = torch.Generator().manual_seed(self._seed + self._num_draws)
        found = {name: value for name, value in parameters.items() if not name.endswith(_gate(""))}
        for name in self._gated:
            logits = parameters[_gate(name)]
            whole = (
                torch.rand(self._shapes[name], generator=generator)
                .clamp_(_LEAST, 1 - _LEAST)
                .logit()
            )
            # Drawn whole on every rank, so that the number of ranks does not change the gates.
            noise = self._graphs.own(name, whole, self._shapes[name], self._group.rank).to(
                logits.device
            )
            found[name] = found[name] * open_share(logits + noise)
        return found

    def published(self) -> dict[str, Tensor]:
        """Return the differences without noise, and only the largest."""
        found = {
            name: value for name, value in self.parameters.items() if not name.endswith(_gate(""))
        }
        for name in self._gated:
            found[name] = found[name] * open_share(self.parameters[_gate(name)])
        if not self._gated:
            return found
        num_kept = max(
            1, round(self._config.fraction * sum(prod(self._shapes[name]) for name in self._gated))
        )
        least = self._kth_largest([found[name] for name in self._gated], num_kept)
        return {
            name: value * (value.abs() >= least) if name in self._gated else value
            for name, value in found.items()
        }

    def _kth_largest(self, differences: Sequence[Tensor], k: int) -> Tensor:
        """Return the k-th largest size of the elements of all ranks' differences, float32 []."""
        group, states = self._group, self._graphs.states
        if group.size == 1:
            sizes = torch.cat([each.abs().flatten() for each in differences])
            # `kthvalue` counts from the smallest.
            return sizes.kthvalue(sizes.numel() - k + 1).values
        parts = (
            owned(each.abs(), states.get(name, WHOLE), group.rank)
            for name, each in zip(self._gated, differences, strict=True)
        )
        return kth_largest(
            [part.flatten() for part in parts if part is not None], k, group, differences[0].device
        )

    def state_of(self, name: str, states: Mapping[str, AnyState]) -> AnyState:
        """Return how ranks divide a parameter: a gate as its difference."""
        return states.get(name.removesuffix(_gate("")), WHOLE)

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """Return the expected number of open gates, weighted (arXiv 2012.07463, equation 5)."""
        # P(open) = sigmoid(logit - log(-low / high)), and the logarithm is 0, for the interval is
        # symmetric.
        expected = [torch.sigmoid(parameters[_gate(name)]).sum() for name in self._gated]
        return self._config.penalty * torch.stack(expected).sum() if expected else None

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), _DRAWS: torch.tensor(self._num_draws)}

    def load_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rest = super().load_state(state)
        self._num_draws = int(rest.pop(_DRAWS)) - 1  # it is about to be applied again
        return rest


def open_share(logits: Tensor) -> Tensor:
    """Return how far gates are open: the sigmoid, stretched and cut to [0, 1]."""
    return (torch.sigmoid(logits) * (_HIGH - _LOW) + _LOW).clamp(0, 1)


def kth_largest(parts: Sequence[Tensor], k: int, group: RankGroup, device: torch.device) -> Tensor:
    """Return the k-th largest number of all ranks', float32 [], which is the same on all of them.

    Non-negative floats are in the order of their bits as whole numbers. So the upper half of its
    bits is found by counting how many numbers have which, and then the lower half among those
    numbers.

    Args:
        parts: of this rank, float32, without negative numbers; of ranks without any, empty.
        k: from 1 on, at most as many as there are numbers on all ranks; zeros may be left out.
        group: the ranks.
        device: of the result.
    """
    # The sign bit is 0, so the order of int32 is that of the floats.
    bits = [part.view(torch.int32) for part in parts]
    upper, k = _kth_of([each >> _HALF for each in bits], k, group, device)
    lower, _ = _kth_of(
        [each[each >> _HALF == upper] & (2**_HALF - 1) for each in bits], k, group, device
    )
    return torch.tensor((upper << _HALF) + lower, dtype=torch.int32, device=device).view(
        torch.float32
    )


def _kth_of(
    parts: Sequence[Tensor], k: int, group: RankGroup, device: torch.device
) -> tuple[int, int]:
    """Return the k-th largest of all ranks' numbers below 2**16, and its place among those that are
    equal to it.
    """
    counts = torch.zeros(2**_HALF, dtype=torch.int64, device=device)
    for part in parts:
        counts += torch.bincount(part, minlength=2**_HALF)
    # Entry i: how many numbers of all ranks are at least 2^16 - 1 - i.
    from_above = group.all_gather(counts, "sizes of differences").sum(0).flip(0).cumsum(0)
    # The first entry that reaches k is the k-th largest number's.
    place = int((from_above < k).sum())
    return 2**_HALF - 1 - place, k - (int(from_above[place - 1]) if place else 0)


def _gate(name: str) -> str:
    return f"{name}.gate"
