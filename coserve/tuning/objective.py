"""The next-token loss and its gradient, in chunks of rows: the logits of a whole window never exist at once."""

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor

from coserve.graph.execute import BackwardRun, run_graph
from coserve.graph.ir import Node
from coserve.graph.program import Program
from coserve.tuning.loss_sums import LossSums

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
    weights: Mapping[str, Tensor],
    accumulators: Mapping[str, Tensor],
    max_rows: int,
) -> tuple[LossSums, Tensor]:
    """Loss sums of some trained rows, and the gradient of their summed loss.

    Args:
        program: of the head with the loss.
        hidden: the last block's rows [n, hidden_size], at least one.
        constants: what the program reads of each row: "targets" int64 [n], "dropout_row_ids" int64 [n].
        weights: the head's weights and parameters by name.
        accumulators: for each parameter of the head that is trained, the tensor its gradient is added to.
        max_rows: most rows of a chunk; the chunks are about equal.

    Returns:
        The sums, and the gradient with respect to hidden [n, hidden_size].
    """
    sums, gradients, num_chunks = LossSums(), [], ceil(hidden.shape[0] / max_rows)
    constant_chunks = [torch.tensor_split(tensor, num_chunks) for tensor in constants.values()]
    for x, *each in zip(torch.tensor_split(hidden, num_chunks), *constant_chunks, strict=True):
        chunk_sums, gradient = _chunk(program, x, dict(zip(constants, each, strict=True)), weights, accumulators)
        sums.add(chunk_sums)
        gradients.append(torch.zeros_like(x) if gradient is None else gradient)
    return sums, torch.cat(gradients)


def _chunk(
    program: Program,
    hidden: Tensor,
    constants: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    accumulators: Mapping[str, Tensor],
) -> tuple[LossSums, Tensor | None]:
    """Forward and backward of some rows; nothing of it outlives the call."""
    values = {"x": hidden, **constants}
    kept = {name: values[name] for name in program.saved if name in values}

    def keep(node: Node, current: Mapping[str, Tensor]) -> None:
        kept.update({name: current[name] for name in node.output.values() if name in program.retention.saved})

    run_graph(program.graph, values, weights, after=keep)
    sums = LossSums(
        loss=float(values["loss"].double().sum()),
        num_correct=int(values["loss.correct"].sum()),
        num_trained=hidden.shape[0],
    )
    if not program.asked:
        return sums, None
    run = BackwardRun(
        program,
        values={**weights, **constants, **kept},
        gradients={"loss": torch.ones_like(values["loss"])},
        accumulators=accumulators,
    )
    run.advance()
    return sums, run.gradient("x") if "x" in program.asked else None
