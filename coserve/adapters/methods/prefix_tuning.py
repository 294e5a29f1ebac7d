"""Prefix tuning: keys and values of virtual tokens before every prompt, in every block, are
trained. Source: arXiv 2101.00190; `prefix_projection` (section 4.3) as in
https://huggingface.co/docs/peft/package_reference/prefix_tuning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coserve.adapters.base import Adapter
from coserve.adapters.places import Place, Site
from coserve.adapters.reparametrization import Reparametrization
from coserve.adapters.settings import check_flags
from coserve.adapters.virtual_tokens import (
    EncodedTable,
    PromptEncoder,
    VirtualTokensConfig,
    looked_up,
    seeded,
)
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass
from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture, Part
from coserve.settings import MOST_WHOLE, check_whole


@dataclass(frozen=True, kw_only=True)
class PrefixTuningConfig(VirtualTokensConfig):
    """Prefix tuning with PEFT's settings. Only keys and values are saved and served."""

    peft_type = "PREFIX_TUNING"
    peft_names: ClassVar[Mapping[str, str]] = {
        name: name for name in ("num_virtual_tokens", "prefix_projection", "encoder_hidden_size")
    }
    supported = "prefix tuning"

    num_virtual_tokens: int = 20
    """Number of virtual tokens."""
    prefix_projection: bool = False
    """Whether keys and values come from a network that is trained in their place."""
    encoder_hidden_size: int | None = None
    """Hidden size of the network; None: the width of a block's keys."""

    def __post_init__(self) -> None:
        self.check_number()
        check_flags(self, "prefix_projection")
        if self.encoder_hidden_size is not None:
            check_whole("encoder_hidden_size", self.encoder_hidden_size, 1, MOST_WHOLE)

    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        """Return the nodes of each block that give attention its keys and its values, in this
        order, which is that of PEFT's table.
        """
        found: dict[str, tuple[Part, str]] = {}
        for layer in range(architecture.num_layers):
            for slot in ("k", "v"):
                node = _maker(architecture.graphs[layer], slot)
                found[f"{architecture.prefix(layer)}{node}"] = (layer, node)
        if len(found) != 2 * architecture.num_layers:
            raise AdapterError(
                "prefix tuning needs keys and values of their own in every block of the model"
            )
        return found

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        b = GraphBuilder()
        table = looked_up(b, "prefix", self.num_virtual_tokens, place.outputs)
        # Keys and values of virtual tokens are replaced where they are made, so they are cached as
        # usual.
        read = {"x": b.rows("y", place.outputs), "other": table, "tokens": "tokens"}
        return Bypass(graph=b.build(b.apply("on_virtual_rows", "change", read)))

    def initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        return torch.zeros(shape).normal_(generator=generator)

    def reparametrization(
        self, adapter: Adapter, generator: torch.Generator
    ) -> Reparametrization | None:
        if not self.prefix_projection or adapter.backbone.device.type == "meta":
            return None
        widths = [shape[1] for shape in adapter.layout.shapes.values()]
        # One network gives the keys and values of all blocks at once.
        encoder: PromptEncoder = seeded(generator, lambda: self._encoder(widths[0], sum(widths)))
        return EncodedTable(encoder, adapter)

    def _encoder(self, width: int, outputs: int) -> PromptEncoder:
        hidden = self.encoder_hidden_size or width
        layers = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
        return PromptEncoder(self.num_virtual_tokens, width, transform=layers)


def _maker(graph: Graph, slot: str) -> str:
    """Return the name of the node whose first output attention takes as its keys or values."""
    attention = next((node for node in graph.nodes if node.op == "attention"), None)
    if attention is None:
        raise AdapterError(
            "prefix tuning needs keys and values in every block, and this model has blocks without"
        )
    maker = graph.producer[attention.input[slot]]
    # A bypass is added to its node's first output.
    if maker.outputs[0][1] != attention.input[slot]:
        raise AdapterError(
            f"prefix tuning is not supported on a model whose {maker.name} gives several tensors"
        )
    return maker.name
