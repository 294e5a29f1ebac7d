"""The next-token loss and its gradient, in chunks of trained rows: the logits of a whole window never exist at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, nan

import torch
from torch import Tensor

from coserve.graph.execute import BackwardRun, run_graph
from coserve.graph.ir import Node
from coserve.graph.program import Program
from coserve.tuning.pack import UNTRAINED

# Logits of a chunk, beside which the loss holds their gradient: 256 rows of bfloat16 for the widest vocabularies, since
# the products with the head's weight are half as slow again with 100.
_MAX_CHUNK_BYTES = 80 << 20


@dataclass(kw_only=True)
class LossSums:
    """Sums over trained rows; add up those of windows, packs and jobs before dividing. The means of no rows are nan."""

    loss: float = 0.0
    num_correct: int = 0
    num_trained: int = 0

    def add(self, other: "LossSums") -> None:
        self.loss += other.loss
        self.num_correct += other.num_correct
        self.num_trained += other.num_trained

    @property
    def mean_loss(self) -> float:
        return self.loss / self.num_trained if self.num_trained else nan

    @property
    def token_accuracy(self) -> float:
        """Share of trained rows whose most likely token is the target."""
        return self.num_correct / self.num_trained if self.num_trained else nan


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
    """Loss sums of a window, and the gradient of its summed loss.

    Args:
        program: of the head with the loss.
        hidden: the last block's rows [n, hidden_size].
        constants: what the program reads of each row: "targets" int64 [n] (rows with UNTRAINED do not pass the head,
            and their gradient is zero), "row_keys" int64 [n].
        weights: the head's weights and parameters by name.
        accumulators: for each parameter of the head that is trained, the tensor its gradient is added to.
        max_rows: most rows of a chunk; the chunks are about equal.

    Returns:
        The sums, and the gradient with respect to hidden [n, hidden_size].
    """
    sums, gradient = LossSums(), torch.zeros_like(hidden)
    trained = (constants["targets"] != UNTRAINED).nonzero()[:, 0]
    for rows in torch.tensor_split(trained, ceil(trained.shape[0] / max_rows)) if trained.numel() else ():
        chunk = {name: tensor[rows] for name, tensor in constants.items()}
        chunk_sums, chunk_gradient = _chunk(program, hidden[rows], chunk, weights, accumulators)
        sums.add(chunk_sums)
        if chunk_gradient is not None:
            gradient[rows] = chunk_gradient
    return sums, gradient


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
