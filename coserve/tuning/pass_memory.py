"""Tensors of a pack on its pass: those that each part saves for the backward pass, and those
between parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from coserve.kernels.transfer import on_device
from coserve.memory.tensors.activations import ActivationMemory, Shapes
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.tuning.pack_states import STATES, clear_gradient, states_shape
from coserve.tuning.programs import TrainingPrograms

# Tensors of the workspace. Rows: what the blocks give for each row; after the loss, the gradient of
# that.
_ROWS, _KEY_GRADS, _VALUE_GRADS = "rows", "key_grads", "value_grads"


class PassMemory:
    """Tensors of one pack, taken as a whole. `saved` holds them by part, for parts that still need
    them, and by name.
    """

    def __init__(
        self,
        memory: ActivationMemory,
        programs: TrainingPrograms,
        backbone: Backbone,
        num_rows: int,
    ) -> None:
        """Take the memory of the whole pass.

        Raises:
            BudgetError: There is not enough; nothing is taken.
        """
        self._memory, self._programs = memory, programs
        self.saved: dict[Part, dict[str, Tensor]] = {}
        self._workspace: dict[str, Tensor] = {}
        self._addresses: tuple[Tensor, dict[Part, slice]] | None = None
        try:
            # The workspace, then the parts in forward order, as `PackPages` lists the groups.
            self._workspace = memory.take(workspace_shapes(programs, backbone, num_rows))
            for part in backbone.local.parts[:-1]:
                self.saved[part] = memory.take(saved_shapes(programs, backbone, part, num_rows))
        except BaseException:  # interruptions, too: nothing else could give the pages back
            self.release()
            raise

    @property
    def rows(self) -> Tensor:
        """Return the output of the parts so far for each row [n, hidden_size]; after the loss, its
        gradient.
        """
        return self._workspace[_ROWS]

    @property
    def key_value_grads(self) -> tuple[Tensor, Tensor]:
        """Return the accumulators of dK and dV [n, width], float32, of which one pair serves all
        blocks in turn.
        """
        return self._workspace[_KEY_GRADS], self._workspace[_VALUE_GRADS]

    @property
    def num_saved_bytes(self) -> int:
        """Return the bytes of saved tensors that are held now."""
        return sum(tensor.nbytes for tensors in self.saved.values() for tensor in tensors.values())

    def saved_rows(
        self, part: Part, rows: slice, constants: Mapping[str, Callable[[], Tensor]] | None = None
    ) -> Mapping[str, Tensor]:
        """Return some rows of a part's saved tensors, cut out on access. constants: functions that
        make further tensors of these rows.
        """
        saved = {name: tensor for name, tensor in self.saved[part].items() if name != STATES}
        return RowsOf(saved, rows, constants or {})

    def addressed(self, part: Part) -> Sequence[str]:
        """Return the names of a block's saved tensors in the order of `addresses`: keys and values
        last.
        """
        kv_tensors = self._programs.program[part].graph.kv_tensors
        return [*(name for name in self.saved[part] if name not in kv_tensors), *kv_tensors]

    @property
    def addresses(self) -> tuple[Tensor, Mapping[Part, slice]]:
        """Return the addresses of first rows, for copies by captured calls (`RowCopies`): int64, on
        the device; and the range of each block among them: the rows between parts, saved tensors as
        in `addressed`, the accumulators of dK and dV.
        """
        assert self._addresses is not None, "they have not been asked for"
        return self._addresses

    def find_addresses(self) -> None:
        """Find the addresses now: both sides of a divided step read them, so they must not be one
        side's.
        """
        numbers: list[int] = []
        places = {}
        # Addresses of the rows between parts, of dK and of dV, in this order.
        around = [tensor.data_ptr() for tensor in self._workspace.values()]
        for part in self._programs.program:
            if part not in self.saved or not self._programs.program[part].graph.kv_tensors:
                continue
            tensors = [self.saved[part][name] for name in self.addressed(part)]
            assert all(tensor.is_contiguous() for tensor in tensors), (
                "rows follow each other in memory"
            )
            start = len(numbers)
            numbers += [around[0], *(tensor.data_ptr() for tensor in tensors), *around[1:]]
            places[part] = slice(start, len(numbers))
        self._addresses = on_device(numbers, self.rows.device, torch.int64), places

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the pack in a block, as stores of one page."""
        keys, values = (
            self.saved[layer][name][None] for name in self._programs.program[layer].graph.kv_tensors
        )
        return keys, values

    def states(self, part: Part) -> Tensor:
        """Return the states of a block (`PackStates`)."""
        return self.saved[part][STATES]

    def clear_gradients(self, part: Part) -> None:
        """Zero dK, dV and the state's gradient before the first tasklet of a part: no later row
        adds to them.
        """
        graph = self._programs.program[part].graph
        for grads in self.key_value_grads if graph.kv_tensors else ():
            grads.zero_()
        if graph.state_size:
            clear_gradient(self.states(part))

    def give_back(self, part: Part) -> None:
        """Return the saved tensors of a part, which nothing needs any more."""
        self._memory.give_back(self.saved.pop(part))

    def release(self) -> None:
        """Return all memory."""
        for tensors in (*self.saved.values(), self._workspace):
            self._memory.give_back(tensors)
        self.saved, self._workspace, self._addresses = {}, {}, None

    def move(self, memory: ActivationMemory) -> None:
        """Continue in other memory (`TrainingPass.move`)."""
        # In the order in which they were taken, in which the memory lends the new places.
        for tensors in (self._workspace, *self.saved.values()):
            tensors.update(
                memory.take(
                    {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
                )
            )
        self._memory = memory
        if self._addresses is not None:
            self._addresses = None
            self.find_addresses()


class RowsOf(Mapping[str, Tensor]):
    """Some rows of tensors, cut out on access; and constants, made on access."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        rows: slice,
        constants: Mapping[str, Callable[[], Tensor]],
    ) -> None:
        self._tensors, self._rows, self._constants = tensors, rows, constants

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        return self._constants[name]() if tensor is None else tensor[self._rows]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._constants

    def __len__(self) -> int:
        return len(self._tensors) + len(self._constants)


def saved_shapes(
    programs: TrainingPrograms, backbone: Backbone, part: Part, num_rows: int
) -> Shapes:
    """Return the tensors that a pass of this many rows saves of one part."""
    program = programs.program[part]
    specs = (program.graph.spec[name] for name in program.saved)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        spec.name: ((num_rows, *spec.shape), spec.dtype or backbone.dtype) for spec in specs
    }
    if size := program.graph.state_size:
        shapes[STATES] = (
            states_shape(size, num_rows, is_trained=part in programs.parts),
            torch.float32,
        )
    return shapes


def state_shapes(programs: TrainingPrograms, num_rows: int) -> Shapes:
    """Return the states among `saved_shapes`, of all parts."""
    return {
        f"{part}": (states_shape(size, num_rows, is_trained=part in programs.parts), torch.float32)
        for part, program in programs.program.items()
        if (size := program.graph.state_size)
    }


def workspace_shapes(programs: TrainingPrograms, backbone: Backbone, num_rows: int) -> Shapes:
    """Return the tensors that a pass of this many rows needs beside: its rows between blocks, dK
    and dV of one block.
    """
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        _ROWS: ((num_rows, backbone.architecture.hidden_size), backbone.dtype)
    }
    # An evaluation runs nothing backward.
    if not programs.parts:
        return shapes
    for name, width in zip((_KEY_GRADS, _VALUE_GRADS), backbone.local.kv_widths, strict=True):
        shapes[name] = ((num_rows, width), torch.float32)
    return shapes
