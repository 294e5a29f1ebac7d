"""Virtual tokens: rows before a request's or an example's own, whose ids are -1, -2, … and whose
embeddings, or keys and values, are parameters. The engine puts them there
(`AdapterConfig.num_virtual_tokens`).
"""

from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coserve.adapters.base import Adapter
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.places import Place, Site
from coserve.adapters.reparametrization import Reparametrization
from coserve.adapters.settings import NamedConfig
from coserve.graph.ir import GraphBuilder
from coserve.graph.layouts import WHOLE, AnyState
from coserve.models.backbone import Backbone
from coserve.models.base import Architecture, Part
from coserve.models.shares import owned
from coserve.settings import check_whole

# More would leave nothing of most models' positions.
_MAX_VIRTUAL = 1 << 16
_FILE = "prompt_embeddings"
# PyTorch's own generator is one for all threads.
_DRAWING = Lock()
# Maximum size of a network's inner layers relative to the model's hidden size.
_MAX_WIDENING = 8


class VirtualTokensConfig(NamedConfig):
    """A method with a table [virtual tokens, features], which PEFT's file has as one tensor."""

    harmless = frozenset(
        (
            *(
                "token_dim",
                "num_transformer_submodules",
                "num_attention_heads",
                "num_layers",
                "prompt_tuning_init",
            ),
            *(
                "prompt_tuning_init_text",
                "tokenizer_name_or_path",
                "tokenizer_kwargs",
                "init_weights",
            ),
        )
    )
    required = ("num_virtual_tokens",)

    def misfits(self, architecture: Architecture) -> Iterator[tuple[str, str]]:
        if self.num_virtual_tokens >= architecture.max_positions:
            yield (
                "num_virtual_tokens",
                f"is {self.num_virtual_tokens}; the model has {architecture.max_positions} "
                f"positions",
            )
        most = _MAX_WIDENING * architecture.hidden_size
        if (hidden := getattr(self, "encoder_hidden_size", None)) is not None and hidden > most:
            yield "encoder_hidden_size", f"is {hidden}; {most} is the most on this model"

    def to_peft_of(self, architecture: Architecture) -> dict[str, Any]:
        return {
            "num_attention_heads": architecture.num_heads
        }  # PEFT does not find it in every configuration

    def check_number(self) -> None:
        """Raise ValueError unless there is a number of virtual tokens that a model could have."""
        check_whole("num_virtual_tokens", self.num_virtual_tokens, 1, _MAX_VIRTUAL)

    def to_peft_tensors(
        self, values: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        return {_FILE: torch.cat(list(values.values()), 1)}

    def from_peft_tensors(
        self, tensors: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        return split_table(tensors[_FILE], layout)


def embedded_site(architecture: Architecture) -> dict[str, tuple[Part, str]]:
    """Return the place where embeddings of virtual tokens come in: in place of those of tokens, as
    PEFT gives them to a model.
    """
    return {architecture.embedded: ("embed", architecture.embedded)}


def embedding_site(backbone: Backbone) -> Site:
    """Return the table of the embeddings of tokens."""
    name = backbone.architecture.embedding_name
    return Site(place=Place.of(backbone.architecture, name, "embed", name), backbone=backbone)


def split_table(table: Tensor, layout: AdapterLayout) -> dict[str, Tensor]:
    """Return the parameters of an adapter, in its layout's order, from columns of one table."""
    parts = torch.split(table, [shape[1] for shape in layout.shapes.values()], 1)
    return dict(zip(layout.shapes, parts, strict=True))


def looked_up(b: GraphBuilder, parameter: str, num_virtual: int, width: int) -> str:
    """Add the look-up of a table [num_virtual, width] for virtual rows; zeros for all others."""
    tokens = b.constant("tokens", dtype=torch.int64)
    table = b.parameter(parameter, num_virtual, width)
    return b.apply(
        "embedding", "looked_up", {"ids": tokens, "weight": table}, offset=0, virtual=True
    )


class EncodedTable(Reparametrization):
    """A table that a network computes, whose weights are trained in its place; PEFT keeps the table
    alone.
    """

    def __init__(self, encoder: nn.Module, adapter: Adapter) -> None:
        """Begin with the network's parameters. encoder: gives the table, whole, when it is
        called.
        """
        self._encoder, self._layout = encoder.to(adapter.backbone.device).eval(), adapter.layout
        self._graphs, self._group = adapter.graphs, adapter.backbone.group
        self.parameters = {
            name: value.detach().clone() for name, value in self._encoder.named_parameters()
        }

    def compose(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        table: Tensor = functional_call(self._encoder, dict(parameters), ())
        shapes, rank = self._layout.shapes, self._group.rank
        return {
            name: self._graphs.own(name, value, shapes[name], rank)
            for name, value in split_table(table, self._layout).items()
        }

    def state_of(self, name: str, states: Mapping[str, AnyState]) -> AnyState:
        """Return that every rank has the whole network."""
        return WHOLE

    def pull_back(self, gradients: Mapping[str, Tensor], *, num_trained: int) -> dict[str, Tensor]:
        """Return the network's gradients. With several ranks they are the sum over the parts of the
        table that the ranks hold; no entry counts twice.
        """
        if self._group.size == 1:
            return super().pull_back(gradients, num_trained=num_trained)
        states, rank = self._graphs.states, self._group.rank
        parts = {
            name: owned(each, states.get(name, WHOLE), rank) for name, each in gradients.items()
        }
        given = {
            name: torch.zeros_like(gradients[name]) if part is None else part
            for name, part in parts.items()
        }
        found = super().pull_back(given, num_trained=num_trained)
        sums = self._group.sum_several(list(found.values()), "gradients of an encoder")
        return dict(zip(found, sums, strict=True))


class PromptEncoder(nn.Module):
    """A table that goes through layers: rows [num_virtual, width of the last layer]. Modules are
    named as PEFT's.
    """

    def __init__(self, num_virtual: int, inputs: int, **layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_virtual, inputs)
        self._names = tuple(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self) -> Tensor:
        x: Any = self.embedding.weight
        for name in self._names:
            x = self.get_submodule(name)(x)
            x = x[0] if isinstance(x, tuple) else x  # an LSTM's output, and its state
        found: Tensor = x
        return found


def seeded(generator: torch.Generator, make: Any) -> Any:
    """Return what `make` returns when PyTorch draws from the generator's seed. Other draws do not
    change.
    """
    with _DRAWING, torch.inference_mode(False), torch.random.fork_rng(devices=()):
        torch.manual_seed(generator.initial_seed())
        return make()
