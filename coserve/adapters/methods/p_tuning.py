"""P-tuning: embeddings of virtual tokens before every prompt, from a small network that is trained.
Source: arXiv 2103.10385; its layers as in
https://huggingface.co/docs/peft/package_reference/p_tuning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coserve.adapters.base import Adapter
from coserve.adapters.places import Place, Site
from coserve.adapters.reparametrization import Reparametrization
from coserve.adapters.virtual_tokens import (
    EncodedTable,
    PromptEncoder,
    VirtualTokensConfig,
    embedded_site,
    looked_up,
    seeded,
)
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture, Part
from coserve.settings import MOST_WHOLE, check_whole, shown

_ENCODERS = ("MLP", "LSTM")
# Layers of an LSTM; an MLP has three linear layers.
_MAX_LAYERS = 16


@dataclass(frozen=True, kw_only=True)
class PTuningConfig(VirtualTokensConfig):
    """P-tuning with PEFT's settings. Only the embeddings are saved and served."""

    peft_type = "P_TUNING"
    peft_names: ClassVar[Mapping[str, str]] = {
        name: name
        for name in (
            *(
                "num_virtual_tokens",
                "encoder_reparameterization_type",
                "encoder_hidden_size",
                "encoder_num_layers",
            ),
        )
    }
    supported = "p-tuning without dropout"

    num_virtual_tokens: int = 20
    """Number of virtual tokens."""
    encoder_reparameterization_type: str = "MLP"
    """The network: MLP or LSTM."""
    encoder_hidden_size: int | None = None
    """Hidden size of the network; None: the model's."""
    encoder_num_layers: int = 2
    """Number of layers of an LSTM."""

    def __post_init__(self) -> None:
        self.check_number()
        if (kind := self.encoder_reparameterization_type) not in _ENCODERS:
            raise ValueError(
                f"encoder_reparameterization_type must be MLP or LSTM, not {shown(kind)}"
            )
        if self.encoder_hidden_size is not None:
            check_whole("encoder_hidden_size", self.encoder_hidden_size, 1, MOST_WHOLE)
        check_whole("encoder_num_layers", self.encoder_num_layers, 1, _MAX_LAYERS)

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
        # Overwritten by the network's output before anything reads it.
        return torch.zeros(shape)

    def reparametrization(
        self, adapter: Adapter, generator: torch.Generator
    ) -> Reparametrization | None:
        if adapter.backbone.device.type == "meta":
            return None
        (place,) = adapter.layout.places.values()
        encoder: PromptEncoder = seeded(generator, lambda: self._encoder(place.outputs))
        return EncodedTable(encoder, adapter)

    def _encoder(self, width: int) -> PromptEncoder:
        hidden = self.encoder_hidden_size or width
        if self.encoder_reparameterization_type == "LSTM":
            lstm = nn.LSTM(
                width,
                hidden,
                num_layers=self.encoder_num_layers,
                bidirectional=True,
                batch_first=True,
            )
            head = nn.Sequential(
                nn.Linear(2 * hidden, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, width)
            )
            return PromptEncoder(self.num_virtual_tokens, width, lstm_head=lstm, mlp_head=head)
        layers = (
            nn.Linear(width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, width),
        )
        return PromptEncoder(self.num_virtual_tokens, width, mlp_head=nn.Sequential(*layers))
