"""The next pieces of several packs as one piece: of the loss, and of the backward pass."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.tuning.captured import CapturedWindows
from coserve.tuning.cursor import Cursor
from coserve.tuning.objective import chunk_rows, loss_and_gradient
from coserve.tuning.pass_memory import PassMemory
from coserve.tuning.programs import TrainingPrograms
from coserve.tuning.tasklet import BackwardWindow, Tasklet
from coserve.tuning.window_rooms import WindowInputs


class JoiningPass(Protocol):
    """The part of a pass that joins others (`TrainingPass`)."""

    backbone: Backbone
    """The model."""
    adapter: Adapter
    """The adapter that it trains."""
    programs: TrainingPrograms
    """Programs of its parts."""
    cursor: Cursor
    """Position of the pack."""
    kept: PassMemory
    """Tensors of the pack."""
    captured: CapturedWindows | None
    """Captured calls of the adapter, if there are any."""

    def next_backward_window(self, max_rows: int) -> BackwardWindow:
        """Return the window that the next tasklet reverses, of at most this many rows; `begin` must
        follow.
        """

    def begin(self, tasklet: Tasklet) -> None:
        """Record that a tasklet with the next window is under way."""

    def window_rows(self, start: int, end: int) -> WindowInputs:
        """Return rows [start, end) for captured calls."""

    def next_loss_rows(self, max_rows: int) -> Tensor:
        """Return the rows of the pack that the loss takes next, int64 [n]."""

    def loss_constants(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the loss's inputs for these rows beside the blocks' output."""

    def finish_loss(self, rows: Tensor, losses: Tensor, correct: Tensor, gradient: Tensor) -> None:
        """Take the rows' losses, whether their likeliest token is the target, and the gradients of
        the losses.
        """

    def accumulators(self, part: Part) -> dict[str, Tensor]:
        """Return the sums of gradients of a part's parameters, by their names there."""


def joined_tasklet(pieces: Sequence[tuple[JoiningPass, int]]) -> Tasklet:
    """Return the next tasklets of packs at the same part, each of at most its number of rows, as
    one.
    """
    first, windows = (
        pieces[0][0],
        [training.next_backward_window(max_rows) for training, max_rows in pieces],
    )
    at_once = None
    # A window alone may run as one captured call.
    if len(windows) == 1 and (captured := first.captured) is not None:
        rows = first.window_rows(*first.cursor.next_backward(pieces[0][1]))
        at_once = partial(captured.backward, rows, windows[0], first.kept)
    tasklet = Tasklet(first.backbone, windows, at_once=at_once)
    for training, _ in pieces:
        training.begin(tasklet)
    return tasklet


def run_losses(pieces: Sequence[tuple[JoiningPass, int]]) -> None:
    """Run the next trained rows of packs, each with at most its number, through the head: their
    losses, and the gradients.

    The rows of all packs whose head has no tensors of an adapter are one batch.
    """
    joined: dict[int, list[tuple[JoiningPass, int]]] = {}
    for training, max_rows in pieces:
        # A head with tensors of an adapter runs by itself; others of one program are a batch.
        key = id(training if training.adapter.tensors("head") else training.programs.loss)
        joined.setdefault(key, []).append((training, max_rows))
    for group in joined.values():
        _run_loss(group)


def _run_loss(pieces: Sequence[tuple[JoiningPass, int]]) -> None:
    """Run the losses of packs of one program."""
    first, windows = (
        pieces[0][0],
        [training.next_loss_rows(max_rows) for training, max_rows in pieces],
    )
    backbone = first.backbone
    constants = [
        training.loss_constants(rows) for (training, _), rows in zip(pieces, windows, strict=True)
    ]
    hidden = [training.kept.rows[rows] for (training, _), rows in zip(pieces, windows, strict=True)]
    losses = loss_and_gradient(
        first.programs.loss,
        torch.cat(hidden),
        {name: torch.cat([each[name] for each in constants]) for name in constants[0]},
        backend=backbone.backend,
        group=backbone.group,
        # Tensors of an adapter's head occur only if there is a single pass here.
        weights={**backbone.weights["head"], **first.adapter.tensors("head")},
        accumulators=first.accumulators("head"),
        max_rows=chunk_rows(first.adapter.architecture.vocab_size, backbone.dtype),
    )
    sizes = [len(rows) for rows in windows]
    for (training, _), rows, *each in zip(
        pieces, windows, *(torch.split(x, sizes) for x in losses), strict=True
    ):
        training.finish_loss(rows, *each)
