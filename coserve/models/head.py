"""The head of the model on rows of any adapters: logits, and the states that they are computed
from.

Ranks divide the vocabulary, so that each has the logits of some tokens. Only rank 0 samples: all
logits of a row go there or, where only the likeliest token is wanted, each rank's likeliest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from coserve.graph.execute import run_nodes
from coserve.graph.ir import Graph
from coserve.kernels.cuts import Cut
from coserve.models.backbone import Backbone
from coserve.models.batch import AfterNode, row_context
from coserve.models.bypasses import Bypasses, RowAdapters
from coserve.models.local import LocalModel

Users = Sequence[tuple[int, Bypasses | None]]


def logits(backbone: Backbone, hidden: Tensor, users: Users = ()) -> Tensor:
    """Return the head's logits of rows of any adapters: [n, hidden_size] -> [n, vocab_size] in the
    compute dtype.

    Where adapters have vocabularies of their own, vocab_size is the largest of theirs and the
    backbone's, so that it is never less than the backbone's, and tokens that a row's model does not
    have get -inf.

    Args:
        backbone: The model; with several ranks, all call this and get the result.
        hidden: Rows as the last block gives them.
        users: (number of rows, their adapter's bypasses or None), in the order of the rows; empty:
            all rows use the bare model.
    """
    return _joined(
        backbone,
        [
            (some.places, _run_head(backbone, some.local.graphs["head"], some.hidden, some.users))
            for some in _by_vocabulary(backbone, hidden, users)
        ],
        hidden.shape[0],
    )


def logits_on_rank_0(backbone: Backbone, hidden: Tensor, users: Users = ()) -> Tensor | None:
    """Return the logits on rank 0, and None on all others; see `logits`. All ranks call this."""
    if backbone.group.size == 1:
        return logits(backbone, hidden, users)
    found = []
    for some in _by_vocabulary(backbone, hidden, users):
        own, cut = _own_logits(backbone, some)
        pieces = backbone.group.gather(own, 0, "logits")
        if pieces is None:
            continue
        whole = own.new_empty(own.shape[0], cut.width)
        for rank, piece in enumerate(pieces):
            # Leaves out the padding of the last ranks' pieces.
            cut.put(whole, piece, rank)
        found.append((some.places, whole))
    return _joined(backbone, found, hidden.shape[0]) if found else None


def likeliest_on_rank_0(backbone: Backbone, hidden: Tensor, users: Users = ()) -> Tensor | None:
    """Return the likeliest token of each row, int64 [n], on rank 0, and None on all others; see
    `logits`.

    All ranks call this; two numbers of each rank are gathered for each row. Of equal logits the
    first token's is taken, as one rank does.
    """
    if backbone.group.size == 1:
        return backbone.backend.argmax(logits(backbone, hidden, users))
    found = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    for some in _by_vocabulary(backbone, hidden, users):
        tokens = _likeliest_on_rank_0(backbone, some)
        if tokens is None:
            continue
        # All rows are of one vocabulary: nothing to put together.
        if some.places is None:
            return tokens
        found[some.places] = tokens
    return found if backbone.group.rank == 0 else None


def final_states(backbone: Backbone, hidden: Tensor) -> Tensor:
    """Return rows as the last linear layer of the head reads them: [n, hidden_size] -> [n, width].

    All ranks call this and have the result.
    """
    graph, values = backbone.local.graphs["head"], {"x": hidden}
    context = row_context(backbone)
    # Norm and whatever else comes before the last product; the product itself is left out.
    last = graph.node["lm_head"]
    for run in graph.runs:
        if last in run:
            break
        values.update(run_nodes(run, values, backbone.weights["head"], context))
    return values[last.input["x"]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Some:
    """Rows of a batch that have one vocabulary."""

    local: LocalModel
    """The model with that vocabulary, as it runs here."""
    hidden: Tensor
    """Rows as the last block gives them."""
    users: Users
    """Number of rows and bypasses of each user, in the order of the rows."""
    places: Tensor | None
    """Places of the rows among all, int64 [n]; None: these are all."""


def _by_vocabulary(backbone: Backbone, hidden: Tensor, users: Users) -> list[_Some]:
    """Return the rows in groups: those of each adapter whose vocabulary is another than the
    backbone's, and all others.
    """
    assert not users or sum(num_rows for num_rows, _ in users) == hidden.shape[0], (
        "the users' rows are all the rows"
    )
    vocab_size, start = backbone.architecture.vocab_size, 0
    groups: dict[Bypasses | None, tuple[list[int], list[tuple[int, Bypasses | None]]]] = {}
    for num_rows, bypasses in users:
        is_apart = bypasses is not None and bypasses.vocab_size != vocab_size
        # Adapters with the backbone's vocabulary go together, whoever they are.
        rows, own = groups.setdefault(bypasses if is_apart else None, ([], []))
        rows.extend(range(start, start + num_rows))
        own.append((num_rows, bypasses))
        start += num_rows
    if groups.keys() <= {None}:
        return [_Some(local=backbone.local, hidden=hidden, users=users, places=None)]
    found = []
    for bypasses, (rows, own) in groups.items():
        places = torch.tensor(rows, device=hidden.device)
        local = backbone.local if bypasses is None else backbone.local_of(bypasses.architecture)
        found.append(_Some(local=local, hidden=hidden[places], users=own, places=places))
    return found


def _joined(
    backbone: Backbone, found: Sequence[tuple[Tensor | None, Tensor]], num_rows: int
) -> Tensor:
    """Return the logits of all rows from those of groups, which have -inf for tokens that only
    others have.
    """
    (places, first), *others = found
    if places is None and not others:
        return first
    # At least the backbone's, as callers rely on (`logits`).
    width = max(backbone.architecture.vocab_size, *(each.shape[1] for _, each in found))
    whole = torch.full((num_rows, width), -inf, dtype=first.dtype, device=first.device)
    for places, each in found:
        whole[places, : each.shape[1]] = each
    return whole


def _likeliest_on_rank_0(backbone: Backbone, some: _Some) -> Tensor | None:
    """Do what `likeliest_on_rank_0` says for rows of one vocabulary."""
    own, cut = _own_logits(backbone, some)
    # Tokens after the last one pad the pieces of the last ranks.
    own[:, cut.num_held(backbone.group.rank) :] = -inf
    places = backbone.backend.argmax(own)[:, None]
    # A token's number is exact in float32: a piece has fewer than 2^24.
    # [rows, 2]: each rank's largest logit and its token, in one tensor so that one gather does.
    found = torch.cat((own.gather(1, places).float(), places.float()), -1)
    pieces = backbone.group.gather(found, 0, "likeliest")
    if pieces is None:
        return None
    # pieces [ranks, rows, 2]; of equal logits the first rank's, which has the lower tokens.
    rank = pieces[..., 0].argmax(0)
    return (
        pieces[..., 1].gather(0, rank[None])[0].long() + rank * cut.local
    )  # pieces stand in the order of the ranks


def _own_logits(backbone: Backbone, some: _Some) -> tuple[Tensor, Cut]:
    """Return the logits of this rank's tokens, [n, local], and how ranks divide the vocabulary."""
    graph, cut = some.local.own_head
    return _run_head(backbone, graph, some.hidden, some.users), cut


def _run_head(backbone: Backbone, graph: Graph, hidden: Tensor, users: Users) -> Tensor:
    """Run the head, or the part of it that `graph` is, on rows with equally many logits."""
    adapters = RowAdapters(
        [(num_rows, bypasses, None) for num_rows, bypasses in users],
        backbone.device,
        apart=bool(backbone.block_rows),
    )
    context, values = row_context(backbone), {"x": hidden}
    runs = backbone.local.place_runs["head"]
    weights = backbone.weights["head"]
    num_rows = hidden.shape[0]
    after = AfterNode("head", graph, (), adapters, runs, weights, context, num_rows)
    after.run(values, context)
    return values[graph.outputs[0]]
