"""Backward tasklets: one part of the model × one window, of one pack or of several at once.

Windows of several packs at the same part are one batch of rows (MuxTune section 3.3, spatial
multiplexing): every product with a weight of the backbone takes all of them, whatever the adapters.
Only three operations depend on the owner of a row: attention, which stays within its pack;
adapters, each with its own parameters and gradients; and saved tensors. Packs whose programs are
equal run as one; other programs meet at the products alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coserve.graph.execute import BackwardRun, run_together
from coserve.graph.operators.base import AttentionRows, Context
from coserve.graph.program import Program
from coserve.graph.states import StateRows
from coserve.kernels.base import Factor, Grouped, JoinedRows
from coserve.kernels.low_rank import AdapterRows
from coserve.models.backbone import Backbone
from coserve.models.base import Part


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardWindow:
    """The rows of a pack that a tasklet reverses in a part, n of them, with all tensors of the
    pack.
    """

    part: Part
    """Part of the model."""
    program: Program
    """Program of the part."""
    tokens: Tensor
    """Token ids, int64 [n]."""
    positions: Tensor
    """Positions, int64 [n]."""
    saved: Mapping[str, Tensor]
    """Rows of the saved tensors, and of constants that only this pack has."""
    parameters: Mapping[str, Tensor]
    """Parameters of its adapter by name."""
    accumulators: Mapping[str, Tensor]
    """Accumulators of their gradients by name."""
    gradient: Tensor
    """Gradient of the part's output [n, hidden_size]."""
    attention: AttentionRows | None
    """Attention of a block that has it, with the accumulators of dK and dV."""
    states: StateRows | None
    """States of a block that carries one."""
    finish: Callable[[Tensor | None], None]
    """Takes the gradient of the part's input; None if the program does not compute it."""

    @property
    def num_rows(self) -> int:
        return self.gradient.shape[0]


class Tasklet:
    """Windows of one part as one piece of work; runs in one go or, if all have one program, in
    pieces.
    """

    def __init__(
        self,
        backbone: Backbone,
        windows: Sequence[BackwardWindow],
        *,
        at_once: Callable[[], bool] | None = None,
    ) -> None:
        """Prepare a tasklet.

        Args:
            at_once: Runs all of it, or returns False if it cannot; called before anything else
                runs.
        """
        self.part = windows[0].part
        assert all(window.part == self.part for window in windows), "windows of one part"
        self._backbone, self._windows, self._at_once = backbone, windows, at_once
        self._graph = backbone.local.graphs[self.part]
        self._made: list[tuple[list[BackwardWindow], BackwardRun]] | None = None

    @property
    def _runs(self) -> list[tuple[list[BackwardWindow], BackwardRun]]:
        """Return the run of each program with its windows, made on first use."""
        if self._made is None:
            groups: dict[int, list[BackwardWindow]] = {}
            for window in self._windows:
                groups.setdefault(id(window.program), []).append(window)
            self._made, self._windows = (
                [(group, _backward_run(self._backbone, group)) for group in groups.values()],
                (),
            )
        return self._made

    @property
    def done(self) -> bool:
        return self._made is not None and not self._made

    @property
    def num_instructions_left(self) -> int:
        return sum(run.num_instructions_left for _, run in self._runs)

    def cancel(self) -> None:
        """Release everything; the tasklet counts as done, and cannot run any more."""
        self._made, self._windows, self._at_once = [], (), None

    @property
    def num_transient_bytes(self) -> int:
        """Return the bytes that it holds between two instructions, beside the packs' saved
        tensors.
        """
        return sum(run.num_transient_bytes for _, run in self._runs)

    def run(self, max_instructions: int | None = None) -> bool:
        """Run the next instructions (default: all). Returns whether the tasklet is done."""
        assert not self.done, "the tasklet is done"
        if self._at_once is not None:
            # Tried once only: if it cannot run, the instructions do.
            at_once, self._at_once = self._at_once, None
            if at_once():
                self.cancel()
                return True
        if max_instructions is None:
            run_together([run for _, run in self._runs], self._graph)
        else:
            assert len(self._runs) == 1, "a tasklet of several programs runs as a whole"
            self._runs[0][1].advance(max_instructions)
        if not self.num_instructions_left:
            runs, self._made = self._runs, []  # they hold tensors that `finish` may release
            for group, run in runs:
                _finish(group, run)
        return self.done

    def run_until(self, stopped: Callable[[], bool]) -> bool:
        """Run until `stopped` returns True, which is called between two instructions (with several
        programs, only before the first). Returns whether the tasklet is done.
        """
        while not self.done and not stopped():
            # Neither a captured call nor several programs can stop between two instructions.
            self.run(None if self._at_once is not None or len(self._runs) > 1 else 1)
        return self.done


def reversed_window(backbone: Backbone, window: BackwardWindow) -> Tensor | None:
    """Run all instructions on one window, without its `finish`. Returns the gradient of the part's
    input, if the program computes it.
    """
    run = _backward_run(backbone, [window])
    run.advance()
    return run.gradient("x") if "x" in window.program.asked else None


def _finish(group: Sequence[BackwardWindow], run: BackwardRun) -> None:
    """Give each window its rows of the gradient."""
    gradients: Sequence[Tensor | None] = [None] * len(group)
    if "x" in group[0].program.asked:
        gradients = torch.split(run.gradient("x"), [window.num_rows for window in group])
    for window, gradient in zip(group, gradients, strict=True):
        window.finish(gradient)


def _backward_run(backbone: Backbone, group: Sequence[BackwardWindow]) -> BackwardRun:
    """Return the run of windows of one program, side by side."""
    first = group[0]
    rows = AdapterRows([window.num_rows for window in group], backbone.device)
    attention = tuple(
        replace(window.attention, rows=own)
        for window, own in zip(group, rows.slices, strict=True)
        if window.attention is not None
    )
    states = tuple(
        replace(window.states, rows=own)
        for window, own in zip(group, rows.slices, strict=True)
        if window.states is not None
    )
    constants = backbone.constants(
        *(_cat([getattr(w, name) for w in group]) for name in ("tokens", "positions"))
    )
    saved = {name: _joined([window.saved[name] for window in group]) for name in first.saved}
    parameters = {
        name: _grouped([window.parameters[name] for window in group], rows)
        for name in first.parameters
    }
    return BackwardRun(
        first.program,
        values={**constants, **backbone.weights[first.part], **parameters, **saved},
        gradients={first.program.graph.outputs[0]: _cat([window.gradient for window in group])},
        accumulators={
            name: _grouped([w.accumulators[name] for w in group], rows)
            for name in first.accumulators
        },
        context=Context(
            backend=backbone.backend, attention=attention, states=states, group=backbone.group
        ),
    )


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _joined(tensors: Sequence[Tensor]) -> Tensor | JoinedRows:
    return tensors[0] if len(tensors) == 1 else JoinedRows(tensors=tuple(tensors))


def _grouped(tensors: Sequence[Tensor], rows: AdapterRows) -> Factor:
    return tensors[0] if len(tensors) == 1 else Grouped(tensors=tuple(tensors), rows=rows)
