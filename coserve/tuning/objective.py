"""The next-token loss and its gradient, in chunks of rows: the logits of a whole window never exist at once."""

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor

from coserve.graph.execute import BackwardRun, run_graph
from coserve.graph.ir import Node
from coserve.graph.operators.base import Context, Values
from coserve.graph.program import Program
from coserve.kernels.base import Backend

# Logits of a chunk, beside which the loss holds their gradient (and a GPU a float32 copy): some 270 rows of 151,936
# tokens in bfloat16, since the products with the head's weight are half as slow again with 100.
_MAX_CHUNK_BYTES = 80 << 20


def chunk_rows(vocab_size: int, compute_dtype: torch.dtype) -> int:
    """Rows whose logits stay within the bound above."""
    return max(1, _MAX_CHUNK_BYTES // (compute_dtype.itemsize * vocab_size))


def loss_and_gradient(
    program: Program,
    hidden: Tensor,
    constants: Mapping[str, Tensor],
    *,
    backend: Backend,
    weights: Values,
    accumulators: Mapping[str, Tensor],
    max_rows: int,
) -> tuple[Tensor, Tensor]:
    """What the loss of some trained rows sums up to, and the gradient of that sum. Waits for nothing on the device.

    Args:
        program: of the head with the loss.
        hidden: the last block's rows [n, hidden_size], at least one.
        constants: what the program reads of each row: "targets" int64 [n], "dropout_row_ids" int64 [n].
        weights: the head's weights and parameters by name.
        accumulators: for each parameter of the head that is trained, the tensor its gradient is added to.
        max_rows: most rows of a chunk; the chunks are about equal.

    Returns:
        float64 [2], the summed loss and the number of rows whose likeliest token is the target; and the gradient with
        respect to hidden [n, hidden_size].
    """
    totals, gradients, num_chunks = hidden.new_zeros(2, dtype=torch.float64), [], ceil(hidden.shape[0] / max_rows)
    constant_chunks = [torch.tensor_split(tensor, num_chunks) for tensor in constants.values()]
    for x, *each in zip(torch.tensor_split(hidden, num_chunks), *constant_chunks, strict=True):
        chunk_totals, gradient = _chunk(
            program, x, dict(zip(constants, each, strict=True)), weights, accumulators, Context(backend=backend)
        )
        totals += chunk_totals
        gradients.append(torch.zeros_like(x) if gradient is None else gradient)
    return totals, torch.cat(gradients)


def _chunk(
    program: Program,
    hidden: Tensor,
    constants: Mapping[str, Tensor],
    weights: Values,
    accumulators: Mapping[str, Tensor],
    context: Context,
) -> tuple[Tensor, Tensor | None]:
    """Forward and backward of some rows; of all that it computes, only its totals [2] outlive the call."""
    values = {"x": hidden, **constants}
    kept = {name: values[name] for name in program.saved if name in values}

    def keep(node: Node, current: Mapping[str, Tensor]) -> None:
        kept.update({name: current[name] for name in node.output.values() if name in program.retention.saved})

    run_graph(program.graph, values, weights, context, keep)
    totals = torch.stack([values[name].sum(dtype=torch.float64) for name in ("loss", "loss.correct")])
    if not program.asked:
        return totals, None
    run = BackwardRun(
        program,
        values={**weights, **constants, **kept},
        gradients={"loss": torch.ones_like(values["loss"])},
        accumulators=accumulators,
        context=context,
    )
    run.advance()
    return totals, run.gradient("x") if "x" in program.asked else None
