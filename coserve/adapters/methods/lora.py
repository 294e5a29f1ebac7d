"""LoRA: bypass(x) = B (A dropout(x)) * scaling.

Sources: arXiv 2106.09685; rank-stabilised scaling: arXiv 2312.03732; DoRA, magnitudes for the rows
of the sum with the weight: arXiv 2402.09353; factors that start from the weight itself: see
`adapters.principal`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.embedding_choices import EmbeddingChoices
from coserve.adapters.embedding_lora import (
    EMBEDDING_A,
    EMBEDDING_B,
    embedding_bypass,
    embedding_change,
    embedding_initial,
    embedding_site,
    tied_modules,
)
from coserve.adapters.experts import (
    expert_bypass,
    expert_name,
    expert_sites,
    expert_targets,
    from_stacked,
    to_stacked,
)
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.patterns import ByPattern
from coserve.adapters.places import Place, Site
from coserve.adapters.principal import (
    LORA_A,
    LORA_B,
    TrainedHalf,
    beside_weight,
    is_principal,
    principal_factors,
)
from coserve.adapters.reparametrization import Reparametrization
from coserve.adapters.settings import TargetedConfig, check_flags
from coserve.adapters.trainable_tokens import (
    TOKENS,
    TokenIndices,
    token_graph,
    token_indices,
    tokens_initial,
    with_tokens,
)
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass, combined
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture, Part
from coserve.settings import MOST_WHOLE, check_number, check_whole, is_number, shown

# Initial values that leave the backbone's weights alone and are none of `_INITIAL_VALUES`: of an
# adapter that is there they say nothing.
_FORGOTTEN_INITIAL_VALUES = (False, None, "eva", "orthogonal")
_INITIAL_VALUES = ("gaussian", "pissa", "pissa_niter_N", "olora")
_MAX_ALPHA = 1e9
_MAGNITUDE, _BIAS = "lora_magnitude_vector", "lora_B.bias"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(TargetedConfig):
    """LoRA with PEFT's settings, under PEFT's meaning."""

    peft_type = "LORA"
    job_defaults: ClassVar[Mapping[str, Any]] = {
        "r": 16,
        "alpha": 32,
        "target_modules": "all-linear",
    }
    peft_names: ClassVar[Mapping[str, str]] = {
        **{
            name: name for name in ("r", "use_rslora", "use_dora", "lora_bias", "init_lora_weights")
        },
        **{name: name for name in ("rank_pattern", "alpha_pattern")},
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        **{
            name: name
            for name in ("target_parameters", "trainable_token_indices", "ensure_weight_tying")
        },
        **TargetedConfig.target_names,
        **TargetedConfig.whole_names,
    }
    constants: ClassVar[Mapping[str, Any]] = {"bias": "none", "fan_in_fan_out": False}
    harmless = frozenset(("megatron_config", "megatron_core", "eva_config", "qalora_group_size"))
    required = ("r", "alpha", "target_modules")
    supported = (
        "LoRA on linear layers and embeddings with r, alpha, rsLoRA, DoRA, biases of B, PiSSA, "
        "OLoRA, dropout, "
        "patterns, whole modules and trainable tokens"
    )

    target_modules: str | tuple[str, ...] = ("q_proj", "v_proj")
    """Modules that have a LoRA; see `Targets`."""
    target_parameters: tuple[str, ...] = ()
    """Matrices of all experts of a mixture, each of which has a LoRA of its own: ends of their
    names, such as `mlp.experts.down_proj`.
    """
    r: int = 8
    """Rank."""
    alpha: float = 8
    """Numerator of the scaling alpha / r."""
    dropout: float = 0.0
    """Probability with which training drops a feature of the bypass's input."""
    use_rslora: bool = False
    """Whether the scaling is alpha / sqrt(r)."""
    use_dora: bool = False
    """Whether it has DoRA's magnitudes."""
    lora_bias: bool = False
    """Whether B has a bias, which is scaled with it."""
    init_lora_weights: bool | str = True
    """True (A uniform, B zero), or one of `_INITIAL_VALUES`."""
    trainable_token_indices: TokenIndices = ()
    """Tokens whose embeddings are trained, or such tokens by module name."""
    ensure_weight_tying: bool = False
    """Whether a head that is the table of embeddings stays that table with the adapter's changes.
    """
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Rank of modules whose name ends with a match of the pattern."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Alpha of modules whose name ends with a match of the pattern."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_parameters", expert_targets(self.target_parameters))
        object.__setattr__(
            self, "trainable_token_indices", token_indices(self.trainable_token_indices)
        )
        super().__post_init__()
        others = (
            self.dropout or self.use_dora or self.lora_bias or is_principal(self.init_lora_weights)
        )
        if self.target_parameters and others:
            raise ValueError(
                "LoRA's target_parameters go without dropout, use_dora, lora_bias, and initial "
                "values of a weight"
            )
        for name, values in (
            ("rank_pattern", self.rank_pattern),
            ("alpha_pattern", self.alpha_pattern),
        ):
            if not isinstance(values, Mapping) or not all(
                isinstance(pattern, str) for pattern in values
            ):
                raise ValueError(
                    f"{name} must be a mapping from patterns to numbers, not {shown(values)}"
                )
        for name, rank in (("r", self.r), *self.rank_pattern.items()):
            check_whole(f"LoRA's rank {_shortened(name)}", rank, 1, MOST_WHOLE)
        for name, alpha in (("alpha", self.alpha), *self.alpha_pattern.items()):
            check_number(f"LoRA's {_shortened(name)}", alpha, above=0, most=_MAX_ALPHA)
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"LoRA's dropout must be at least 0 and below 1, not {shown(self.dropout)}"
            )
        check_flags(self, "use_rslora", "use_dora", "lora_bias", "ensure_weight_tying")
        initial = self.init_lora_weights
        if initial is not True and initial != "gaussian" and not is_principal(initial):
            known = ", ".join(_INITIAL_VALUES)
            raise ValueError(
                f"LoRA's init_lora_weights must be true or one of {known}, not {shown(initial)}"
            )
        if self.lora_bias and self.use_dora:
            raise ValueError(
                "LoRA's lora_bias must be false with use_dora; PEFT has no DoRA whose B has a bias"
            )
        if is_principal(initial) and self.dropout:
            raise ValueError(
                f"LoRA's dropout must be 0 with init_lora_weights={initial!r}, which starts from a "
                f"part of the weight"
            )
        self._ranks, self._alphas  # noqa: B018 (they check themselves)

    @cached_property
    def _ranks(self) -> ByPattern[int]:
        return ByPattern("rank_pattern", self.rank_pattern, self.r)

    @cached_property
    def _alphas(self) -> ByPattern[float]:
        return ByPattern("alpha_pattern", self.alpha_pattern, self.alpha)

    def misfits(self, architecture: Architecture) -> Iterator[tuple[str, str]]:
        for name, rank in (
            ("r", self.r),
            *((f"rank_pattern.{each}", rank) for each, rank in self.rank_pattern.items()),
        ):
            if rank > architecture.hidden_size:
                yield (
                    name,
                    f"is {rank}; a rank above the model's {architecture.hidden_size} adds nothing",
                )

    def rank(self, module: str) -> int:
        """Return the rank at a module."""
        return self._ranks.at(module)

    def scaling(self, module: str) -> float:
        """Return the factor on B A at a module."""
        rank = self.rank(module)
        return self._alphas.at(module) / (sqrt(rank) if self.use_rslora else rank)

    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        experts = expert_sites(self.target_parameters, architecture)
        targeted = super().sites(architecture, every_target=every_target)
        choices, modules = self._embeddings(architecture), tied_modules(architecture)
        targets = self.target_sites(architecture, every_target=False) if choices.tokens else ()
        choices.check_tokens(targets, use_dora=self.use_dora)
        return {**targeted, **{module: modules[module] for module in choices.tokens}, **experts}

    def can_be_targets(self, architecture: Architecture) -> Mapping[str, tuple[Part, str]]:
        return {**architecture.linear_sites, **embedding_site(architecture)}

    def target_sites(
        self, architecture: Architecture, *, every_target: bool
    ) -> dict[str, tuple[Part, str]]:
        chosen = super().target_sites(architecture, every_target=every_target)
        if self._embeddings(architecture).ties_targets:
            chosen |= tied_modules(architecture)
        if architecture.embedding_name in chosen:
            self._check_embedding_target(architecture)
        return chosen

    def whole_names_of(self, architecture: Architecture) -> tuple[str, ...]:
        return self._embeddings(architecture).whole_names

    def tokens(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Return the tokens by the modules that have rows of their own for them."""
        return self._embeddings(architecture).tokens

    def shared(self, architecture: Architecture) -> Mapping[str, str]:
        return self._embeddings(architecture).shared

    def why_not_trained(self, architecture: Architecture) -> str:
        return self._embeddings(architecture).why_not_trained

    def _embeddings(self, architecture: Architecture) -> EmbeddingChoices:
        return EmbeddingChoices(
            architecture=architecture,
            targets=self._targets,
            modules_to_save=self.modules_to_save,
            token_setting=self.trainable_token_indices,
            ensures_tie=self.ensure_weight_tying,
        )

    def _check_embedding_target(self, architecture: Architecture) -> None:
        """Raise AdapterError for settings that a LoRA at embeddings does not have."""
        has_others = self.use_dora or self.lora_bias or is_principal(self.init_lora_weights)
        if has_others:
            raise AdapterError(
                f"target_modules means {architecture.embedding_name}, where LoRA goes without "
                f"use_dora, lora_bias, and "
                "initial values of a weight: leave it out of target_modules, or name it in "
                "modules_to_save"
            )

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        tokens = (
            self.tokens(place.architecture).get(place.module)
            if self.trainable_token_indices
            else None
        )
        if tokens is None:
            return super().bypass(place, training=training)
        own = token_graph(place, tokens)
        if place.module not in self.target_sites(place.architecture, every_target=False):
            return Bypass(graph=own)
        other = super().bypass(place, training=training).graph
        assert other is not None, "a target has a graph"
        return Bypass(graph=combined(own, other))

    def initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        if parameter == TOKENS:
            return tokens_initial(self.tokens(site.place.architecture)[site.place.module], site)
        return super().initial(parameter, shape, site, generator)

    def target_bypass(self, place: Place, *, training: bool) -> Bypass:
        if place.experts is not None:
            return expert_bypass(
                place, place.experts, self.rank(place.module), self.scaling(place.module)
            )
        if place.node.op == "embedding":
            return embedding_bypass(place, self.rank(place.module), self.scaling(place.module))
        b, rank = GraphBuilder(), self.rank(place.module)
        b.rows("x", place.inputs)
        into = {"x": "x", "weight": b.parameter(LORA_A, rank, place.inputs)}
        is_dropping = training and self.dropout > 0
        # By the module's last name: blocks stay alike and share programs; row ids differ by part.
        drop = {"p": self.dropout, "salt": crc32(place.module.rsplit(".", 1)[-1].encode())}
        if is_dropping:
            into["dropout_row_ids"] = b.constant("dropout_row_ids", dtype=torch.int64)
            x = b.apply("dropout_low_rank", "lora_A", into, **drop)
        else:
            x = b.apply("low_rank", "lora_A", into)
        x = b.apply("scale", "scaled", {"x": x}, factor=self.scaling(place.module))
        y = b.apply(
            "low_rank", "lora_B", {"x": x, "weight": b.parameter(LORA_B, place.outputs, rank)}
        )
        if self.lora_bias:
            bias = b.parameter(_BIAS, place.outputs)
            y = b.apply(
                "add_vector",
                "lora_B.sum",
                {"x": y, "vector": bias},
                factor=self.scaling(place.module),
            )
        if self.use_dora:
            read = {"base": b.rows("y", place.outputs)}
            if (
                is_dropping
            ):  # PEFT: then the magnitudes act on what the weight gives for the dropped rows
                x = b.apply(
                    "dropout",
                    "dropped",
                    {"x": "x", "dropout_row_ids": into["dropout_row_ids"]},
                    **drop,
                )
                weight = b.weight("weight", place.outputs, place.inputs)
                read["base"] = b.apply("linear", "of_dropped", {"x": x, "weight": weight})
            elif place.has_bias:
                read["bias"] = b.weight("bias", place.outputs)
            magnitude = b.parameter(_MAGNITUDE, place.outputs)
            norm = b.derived("weight_norm", place.outputs)
            y = b.apply(
                "magnitude", "dora", {**read, "change": y, "magnitude": magnitude, "norm": norm}
            )
        return Bypass(graph=b.build(y))

    def target_initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        """Return the initial value of a parameter.

        A is uniform within 1 / sqrt(inputs) (PEFT's Kaiming initialisation with a = sqrt 5), B is
        zero: the bypass starts at zero, however it is initialised.
        """
        initial, module = self.init_lora_weights, site.place.module
        if parameter in (EMBEDDING_A, EMBEDDING_B):
            return embedding_initial(parameter, shape, generator)
        if parameter == _MAGNITUDE:
            return site.row_norms_squared.sqrt()
        if parameter == _BIAS:
            return torch.zeros(shape)
        is_first = parameter == LORA_A
        if isinstance(initial, str) and is_principal(initial):
            return principal_factors(site, initial, self.rank(module), self.scaling(module))[
                not is_first
            ].clone()
        value = torch.zeros(shape)
        if is_first and initial == "gaussian":
            value.normal_(0, 1 / shape[-2], generator=generator)
        elif is_first:
            # Kaiming with a = sqrt(5): bound sqrt(6 / ((1 + 5) * inputs)) = 1 / sqrt(inputs).
            value.uniform_(-1, 1, generator=generator).div_(sqrt(shape[-1]))
        return value

    def to_peft_tensors(
        self, values: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        plain = {
            name: value
            for name, value in values.items()
            if layout.places[layout.modules[name]].experts is None
        }
        experts = {
            expert_name(name, layout): to_stacked(value, layout.local_names[name])
            for name, value in values.items()
            if name not in plain
        }
        return {**super().to_peft_tensors(plain, layout), **experts}

    def from_peft_tensors(
        self, tensors: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        values = {}
        for name, module in layout.modules.items():
            if layout.places[module].experts is None:
                values[name] = self.from_peft_value(
                    layout.local_names[name], tensors[self.file_name(name)]
                )
            else:
                stacked = tensors[expert_name(name, layout)]
                values[name] = from_stacked(stacked, layout.shapes[name], layout.local_names[name])
        return values

    def to_peft_value(self, parameter: str, value: Tensor) -> Tensor:
        return value.T if parameter == EMBEDDING_A else value

    def from_peft_value(self, parameter: str, value: Tensor) -> Tensor:
        return value.T if parameter == EMBEDDING_A else value

    def frozen_file_name(self, module: str, architecture: Architecture) -> str:
        name = super().frozen_file_name(module, architecture)
        if module not in self.tokens(architecture):
            return name
        return f"{name.removesuffix('weight')}token_adapter.base_layer.weight"

    def derived(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return DoRA's norms of the rows of W + scaling B A, computed without that sum."""
        # With s B for B: |w + B A|^2 = |w|^2 + 2 w . (B A) + |B A|^2, for each row.
        a, b = parameters[LORA_A], parameters[LORA_B] * self.scaling(site.place.module)
        # [out]: products with the rank first, so that B A [out, in] never exists.
        mixed = ((site.dense_weight @ a.T) * b).sum(1)
        own = ((b @ (a @ a.T)) * b).sum(1)
        mixed, own = site.sum_over_inputs(torch.stack((2 * mixed, own)))  # one collective for both
        # Rounding may leave a norm of zero slightly below it.
        return {"weight_norm": (site.row_norms_squared + mixed + own).clamp_(min=0).sqrt()}

    def merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if TOKENS not in parameters:
            return super().merged(site, parameters)
        tokens = self.tokens(site.place.architecture)[site.place.module]
        weight = with_tokens(site.dense_weight, tokens, parameters[TOKENS])
        if LORA_A in parameters:
            # The LoRA's change alone: the tokens' rows are in `weight` already.
            weight = weight + self.target_merged(site, parameters)["weight"] - site.dense_weight
        return {"weight": weight}

    def target_merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if site.place.experts is not None:
            raise AdapterError(
                "target_parameters cannot be merged; merge the model with an adapter without them"
            )
        scaling, others = self.scaling(site.place.module), {}
        if EMBEDDING_A in parameters:
            return {"weight": site.dense_weight + embedding_change(parameters, scaling)}
        weight = site.dense_weight + scaling * (parameters[LORA_B] @ parameters[LORA_A])
        if self.use_dora:
            weight *= (parameters[_MAGNITUDE] / weight.norm(dim=1))[:, None]
        if self.lora_bias:
            if not site.place.has_bias:
                raise AdapterError(
                    f"lora_bias cannot be merged at {site.place.module}, which has no bias"
                )
            others["bias"] = site.bias + scaling * parameters[_BIAS]
        return {"weight": weight, **others}

    def as_served(self, adapter: Adapter, *, is_fresh: bool) -> Adapter:
        """Return a LoRA of twice the rank, where the initial factors are a part of the weight (see
        `adapters.principal`).
        """
        initial, at, masters = self.init_lora_weights, adapter.at, adapter.masters
        if not isinstance(initial, str) or not is_principal(initial):
            return adapter
        first: dict[str, Tensor] = {}
        for name, module in adapter.layout.modules.items():
            local = adapter.layout.local_names[name]
            if is_fresh:
                # Nothing was trained yet: the factors are the initial ones.
                first[name] = masters[name]
            elif local in (LORA_A, LORA_B):
                # Computed from the weight again rather than kept in every version.
                factors = principal_factors(
                    at[module], initial, self.rank(module), self.scaling(module)
                )
                shape, rank = adapter.layout.shapes[name], adapter.backbone.ranks.rank
                first[name] = adapter.graphs.own(name, factors[local == LORA_B], shape, rank)
        doubled = replace(
            self,
            init_lora_weights=True,
            r=2 * self.r,
            rank_pattern={pattern: 2 * rank for pattern, rank in self.rank_pattern.items()},
            alpha=self._with_twice_the_rank(self.alpha),
            alpha_pattern={
                pattern: self._with_twice_the_rank(alpha)
                for pattern, alpha in self.alpha_pattern.items()
            },
        )
        return Adapter(
            adapter.backbone,
            doubled,
            every_target=False,
            masters=beside_weight(masters, first),
            frozen=adapter.layout.frozen,
            frozen_weights=adapter.frozen_weights,
        )

    def _with_twice_the_rank(self, alpha: float) -> float:
        """Return the alpha that gives the same scaling with twice the rank."""
        return alpha * (sqrt(2) if self.use_rslora else 2)

    def reparametrization(
        self, adapter: Adapter, generator: torch.Generator
    ) -> Reparametrization | None:
        return TrainedHalf(adapter) if is_principal(self.init_lora_weights) else None

    @classmethod
    def not_supported(cls, settings: dict[str, Any]) -> list[str]:
        initial = settings.get("init_lora_weights")
        if initial in _FORGOTTEN_INITIAL_VALUES:
            settings.pop("init_lora_weights", None)
            return []
        return (
            [] if initial in (True, "gaussian") or is_principal(initial) else ["init_lora_weights"]
        )


def _shortened(pattern: str) -> str:
    return pattern if len(pattern) <= 40 else f"{pattern[:40]}…"
