"""The head of the model on rows of any adapters: logits, and the states that they are made of."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from coserve.graph.execute import run_graph, run_nodes
from coserve.models.backbone import Backbone
from coserve.models.batch import AfterNode, row_context
from coserve.models.bypasses import Bypasses, RowAdapters


def logits(backbone: Backbone, hidden: Tensor, users: Sequence[tuple[int, Bypasses | None]] = ()) -> Tensor:
    """Return the head's logits of rows of any adapters: [n, hidden_size] -> [n, vocab_size] in the compute dtype.

    Where adapters have vocabularies of their own, vocab_size is the largest of theirs and the backbone's, so that it
    is never less than the backbone's, and tokens that a row's model does not have get -inf.

    users: (number of rows, their adapter's bypasses or None), in the order of the rows; none: all rows use the bare
    model.
    """
    assert not users or sum(num_rows for num_rows, _ in users) == hidden.shape[0], "the users' rows are all the rows"
    vocab_size = backbone.architecture.vocab_size
    if all(bypasses is None or bypasses.vocab_size == vocab_size for _, bypasses in users):
        return _logits(backbone, hidden, users)
    return _logits_of_vocabularies(backbone, hidden, users)


def _logits_of_vocabularies(backbone: Backbone, hidden: Tensor, users: Sequence[tuple[int, Bypasses | None]]) -> Tensor:
    """Run the rows of each adapter whose vocabulary is another than the backbone's apart, and all others at once."""
    vocab_size, start = backbone.architecture.vocab_size, 0
    groups: dict[Bypasses | None, tuple[list[int], list[tuple[int, Bypasses | None]]]] = {}
    for num_rows, bypasses in users:
        is_apart = bypasses is not None and bypasses.vocab_size != vocab_size
        rows, own = groups.setdefault(bypasses if is_apart else None, ([], []))
        rows.extend(range(start, start + num_rows))
        own.append((num_rows, bypasses))
        start += num_rows
    sizes = [vocab_size if bypasses is None else bypasses.vocab_size for bypasses in groups]
    found = torch.full((start, max(vocab_size, *sizes)), -inf, dtype=hidden.dtype, device=hidden.device)
    for size, (rows, own) in zip(sizes, groups.values(), strict=True):
        places = torch.tensor(rows, device=hidden.device)
        found[places, :size] = _logits(backbone, hidden[places], own)
    return found


def _logits(backbone: Backbone, hidden: Tensor, users: Sequence[tuple[int, Bypasses | None]]) -> Tensor:
    """Run the head on rows that all have as many logits."""
    adapters = RowAdapters(
        [(num_rows, bypasses, None) for num_rows, bypasses in users], backbone.device, apart=bool(backbone.block_rows)
    )
    context, values = row_context(backbone), {"x": hidden}
    graph, runs = backbone.local.graphs["head"], backbone.local.place_runs["head"]
    weights, num_rows = backbone.weights["head"], hidden.shape[0]
    after = AfterNode("head", graph, (), adapters, runs, weights, context, num_rows)
    run_graph(graph, values, weights, context, after, after.bypasses.run_nodes if after.bypasses.run_any else None)
    return values[graph.outputs[0]]


def final_states(backbone: Backbone, hidden: Tensor) -> Tensor:
    """Rows as the last linear layer of the head reads them, after the final norm: [n, hidden_size] -> [n, width]."""
    graph, values = backbone.local.graphs["head"], {"x": hidden}
    context = row_context(backbone)
    last = graph.node["lm_head"]
    for run in graph.runs:
        if last in run:
            break
        values.update(run_nodes(run, values, backbone.weights["head"], context))
    return values[last.input["x"]]
