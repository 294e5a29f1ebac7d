"""Memory of a device for adapters: checked before they take it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from coserve.adapters import LoraConfig
from coserve.adapters.held_parameters import HeldElements, whole_adapter
from coserve.adapters.layout import AdapterLayout
from coserve.devices.torch.process_memory import available_bytes
from coserve.errors import AdapterTooLargeError
from coserve.kernels.groups.base import RankGroup, SingleRank
from coserve.models.backbone import Backbone

# Of what is free; the rest is for everything else that is on its way.
_SHARE = 0.8
# Tensors of each parameter's size in float32 while it is trained: itself, the gradients of a pack
# and of the step and their mean, two moments; and in a checkpoint that is being written itself and
# the moments.
_TRAINING_COPIES = 9
# Of these the moments, and in a checkpoint: where the host's memory is another one, they can lie in
# pages, or there.
_MOMENT_COPIES = 4


def room_for_a_job(backbone: Backbone) -> int:
    """Return the bytes beside a pool of pages with which a usual job trains: a LoRA of rank 16 at
    all linear layers.
    """
    layout = LoraConfig(r=16, target_modules="all-linear").sizes(backbone.architecture)
    memory = AdapterMemory(backbone.device, backbone.dtype)
    return int(memory.training_bytes(layout) / _SHARE)


class AdapterMemory:
    """Checks of one device's memory for adapters, for callers on any thread."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        host_is_apart: bool | None = None,
        group: RankGroup | None = None,
        held: Callable[[AdapterLayout], HeldElements] = whole_adapter,
    ) -> None:
        """Begin with nothing taken.

        Args:
            device: Device whose memory is taken.
            dtype: Dtype that is computed with.
            host_is_apart: Whether the host's memory is not the device's; None: as PyTorch says.
            group: Ranks that hold the model together. Each verdict is that of the rank with the
                least memory, so that all ranks ask together. On a CPU each rank has its share of
                the memory.
            held: Returns how much of an adapter a rank holds at most.
        """
        self._device, self._group, self._held = device, group or SingleRank(), held
        self._host_is_apart = device.type != "cpu" if host_is_apart is None else host_is_apart
        # Where the model is float32, what is trained is what is computed with.
        self._copy_bytes = 0 if dtype == torch.float32 else dtype.itemsize
        self._dtype_bytes = dtype.itemsize
        self._lock = Lock()
        self._being_taken = 0
        self._kept: dict[str, int] = {}

    @contextmanager
    def for_serving(self, what: str, layout: AdapterLayout) -> Iterator[None]:
        """Reserve memory while an adapter is loaded.

        Args:
            what: Name of the adapter, for the message.
            layout: Its tensors.

        Raises:
            AdapterTooLargeError: There is too little memory.
        """
        held = self._held(layout)
        num_bytes = held.parameters * (4 + self._copy_bytes) + self._others_bytes(layout, held)
        with self._taking(what, layout, num_bytes):
            yield

    @contextmanager
    def for_training(self, what: str, layout: AdapterLayout, num_more: int = 0) -> Iterator[None]:
        """Reserve memory while an adapter is made that is to be trained.

        Moments do not count where they may lie elsewhere (`moments_need_pages`).

        Args:
            what: Name of the job, for the message.
            layout: Its tensors.
            num_more: Tensors of each parameter's size beside the usual ones.

        Raises:
            AdapterTooLargeError: There is too little memory.
        """
        with self._taking(what, layout, self.training_bytes(layout, num_more)):
            yield

    def training_bytes(self, layout: AdapterLayout, num_more: int = 0) -> int:
        """Return the least memory with which an adapter is trained; see `for_training`."""
        # On a CPU there is no other memory for the moments to go to.
        num_copies = _TRAINING_COPIES + num_more - (_MOMENT_COPIES if self._host_is_apart else 0)
        held = self._held(layout)
        return held.parameters * (4 * num_copies + self._copy_bytes) + self._others_bytes(
            layout, held
        )

    def _others_bytes(self, layout: AdapterLayout, held: HeldElements) -> int:
        """Return the bytes that are not trained: derived tensors, and weights that an adapter
        brings.
        """
        return 4 * layout.num_derived + self._dtype_bytes * held.frozen

    def keep(self, job: str, num_bytes: int) -> None:
        """Reserve memory for a job whose moments lie in pages now, and may have to leave them."""
        with self._lock:
            self._kept[job] = num_bytes

    def let_go(self, job: str) -> None:
        """End what `keep` has reserved; no error if that is nothing."""
        with self._lock:
            self._kept.pop(job, None)

    def moments_need_pages(self, num_parameters: int, num_more: int = 0) -> bool:
        """Return whether there is no room beside the pool for the moments of an adapter that is
        there.
        """
        if not self._host_is_apart:
            return False
        with self._lock:
            free = self._free
        # Less one copy: the adapter is there already.
        return 4 * num_parameters * (_TRAINING_COPIES - 1 + num_more) > _SHARE * free

    @property
    def _free(self) -> int:
        available = available_bytes(self._device)
        if self._device.type == "cpu":
            # All ranks see the same memory of the machine.
            available //= self._group.size
        return self._group.agree_min(
            max(0, available - self._being_taken - sum(self._kept.values()))
        )

    @contextmanager
    def _taking(self, what: str, layout: AdapterLayout, num_bytes: int) -> Iterator[None]:
        with self._lock:
            free = self._free
            if num_bytes > _SHARE * free:
                (name, shape), there = layout.largest, int(_SHARE * free)
                raise AdapterTooLargeError(
                    f"{what} needs {_size(num_bytes)} of memory (its largest tensor is {name}, "
                    f"{list(shape)}); {_size(there)} are there for it, {num_bytes - there:,} "
                    "bytes are missing: lower its rank, train fewer layers, or start with less "
                    "--memory for the page pool"
                )
            # Until it is allocated, the system still reports it as free.
            self._being_taken += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._being_taken -= num_bytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
