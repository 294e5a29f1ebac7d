"""LoRA: bypass(x) = B (A dropout(x)) * scaling. Source: arXiv 2106.09685; rank-stabilised scaling: arXiv 2312.03732."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import Any, ClassVar, Self
from zlib import crc32

import torch
from torch import Tensor

from coserve.adapters.base import AdapterConfig
from coserve.adapters.patterns import ByPattern
from coserve.adapters.targets import Targets
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture, Part
from coserve.settings import MOST_WHOLE, check_number, check_whole, is_number, shown

# Fields of PEFT's config that say nothing about the numbers of a trained adapter.
_HARMLESS = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "megatron_config", "megatron_core", "eva_config", "runtime_config", "qalora_group_size"),
        "ensure_weight_tying",
    )
)
_READ = frozenset(
    (
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    )
)
# Initial values that leave the backbone's weights alone; the others (PiSSA, OLoRA, LoftQ, …) come with changed weights.
_PLAIN_INITIAL_VALUES = (True, False, None, "gaussian", "eva", "orthogonal")
_MOST_ALPHA = 1e9


@dataclass(frozen=True, kw_only=True)
class LoraConfig(AdapterConfig):
    """LoRA with PEFT's settings, under PEFT's meaning.

    r: rank. alpha: numerator of the scaling alpha / r. use_rslora: alpha / sqrt(r) instead. dropout: probability of
    dropping a feature of the bypass's input in training. target_modules, exclude_modules, layers_to_transform,
    layers_pattern: see `Targets`.
    rank_pattern, alpha_pattern: r and alpha for modules whose name ends with a match of the pattern.
    """

    peft_type = "LORA"
    job_defaults: ClassVar[Mapping[str, Any]] = {"r": 16, "alpha": 32, "target_modules": "all-linear"}

    r: int = 8
    alpha: float = 8
    dropout: float = 0.0
    use_rslora: bool = False
    target_modules: str | tuple[str, ...] = ("q_proj", "v_proj")
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: int | tuple[int, ...] | None = None
    layers_pattern: str | tuple[str, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for setting in ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"):
            if isinstance(value := getattr(self, setting), list | set):
                object.__setattr__(self, setting, tuple(value))
        if self.exclude_modules is None:
            object.__setattr__(self, "exclude_modules", ())
        for name, values in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            if not isinstance(values, Mapping) or not all(isinstance(pattern, str) for pattern in values):
                raise ValueError(f"{name} must be a mapping from patterns to numbers, not {shown(values)}")
        for name, rank in (("r", self.r), *self.rank_pattern.items()):
            check_whole(f"LoRA's rank {_shortened(name)}", rank, 1, MOST_WHOLE)
        for name, alpha in (("alpha", self.alpha), *self.alpha_pattern.items()):
            check_number(f"LoRA's {_shortened(name)}", alpha, above=0, most=_MOST_ALPHA)
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA's dropout must be at least 0 and below 1, not {shown(self.dropout)}")
        if not isinstance(self.use_rslora, bool):
            raise ValueError(f"LoRA's use_rslora must be true or false, not {shown(self.use_rslora)}")
        self._targets, self._ranks, self._alphas  # noqa: B018 (they check themselves)

    @cached_property
    def _ranks(self) -> ByPattern[int]:
        return ByPattern("rank_pattern", self.rank_pattern, self.r)

    @cached_property
    def _alphas(self) -> ByPattern[float]:
        return ByPattern("alpha_pattern", self.alpha_pattern, self.alpha)

    @cached_property
    def _targets(self) -> Targets:
        return Targets(
            modules=self.target_modules,
            exclude=self.exclude_modules,
            layers=self.layers_to_transform,
            layers_pattern=self.layers_pattern,
        )

    def sites(self, architecture: Architecture, *, every_target: bool = True) -> dict[str, tuple[Part, str]]:
        return self._targets.sites(architecture, every_target=every_target)

    def misfits(self, architecture: Architecture) -> Iterator[tuple[str, str]]:
        for name, rank in (
            ("r", self.r),
            *((f"rank_pattern.{each}", rank) for each, rank in self.rank_pattern.items()),
        ):
            if rank > architecture.hidden_size:
                yield name, f"is {rank}; a rank above the model's {architecture.hidden_size} adds nothing"

    def rank(self, module: str) -> int:
        """The rank at a module."""
        return self._ranks.at(module)

    def scaling(self, module: str) -> float:
        """The factor on B A at a module."""
        rank = self.rank(module)
        return self._alphas.at(module) / (sqrt(rank) if self.use_rslora else rank)

    def bypass(self, module: str, inputs: int, outputs: int, *, training: bool) -> Bypass:
        b, rank = GraphBuilder(), self.rank(module)
        into = {"x": b.rows("x", inputs), "weight": b.parameter("lora_A.weight", rank, inputs)}
        if training and self.dropout:
            into["dropout_row_ids"] = b.constant("dropout_row_ids", dtype=torch.int64)
            salt = crc32(module.rsplit(".", 1)[-1].encode())
            x = b.apply("dropout_low_rank", "lora_A", into, p=self.dropout, salt=salt)
        else:
            x = b.apply("low_rank", "lora_A", into)
        x = b.apply("scale", "scaled", {"x": x}, factor=self.scaling(module))
        y = b.apply("low_rank", "lora_B", {"x": x, "weight": b.parameter("lora_B.weight", outputs, rank)})
        return Bypass(graph=b.build(y))

    def initial(self, parameter: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """A is uniform within 1 / sqrt(inputs) (PEFT's Kaiming initialisation with a = sqrt 5), B is zero: the bypass
        starts at zero.
        """
        value = torch.zeros(shape)
        if parameter == "lora_A.weight":
            value.uniform_(-1, 1, generator=generator).div_(sqrt(shape[1]))
        return value

    def to_peft(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            return list(value) if isinstance(value, tuple) else value

        return {
            "peft_type": self.peft_type,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "bias": "none",
            "fan_in_fan_out": False,
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.use_rslora,
            "target_modules": plain(self.target_modules),
            "exclude_modules": plain(self.exclude_modules) or None,
            "layers_to_transform": plain(self.layers_to_transform),
            "layers_pattern": plain(self.layers_pattern),
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
        }

    @classmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Self:
        unsupported = [
            name
            for name, value in fields.items()
            if value not in (None, False, {}, [], "none") and name not in _HARMLESS | _READ
        ]
        if fields.get("init_lora_weights", True) not in _PLAIN_INITIAL_VALUES:
            unsupported.append("init_lora_weights")
        if unsupported:
            used = ", ".join(f"{name}={shown(fields[name])}" for name in unsupported)
            raise AdapterError(
                f"the adapter uses {used}, which is not supported; "
                "supported is LoRA on linear layers with r, alpha, rsLoRA, dropout and patterns"
            )

        try:
            return cls(
                r=fields["r"],
                alpha=fields["lora_alpha"],
                dropout=fields.get("lora_dropout") or 0.0,
                use_rslora=fields.get("use_rslora") or False,
                target_modules=fields["target_modules"],
                exclude_modules=fields.get("exclude_modules") or (),
                layers_to_transform=fields.get("layers_to_transform"),
                layers_pattern=fields.get("layers_pattern") or None,
                rank_pattern=fields.get("rank_pattern") or {},
                alpha_pattern=fields.get("alpha_pattern") or {},
            )
        except KeyError as error:
            raise AdapterError(f"the adapter's config lacks {error.args[0]!r}") from None
        except (TypeError, ValueError) as error:
            raise AdapterError(f"the adapter's config is not valid: {error}") from None


def _shortened(pattern: str) -> str:
    return pattern if len(pattern) <= 40 else f"{pattern[:40]}…"
