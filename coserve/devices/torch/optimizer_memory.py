"""Where the moments of a job's optimizer lie: in a run of the page pool, beside the pool, or on the
host.
"""

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from coserve.devices.torch.out_of_memory import memory_errors
from coserve.errors import DeviceMemoryError
from coserve.memory.tensors.activations import part_of
from coserve.memory.tensors.host_pages import HostPages, shapes_of
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.tuning.optimizer import AdapterOptimizer


class OptimizerMemory:
    """Of one optimizer, which takes its moments as they come: they are moved, never computed with
    here.
    """

    def __init__(
        self, optimizer: AdapterOptimizer, device: torch.device, *, need_pages: bool = False
    ) -> None:
        """need_pages: they lie on the host while they have no pages
        (`TrainerOpened.moments_need_pages`).
        """
        self.need_pages = need_pages
        self._optimizer, self._device = optimizer, device
        self._run: tuple[int, int] | None = None
        self._away: tuple[HostPages, tuple[int, ...]] | None = None

    @property
    def is_away(self) -> bool:
        """Whether they are on the host."""
        return self._away is not None

    @property
    def num_bytes(self) -> int:
        """Of all moments, from the first step on."""
        return sum(4 * shape.numel() for shape in self._optimizer.moment_shapes().values())

    def place(self, pages: PagedKv, first_page: int, num_pages: int) -> None:
        """See `PlaceOptimizer`."""
        run = (first_page, num_pages) if num_pages else None
        if run == self._run and (run is None or self._optimizer.room is not None):
            return
        if self._run is not None:
            self._leave()
        if run is not None:
            self._enter(run, pages)

    # `_run` is set wherever they may lie in it, also if the caller is interrupted.

    def _leave(self) -> None:
        if not self.is_away:
            self._optimizer.replace_moments(self._beside(self._optimizer.moments))
        self._optimizer.room = self._run = None

    def _enter(self, run: tuple[int, int], pages: PagedKv) -> None:
        room, self._run = self._room(pages, run), run
        if not self.is_away:
            self._optimizer.replace_moments(_filled(room, self._optimizer.moments))
        self._optimizer.room = room

    def fetch(self) -> None:
        """The optimizer is to make a step: moments for which there was no memory must have some
        now.
        """
        moments = self._optimizer.moments
        if any(moment.device != self._device for moment in moments.values()):
            self._optimizer.replace_moments(
                {name: moment.to(self._device) for name, moment in moments.items()}
            )

    def put_away(self, host: HostPages, slots: tuple[int, ...]) -> None:
        """See `SwapOutTensors`; the run of pages is theirs no more."""
        if self.is_away:
            return
        moments = self._optimizer.moments
        host.store(list(moments.values()), slots)
        self._away = host, slots  # first: it says what is true, wherever the caller is interrupted
        self._optimizer.replace_moments(shapes_of(moments))
        self._optimizer.room = self._run = None

    def bring_back(self) -> None:
        """The inverse, to where they were placed meanwhile."""
        if self.is_away:
            moments, room = self.away(on_device=True), self._optimizer.room
            self._optimizer.replace_moments(moments if room is None else _filled(room, moments))
            self._away = None

    def away(self, *, on_device: bool) -> dict[str, Tensor]:
        """Copies of what lies on the host."""
        if self._away is None:
            return {}
        (host, slots), moments = self._away, self._optimizer.moments
        return dict(
            zip(moments, host.load(list(moments.values()), slots, on_device=on_device), strict=True)
        )

    def _room(self, pages: PagedKv, run: tuple[int, int]) -> dict[str, Tensor]:
        """Each right after the one before, and laid out as its parameter is, as fused AdamW needs
        them.
        """
        whole, start, room = pages.run(*run).view(torch.float32), 0, {}
        for name, shape in self._optimizer.moment_shapes().items():
            part = part_of(whole, (shape.numel(),), start)
            room[name] = part.as_strided(shape.shape, shape.stride(), part.storage_offset())
            start += shape.numel()
        assert start <= whole.shape[0], "more moments than pages for them"
        return room

    def _beside(self, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies beside the pool: on the device, or, where it has no memory for them, in the host's
        until `fetch`, or until they have pages.
        """
        if not self.need_pages:
            with suppress(DeviceMemoryError), memory_errors():
                return {name: moment.clone() for name, moment in moments.items()}
        return {name: moment.to("cpu", copy=True) for name, moment in moments.items()}


def _filled(room: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Such of it as there are values for: none before the first step."""
    return {name: room[name].copy_(value) for name, value in values.items()}
