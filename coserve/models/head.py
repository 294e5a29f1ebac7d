"""The head of the model on rows of any adapters: logits, and the states that they are computed
from.

Ranks divide the vocabulary, so that each has the logits of some tokens. Only rank 0 samples: all
logits of a row go there or, where only the likeliest token is wanted, each rank's likeliest.
"""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from coserve.graph.execute import run_nodes
from coserve.graph.ir import Graph
from coserve.kernels.cuts import Cut
from coserve.models.backbone import Backbone
from coserve.models.batch import AfterNode, row_context
from coserve.models.bypasses import Bypasses, RowAdapters

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
    assert not users or sum(num_rows for num_rows, _ in users) == hidden.shape[0], (
        "the users' rows are all the rows"
    )
    if _have_one_vocabulary(backbone, users):
        return _run_head(backbone, backbone.local.graphs["head"], hidden, users)
    return _logits_of_vocabularies(backbone, hidden, users)


def logits_on_rank_0(backbone: Backbone, hidden: Tensor, users: Users = ()) -> Tensor | None:
    """Return the logits on rank 0, and None on all others; see `logits`. All ranks call this."""
    if backbone.group.size == 1:
        return logits(backbone, hidden, users)
    own, cut = _own_logits(backbone, hidden, users)
    pieces = backbone.group.gather(own, 0, "logits")
    if pieces is None:
        return None
    whole = own.new_empty(own.shape[0], cut.width)
    for rank, piece in enumerate(pieces):
        cut.put(whole, piece, rank)
    return whole


def likeliest_on_rank_0(backbone: Backbone, hidden: Tensor, users: Users = ()) -> Tensor | None:
    """Return the likeliest token of each row, int64 [n], on rank 0, and None on all others; see
    `logits`.

    All ranks call this; two numbers of each rank are gathered for each row. Of equal logits the
    first token's is taken, as one rank does.
    """
    if backbone.group.size == 1:
        return backbone.backend.argmax(logits(backbone, hidden, users))
    own, cut = _own_logits(backbone, hidden, users)
    # Tokens after the last one pad the pieces of the last ranks.
    own[:, cut.num_held(backbone.group.rank) :] = -inf
    places = backbone.backend.argmax(own)[:, None]
    # A token's number is exact in float32: a piece has fewer than 2^24.
    found = torch.cat((own.gather(1, places).float(), places.float()), -1)
    pieces = backbone.group.gather(found, 0, "likeliest")
    if pieces is None:
        return None
    rank = pieces[..., 0].argmax(0)
    # Pieces are in the order of the ranks.
    return pieces[..., 1].gather(0, rank[None])[0].long() + rank * cut.local


def final_states(backbone: Backbone, hidden: Tensor) -> Tensor:
    """Return rows as the last linear layer of the head reads them: [n, hidden_size] -> [n, width].

    All ranks call this and have the result.
    """
    graph, values = backbone.local.graphs["head"], {"x": hidden}
    context = row_context(backbone)
    last = graph.node["lm_head"]
    for run in graph.runs:
        if last in run:
            break
        values.update(run_nodes(run, values, backbone.weights["head"], context))
    return values[last.input["x"]]


def _own_logits(backbone: Backbone, hidden: Tensor, users: Users) -> tuple[Tensor, Cut]:
    """Return the logits of this rank's tokens, [n, local], and how ranks divide the vocabulary."""
    assert _have_one_vocabulary(backbone, users), (
        "such adapters are refused where ranks divide the model"
    )
    graph, cut = backbone.local.own_head
    return _run_head(backbone, graph, hidden, users), cut


def _have_one_vocabulary(backbone: Backbone, users: Users) -> bool:
    """Return whether no adapter has another vocabulary than the backbone."""
    vocab_size = backbone.architecture.vocab_size
    return all(bypasses is None or bypasses.vocab_size == vocab_size for _, bypasses in users)


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


def _logits_of_vocabularies(backbone: Backbone, hidden: Tensor, users: Users) -> Tensor:
    """Return the logits of rows of several vocabularies: the rows of each adapter with its own
    vocabulary run apart, all others at once.
    """
    vocab_size, start = backbone.architecture.vocab_size, 0
    groups: dict[Bypasses | None, tuple[list[int], list[tuple[int, Bypasses | None]]]] = {}
    for num_rows, bypasses in users:
        is_apart = bypasses is not None and bypasses.vocab_size != vocab_size
        rows, own = groups.setdefault(bypasses if is_apart else None, ([], []))
        rows.extend(range(start, start + num_rows))
        own.append((num_rows, bypasses))
        start += num_rows
    sizes = [vocab_size if bypasses is None else bypasses.vocab_size for bypasses in groups]
    found = torch.full(
        (start, max(vocab_size, *sizes)), -inf, dtype=hidden.dtype, device=hidden.device
    )
    graph = backbone.local.graphs["head"]
    for size, (rows, own) in zip(sizes, groups.values(), strict=True):
        places = torch.tensor(rows, device=hidden.device)
        found[places, :size] = _run_head(backbone, graph, hidden[places], own)
    return found
