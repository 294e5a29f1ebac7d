"""Copies of a job's tensors that are written to files, and the optimizer's state as it is read
back.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.held_tensors import HeldTensors
from coserve.adapters.peft_directory import save_adapter
from coserve.adapters.tensor_files import open_tensors
from coserve.devices.messages.jobs import OPTIMIZER_FILE
from coserve.devices.torch.exchange import CONTRIBUTION_FILE
from coserve.errors import AdapterError


class TorchCopy:
    """Copy of tensors that later training does not touch; any thread may write it."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        held: HeldTensors,
        device: torch.device,
        file: str = CONTRIBUTION_FILE,
    ) -> None:
        """Keep tensors that are copies already.

        Args:
            tensors: The copies by name.
            held: How they are pieces of whole tensors.
            device: Device that they lie on.
            file: Name of the file that they are written to.
        """
        self._tensors, self._held, self._device, self._file = tensors, held, device, file
        self._taken: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # The copies may still be under way in the steps' stream; `write` waits for this event.
            self._taken.record(torch.cuda.current_stream(device))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the copies by name."""
        return self._tensors

    def write(self, directory: Path) -> None:
        """Write the copies to a directory.

        Raises:
            AdapterError, OSError: They cannot be written.
        """
        if self._taken is None:
            stream = None
        else:  # of its own, so that it does not wait for steps
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._taken)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._write(directory)

    def _write(self, directory: Path) -> None:
        self._held.write(directory / self._file, self._tensors)


class TorchCheckpoint(TorchCopy):
    """Copy of a job: its adapter, and the optimizer's state unless that is gone."""

    def __init__(
        self, adapter: Adapter, optimizer: dict[str, Tensor] | None, held: HeldTensors
    ) -> None:
        """Keep copies.

        Args:
            adapter: A copy of the adapter.
            optimizer: A copy of its state, by name; None: it is gone.
            held: How the state is a piece of whole tensors.
        """
        super().__init__(optimizer or {}, held, adapter.backbone.device, OPTIMIZER_FILE)
        self._adapter, self._has_optimizer = adapter, optimizer is not None

    def _write(self, directory: Path) -> None:
        save_adapter(self._adapter, directory)
        if self._has_optimizer:
            super()._write(directory)


def read_state(path: Path, masters: Mapping[str, Tensor], held: HeldTensors) -> dict[str, Tensor]:
    """Return the written state of an optimizer, or this rank's pieces of it.

    Args:
        path: The file.
        masters: The parameters by name, whose shapes the state must have (or be single numbers).
        held: How they are pieces of whole tensors.

    Raises:
        AdapterError: A shape differs, or a number is not finite.
    """
    shapes = {name: held.whole_shape(name, master) for name, master in masters.items()}
    with open_tensors(path) as file:
        for key, header in file.headers.items():
            shape = shapes.get(key.rpartition("/")[0])
            if header.shape and header.shape != shape:
                needed = (
                    "is of no parameter" if shape is None else f"must have the shape {list(shape)}"
                )
                raise AdapterError(
                    f"{path} is not this adapter's: {key}, of shape {list(header.shape)}, "
                    f"{needed} (a job is resumed with the settings of the adapter that it began "
                    "with)"
                )
        return {key: held.read(file, key, torch.float32) for key in file.headers}
