"""Embeddings of some tokens that are trained beside a method's targets: PEFT's
`trainable_token_indices`.

The adapter has rows of its own for these tokens, which stand in place of the table's; in the head,
too, where that is the table, or where the setting names it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coserve.adapters.frozen_weights import HEAD_MODULE
from coserve.adapters.places import Place, Site
from coserve.errors import AdapterError
from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture
from coserve.settings import MOST_WHOLE, is_whole, shown

TOKENS = "token_adapter.trainable_tokens_delta"
TokenIndices = tuple[int, ...] | Mapping[str, tuple[int, ...]]
_MAX_TOKENS = 1 << 16


def token_indices(given: Any) -> TokenIndices:
    """Return the setting `trainable_token_indices` (nothing: an empty tuple); ValueError if it
    makes no sense.
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return {str(name): _indices(each) for name, each in given.items()}
    return _indices(given)


def _indices(given: Any) -> tuple[int, ...]:
    is_list = isinstance(given, list | tuple) and len(given) <= _MAX_TOKENS
    if (
        not is_list
        or not all(is_whole(each, 0, MOST_WHOLE) for each in given)
        or len(set(given)) < len(given)
    ):
        raise ValueError(
            f"trainable_token_indices must be at most {_MAX_TOKENS} different token ids, or such "
            f"a list for each of "
            f"embeddings and head, not {shown(given)}"
        )
    return tuple(given)


def token_sites(
    setting: TokenIndices, architecture: Architecture, *, is_tied: bool
) -> dict[str, tuple[int, ...]]:
    """Return the tokens by the modules that have rows of their own for them, as PEFT chooses these.

    is_tied: whether `ensure_weight_tying` is set. AdapterError for a module or a token that is not
    there.
    """
    table = architecture.embedding_name
    named = setting if isinstance(setting, Mapping) else {table: setting} if setting else {}
    found: dict[str, tuple[int, ...]] = {}
    for name, tokens in named.items():
        modules = [module for module in (table, HEAD_MODULE) if module.endswith(name)]
        if not modules:
            raise AdapterError(
                f"trainable_token_indices names {shown(name)}; it may name {table} and "
                f"{HEAD_MODULE}"
            )
        if wrong := [token for token in tokens if token >= architecture.vocab_size]:
            size = architecture.vocab_size
            raise AdapterError(
                f"trainable_token_indices has {wrong[0]}; the model has {size} tokens"
            )
        found |= dict.fromkeys(modules, tokens)
    is_both = architecture.tied and table in found
    if is_both and found.setdefault(HEAD_MODULE, found[table]) != found[table] and is_tied:
        raise AdapterError(
            "trainable_token_indices has other tokens for the embeddings than for the head, which "
            "ensure_weight_tying "
            "makes one: give both the same"
        )
    if HEAD_MODULE in found and "bias" in architecture.graphs["head"].node[HEAD_MODULE].input:
        raise AdapterError(
            f"trainable_token_indices at {HEAD_MODULE} is not supported where the head has a bias, "
            f"which PEFT drops"
        )
    return found


def token_graph(place: Place, tokens: tuple[int, ...]) -> Graph:
    """Return what changes at embeddings or a head where these tokens have rows of their own."""
    b = GraphBuilder()
    base = b.rows("y", place.outputs)
    width = place.inputs or place.outputs
    read = {"base": base, "weight": b.parameter(TOKENS, len(tokens), width)}
    if place.node.op == "embedding":
        read["ids"] = b.constant("tokens", dtype=torch.int64)
        return b.build(b.apply("other_rows", "tokens_change", read, tokens=tokens))
    read["x"] = b.rows("x", place.inputs)
    return b.build(b.apply("other_columns", "tokens_change", read, columns=tokens))


def tokens_initial(tokens: tuple[int, ...], site: Site) -> Tensor:
    """Return the tokens' rows of the module's weight, float32, on the CPU."""
    return site.whole_weight[list(tokens)].cpu().clone()


def with_tokens(weight: Tensor, tokens: tuple[int, ...], rows: Tensor) -> Tensor:
    """Return a copy of a weight in which the tokens have these rows."""
    return weight.index_copy(0, torch.tensor(tokens, device=weight.device), rows.to(weight))
