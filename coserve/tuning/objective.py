"""The next-token loss and its gradient, in chunks of rows: the logits of a whole window never exist
at once.
"""

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor

from coserve.graph.execute import BackwardRun, run_graph
from coserve.graph.ir import Node
from coserve.graph.operators.base import Context, Values
from coserve.graph.program import Program
from coserve.kernels.base import Backend
from coserve.kernels.groups.base import RankGroup, SingleRank

# Logits of a chunk, beside which a loss that is no one operator with its product holds their
# gradient (and a GPU a float32 copy): some 270 rows of 151,936 tokens in bfloat16, since the
# products with the head's weight are half as slow again with 100.
_MAX_CHUNK_BYTES = 80 << 20


def chunk_rows(vocab_size: int, compute_dtype: torch.dtype) -> int:
    """Return the number of rows whose logits stay within the bound above."""
    return max(1, _MAX_CHUNK_BYTES // (compute_dtype.itemsize * vocab_size))


def loss_and_gradient(
    program: Program,
    hidden: Tensor,
    constants: Mapping[str, Tensor],
    *,
    backend: Backend,
    group: RankGroup | None = None,
    weights: Values,
    accumulators: Mapping[str, Tensor],
    max_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of some trained rows, and the gradient of its sum. Waits for nothing on the
    device.

    Args:
        program: Program of the head with the loss.
        hidden: The last block's rows [n, hidden_size], at least one.
        constants: Inputs of the program for each row: "targets" int64 [n], "dropout_row_ids" int64
            [n].
        group: Ranks that run it together; None for this one alone.
        weights: The head's weights and parameters by name.
        accumulators: For each trained parameter of the head, the tensor to which its gradient is
            added.
        max_rows: Maximum number of rows of a chunk; the chunks are about equal.

    Returns:
        The loss of each row, float32 [n]; whether its likeliest token is the target, bool [n]; and
        the gradient with respect to hidden [n, hidden_size].
    """
    num_chunks = ceil(hidden.shape[0] / max_rows)
    names, tensors = ["x", *constants], [hidden, *constants.values()]
    chunks = zip(*(torch.tensor_split(tensor, num_chunks) for tensor in tensors), strict=True)
    context = Context(backend=backend.for_losses, group=group or SingleRank())
    results = [
        _chunk(program, dict(zip(names, each, strict=True)), weights, accumulators, context)
        for each in chunks
    ]
    losses, correct, gradients = zip(*results, strict=True)
    return torch.cat(losses), torch.cat(correct), torch.cat(gradients)


def _chunk(
    program: Program,
    given: Mapping[str, Tensor],
    weights: Values,
    accumulators: Mapping[str, Tensor],
    context: Context,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run some rows forward and backward; nothing else that it computes outlives the call."""
    values = dict(given)
    kept = {name: values[name] for name in program.saved if name in values}

    def keep(node: Node, current: Mapping[str, Tensor]) -> None:
        kept.update(
            {
                name: current[name]
                for name in node.output.values()
                if name in program.retention.saved
            }
        )

    run_graph(program.graph, values, weights, context, keep)
    gradient = None
    if program.asked:
        run = BackwardRun(
            program,
            values={**weights, **given, **kept},
            gradients={"loss": torch.ones_like(values["loss"])},
            accumulators=accumulators,
            context=context,
        )
        run.advance()
        gradient = run.gradient("x") if "x" in program.asked else None
    return (
        values["loss"],
        values["loss.correct"],
        torch.zeros_like(given["x"]) if gradient is None else gradient,
    )
