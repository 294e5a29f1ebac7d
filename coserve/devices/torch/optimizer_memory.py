"""Place of an optimizer's moments: a run of the page pool, memory beside the pool, or the host."""

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from coserve.devices.torch.process_memory import memory_errors
from coserve.errors import DeviceMemoryError
from coserve.memory.tensors.activations import part_of
from coserve.memory.tensors.host_pages import HostPages, shapes_of
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.tuning.optimizer import AdapterOptimizer


class OptimizerMemory:
    """Moments of one optimizer, which are moved, and never computed with, here."""

    def __init__(
        self, optimizer: AdapterOptimizer, device: torch.device, *, need_pages: bool = False
    ) -> None:
        """Begin with moments that come with the optimizer's first step.

        Args:
            optimizer: The optimizer.
            device: Device that it runs on.
            need_pages: Whether moments lie on the host while they have no pages
                (`TrainerOpened.moments_need_pages`).
        """
        self.need_pages = need_pages
        self._optimizer, self._device = optimizer, device
        self._run: tuple[int, int] | None = None
        self._away: tuple[HostPages, tuple[int, ...]] | None = None

    @property
    def is_away(self) -> bool:
        """Return whether the moments are on the host."""
        return self._away is not None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all moments, from the first step on."""
        return sum(4 * shape.numel() for shape in self._optimizer.moment_shapes().values())

    def place(self, pages: PagedKv, first_page: int, num_pages: int) -> None:
        """Carry out `PlaceOptimizer`."""
        run = (first_page, num_pages) if num_pages else None
        # Nothing to do, unless an earlier attempt was interrupted before the room was set.
        if run == self._run and (run is None or self._optimizer.room is not None):
            return
        # Out first: the new run may overlap the old one.
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
        """Bring moments for which there was no memory to the device, for an optimizer step."""
        moments = self._optimizer.moments
        if any(moment.device != self._device for moment in moments.values()):
            self._optimizer.replace_moments(
                {name: moment.to(self._device) for name, moment in moments.items()}
            )

    def put_away(self, host: HostPages, slots: tuple[int, ...]) -> None:
        """Carry out `SwapOutTensors`; the run of pages is free then."""
        if self.is_away:
            return
        moments = self._optimizer.moments
        host.store(list(moments.values()), slots)
        self._away = host, slots  # first: it says what is true, wherever the caller is interrupted
        self._optimizer.replace_moments(shapes_of(moments))
        self._optimizer.room = self._run = None

    def bring_back(self) -> None:
        """Copy the moments from the host to where they were placed meanwhile."""
        if self.is_away:
            moments, room = self.away(on_device=True), self._optimizer.room
            self._optimizer.replace_moments(moments if room is None else _filled(room, moments))
            self._away = None

    def away(self, *, on_device: bool) -> dict[str, Tensor]:
        """Return copies of the moments that lie on the host."""
        if self._away is None:
            return {}
        (host, slots), moments = self._away, self._optimizer.moments
        return dict(
            zip(moments, host.load(list(moments.values()), slots, on_device=on_device), strict=True)
        )

    def _room(self, pages: PagedKv, run: tuple[int, int]) -> dict[str, Tensor]:
        """Return room in a run of pages for each moment, laid out as its parameter is, as fused
        AdamW needs it.
        """
        whole, start, room = pages.run(*run).view(torch.float32), 0, {}
        for name, shape in self._optimizer.moment_shapes().items():
            part = part_of(whole, (shape.numel(),), start)
            # With the parameter's strides: elements correspond by their place in memory.
            room[name] = part.as_strided(shape.shape, shape.stride(), part.storage_offset())
            start += shape.numel()
        assert start <= whole.shape[0], "more moments than pages for them"
        return room

    def _beside(self, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies beside the pool: on the device, or, if it has no memory for them, on the
        host until `fetch` or until they have pages.
        """
        if not self.need_pages:
            with suppress(DeviceMemoryError), memory_errors():
                return {name: moment.clone() for name, moment in moments.items()}
        return {name: moment.to("cpu", copy=True) for name, moment in moments.items()}


def _filled(room: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Fill the room for which there are values (none before the first step), and return that."""
    return {name: room[name].copy_(value) for name, value in values.items()}
