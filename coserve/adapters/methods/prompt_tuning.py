"""Prompt tuning: embeddings of virtual tokens before every prompt are trained. Source: arXiv
2104.08691.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.adapters.places import Place, Site
from coserve.adapters.virtual_tokens import (
    VirtualTokensConfig,
    embedded_site,
    embedding_site,
    looked_up,
)
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture, Part
from coserve.settings import shown

_INITIAL_VALUES = ("RANDOM", "SAMPLE_VOCAB")


@dataclass(frozen=True, kw_only=True)
class PromptTuningConfig(VirtualTokensConfig):
    """Prompt tuning with PEFT's settings."""

    peft_type = "PROMPT_TUNING"
    peft_names: ClassVar[Mapping[str, str]] = {
        "num_virtual_tokens": "num_virtual_tokens",
        "prompt_tuning_init": "prompt_tuning_init",
    }
    supported = "prompt tuning"

    num_virtual_tokens: int = 20
    """Number of virtual tokens."""
    prompt_tuning_init: str = "RANDOM"
    """Initial values: random numbers (RANDOM), or the embeddings of random tokens (SAMPLE_VOCAB).
    """

    def __post_init__(self) -> None:
        self.check_number()
        if self.prompt_tuning_init not in _INITIAL_VALUES:
            known = " or ".join(_INITIAL_VALUES)
            raise ValueError(
                f"prompt_tuning_init must be {known}, not {shown(self.prompt_tuning_init)}"
            )

    @classmethod
    def not_supported(cls, settings: dict[str, Any]) -> list[str]:
        if (
            settings.get("prompt_tuning_init") == "TEXT"
        ):  # of an adapter that is there it says nothing
            del settings["prompt_tuning_init"]
        return []

    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        return embedded_site(architecture)

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        b = GraphBuilder()
        return Bypass(graph=b.build(looked_up(b, "prompt", self.num_virtual_tokens, place.outputs)))

    def initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        if self.prompt_tuning_init == "RANDOM":
            return torch.zeros(shape).normal_(generator=generator)
        embedding = embedding_site(site.backbone)
        num_entries = embedding.place.weights["weight"][0]
        entries = torch.randint(0, num_entries, shape[:1], generator=generator)
        # Some models scale embeddings in a node of its own: virtual tokens are added after it.
        rows = embedding.weight_rows(entries).cpu()
        return (
            rows
            if site.place.node == embedding.place.node
            else rows * site.place.node.attribute["factor"]
        )
