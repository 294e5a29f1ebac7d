"""VeRA: bypass(x) = b * (B (d * (A x))) with random A and B that all layers share, and learned
vectors d and b. Source: arXiv 2310.11454; shapes and random numbers as in
https://huggingface.co/docs/peft/package_reference/vera.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor

from coserve.adapters.layout import AdapterLayout
from coserve.adapters.places import Place, Site
from coserve.adapters.settings import TargetedConfig, check_flags
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture
from coserve.settings import MOST_WHOLE, check_number, check_whole, is_number, shown

_A, _B = "base_model.vera_A", "base_model.vera_B"
_MAX_KEY = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class VeraConfig(TargetedConfig):
    """VeRA with PEFT's settings."""

    peft_type = "VERA"
    target_names: ClassVar[Mapping[str, str]] = {
        name: name for name in TargetedConfig.target_names if name != "exclude_modules"
    }
    peft_names: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("r", "d_initial", "projection_prng_key", "save_projection")},
        "dropout": "vera_dropout",
        **target_names,
        **TargetedConfig.whole_names,
    }
    constants: ClassVar[Mapping[str, Any]] = {"bias": "none", "fan_in_fan_out": False}
    harmless = frozenset(("init_weights",))
    required = ("r", "target_modules")
    supported = "VeRA on linear layers"

    r: int = 256
    """Rank of A and B."""
    d_initial: float = 0.1
    """Initial value of d; b starts at zero."""
    dropout: float = 0.0
    """Probability with which training drops a feature of the bypass's input."""
    projection_prng_key: int = 0
    """Seed of A and B."""
    save_projection: bool = True
    """Whether a directory holds A and B."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("VeRA's r", self.r, 1, MOST_WHOLE)
        check_number("VeRA's d_initial", self.d_initial)
        check_whole("VeRA's projection_prng_key", self.projection_prng_key, 0, _MAX_KEY)
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"VeRA's dropout must be at least 0 and below 1, not {shown(self.dropout)}"
            )
        check_flags(self, "save_projection")

    def misfits(self, architecture: Architecture) -> Iterator[tuple[str, str]]:
        if self.r > (most := 16 * architecture.hidden_size):
            yield "r", f"is {self.r}; {most} is the most on this model"

    def target_bypass(self, place: Place, *, training: bool) -> Bypass:
        b = GraphBuilder()
        into = {"x": b.rows("x", place.inputs), "weight": b.derived("vera_A", self.r, place.inputs)}
        if training and self.dropout:
            into["dropout_row_ids"] = b.constant("dropout_row_ids", dtype=torch.int64)
            # By the module's last name, so that blocks stay alike (see LoRA).
            salt = crc32(place.module.rsplit(".", 1)[-1].encode())
            x = b.apply("dropout_low_rank", "projected", into, p=self.dropout, salt=salt)
        else:
            x = b.apply("low_rank", "projected", into)
        d = b.parameter("vera_lambda_d", self.r)
        x = b.apply("mul", "scaled", {"x": x, "factor": d}, per_row=False)
        y = b.apply(
            "low_rank", "widened", {"x": x, "weight": b.derived("vera_B", place.outputs, self.r)}
        )
        factor = b.parameter("vera_lambda_b", place.outputs)
        return Bypass(
            graph=b.build(b.apply("mul", "change", {"x": y, "factor": factor}, per_row=False))
        )

    def target_initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        return torch.full(shape, self.d_initial if parameter == "vera_lambda_d" else 0.0)

    def derived(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        backbone, place = site.backbone, site.place
        widest = _widest(self, backbone.architecture)
        # The first inputs, or outputs, of the widest target's projections, as in PEFT.
        a, b = (
            _part(
                self.projection_prng_key,
                self.r,
                widest,
                which,
                size,
                backbone.dtype,
                backbone.device,
            )
            for which, size in ((0, place.inputs), (1, place.outputs))
        )
        return {"vera_A": a, "vera_B": b}

    def target_merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        place = site.place
        a, b = projections(
            self.projection_prng_key, self.r, _widest(self, site.backbone.architecture)
        )
        device = site.backbone.device
        inner = parameters["vera_lambda_d"][:, None] * a[:, : place.inputs].to(device)
        outer = parameters["vera_lambda_b"][:, None] * b[: place.outputs].to(device)
        return {"weight": site.dense_weight + outer @ inner}

    def to_peft_tensors(
        self, values: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        found = super().to_peft_tensors(values, layout)
        if not self.save_projection:
            return found
        if any(value.device.type == "meta" for value in values.values()):  # asked for shapes alone
            inputs, outputs = self._sizes(layout)
            shapes = {_A: (self.r, inputs), _B: (outputs, self.r)}
            return {
                **found,
                **{name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
            }
        return {**found, **self._projections(layout)}

    def from_peft_tensors(
        self, tensors: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        for name, own in self._projections(layout).items() if self.save_projection else ():
            # A file may hold them in bfloat16, whose numbers have 8 significant bits.
            if not torch.allclose(tensors[name].float(), own, rtol=2**-7, atol=1e-6):
                raise AdapterError(
                    f"{name} is not what projection_prng_key={self.projection_prng_key} gives; "
                    f"other projections are "
                    "not supported"
                )
        return super().from_peft_tensors(tensors, layout)

    def _projections(self, layout: AdapterLayout) -> dict[str, Tensor]:
        a, b = projections(self.projection_prng_key, self.r, self._sizes(layout))
        return {_A: a, _B: b}

    def _sizes(self, layout: AdapterLayout) -> tuple[int, int]:
        """Return the maximum number of inputs, and of outputs, of the targets."""
        # Modules with projections; whole modules beside them have none.
        targets = [layout.places[module] for module in layout.derived]
        return max(place.inputs for place in targets), max(place.outputs for place in targets)


@lru_cache(maxsize=4)
def projections(key: int, rank: int, widest: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return A [rank, inputs] and B [outputs, rank] of the widest layers, float32: Kaiming's
    uniform numbers, as PEFT draws them.
    """
    generator, (inputs, outputs) = torch.Generator().manual_seed(key), widest
    # A before B, from one generator: the order decides the numbers.
    a = torch.empty(rank, inputs).uniform_(-sqrt(6 / inputs), sqrt(6 / inputs), generator=generator)
    b = torch.empty(outputs, rank).uniform_(-sqrt(6 / rank), sqrt(6 / rank), generator=generator)
    return a, b


@lru_cache(maxsize=64)
def _part(
    key: int,
    rank: int,
    widest: tuple[int, int],
    which: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return A for as many inputs, or B for as many outputs: one for all adapters of a key."""
    whole = projections(key, rank, widest)[which]
    return (whole[:size] if which else whole[:, :size]).to(device, dtype).contiguous()


@lru_cache(maxsize=64)
def _widest(config: VeraConfig, architecture: Architecture) -> tuple[int, int]:
    """Return the maximum number of inputs, and of outputs, of an adapter's layers."""
    sites = config.target_sites(architecture, every_target=False)
    places = [Place.of(architecture, module, part, node) for module, (part, node) in sites.items()]
    return max(place.inputs for place in places), max(place.outputs for place in places)
