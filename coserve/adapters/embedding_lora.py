"""LoRA at the embeddings of tokens: bypass(token) = scaling * B a, with a the token's own column of
A.

PEFT's files have A as `lora_embedding_A` [rank, vocabulary] and B as `lora_embedding_B` [width,
rank]. With `ensure_weight_tying`, a head that is the table of embeddings has the same LoRA, the
other way round.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from coserve.adapters.frozen_weights import HEAD_MODULE
from coserve.adapters.places import Place
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture, Part

EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
# The names by which PEFT knows embeddings and heads where it ties them.
_TIED_NAMES = ("embed_tokens", "lm_head")


def embedding_site(architecture: Architecture) -> dict[str, tuple[Part, str]]:
    """Return full module name -> (part, node) of the embeddings of tokens."""
    return {architecture.embedding_name: ("embed", architecture.embedding_name)}


def embedding_bypass(place: Place, rank: int, scaling: float) -> Bypass:
    """Return the bypass at the embeddings."""
    b, (entries, width) = GraphBuilder(), place.weights["weight"]
    ids = b.constant("tokens", dtype=torch.int64)
    columns = b.parameter(EMBEDDING_A, entries, rank)
    offset = place.node.attribute["offset"]
    x = b.apply("embedding", "looked_up", {"ids": ids, "weight": columns}, offset=offset)
    x = b.apply("scale", "scaled", {"x": x}, factor=scaling)
    out = b.parameter(EMBEDDING_B, width, rank)
    return Bypass(graph=b.build(b.apply("low_rank", "change", {"x": x, "weight": out})))


def embedding_initial(parameter: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return what a factor starts from: A at zero, B normal, as PEFT's embeddings do."""
    value = torch.zeros(shape)
    return value if parameter == EMBEDDING_A else value.normal_(generator=generator)


def embedding_change(parameters: Mapping[str, Tensor], scaling: float) -> Tensor:
    """Return what the table of embeddings has more with the LoRA in it."""
    return scaling * (parameters[EMBEDDING_A] @ parameters[EMBEDDING_B].T)


def is_tied_name(name: str) -> bool:
    """Return whether PEFT takes this name for that of embeddings, or of a head, which may be
    one.
    """
    return name.rpartition(".")[2] in _TIED_NAMES


def tied_modules(architecture: Architecture) -> dict[str, tuple[Part, str]]:
    """Return full module name -> (part, node) of embeddings and head."""
    return {**embedding_site(architecture), HEAD_MODULE: ("head", HEAD_MODULE)}
