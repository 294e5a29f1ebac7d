"""What adapters may take of a device's memory: asked before they take it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from coserve.adapters.base import AdapterLayout
from coserve.devices.process_memory import available_bytes
from coserve.errors import AdapterTooLargeError

# Of what is free; the rest is for everything else that is on its way.
_SHARE = 0.8
# Tensors of each parameter's size in float32 while it is trained: itself, the gradients of a pack and of the step and
# their mean, two moments; and in a checkpoint that is being written itself and the moments.
_TRAINING_COPIES = 9


class AdapterMemory:
    """One device's; from any thread."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the copies that are computed with."""
        self._device = device
        # Where the model is float32, what is trained is what is computed with.
        self._copy_bytes = 0 if dtype == torch.float32 else dtype.itemsize
        self._lock = Lock()
        self._being_taken = 0

    @contextmanager
    def for_serving(self, what: str, layout: AdapterLayout) -> Iterator[None]:
        """While an adapter is being loaded; AdapterTooLargeError, before it is, if there is not enough memory."""
        with self._taking(what, layout, layout.num_parameters * (4 + self._copy_bytes) + 4 * layout.num_derived):
            yield

    @contextmanager
    def for_training(self, what: str, layout: AdapterLayout, num_more: int = 0) -> Iterator[None]:
        """Likewise, for one that is to be trained. num_more: tensors of each parameter's size beside the usual ones."""
        num_copies = _TRAINING_COPIES + num_more
        num_bytes = layout.num_parameters * (4 * num_copies + self._copy_bytes) + 4 * layout.num_derived
        with self._taking(what, layout, num_bytes):
            yield

    @contextmanager
    def _taking(self, what: str, layout: AdapterLayout, num_bytes: int) -> Iterator[None]:
        with self._lock:
            free = max(0, available_bytes(self._device) - self._being_taken)
            if num_bytes > _SHARE * free:
                name, there = layout.largest, int(_SHARE * free)
                raise AdapterTooLargeError(
                    f"{what} needs {_size(num_bytes)} of memory (its largest tensor is {name}, "
                    f"{list(layout.shapes[name])}); {_size(there)} are there for it, {num_bytes - there:,} bytes are "
                    "missing: lower its rank, or train fewer layers"
                )
            self._being_taken += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._being_taken -= num_bytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
