"""A window of device memory that the frozen weights of a model pass through, part by part.

HARLI section 4.3. The model stays in its files (`coserve.models.mapped_weights`). A pass through it
says which parts it will need, in what order; a thread copies the next ones into the window while
one computes, in place of those that will be needed last. The window may grow and shrink between any
two parts: what lies outside of it is forgotten, and comes again when it is needed. It never holds
more than its bytes.

On a CPU a part is copied from the mapped files, whose pages are dropped after that. On CUDA it goes
through pinned host memory, on a stream of its own: the copy begins when the device has done all
that it was given before, and the device waits for it before it uses the part.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, prod
from threading import Event
from time import perf_counter

import torch
from torch import Tensor

from coserve.kernels.weights import DenseWeight, Weight
from coserve.models.base import Architecture, Part
from coserve.models.mapped_weights import MappedTensor, MappedWeights

_ALIGNMENT = 64
# Elements that are copied at once: more, and PyTorch would take the threads that compute.
_COPY_ELEMENTS = 32768


@dataclass(frozen=True, kw_only=True, eq=False)
class _Copy:
    """A part in the window, or on its way there. bytes: where it lies. done: gives, on CUDA, the
    copy's end.
    """

    bytes: range
    weights: Mapping[str, Tensor | Weight]
    cancelled: Event = field(default_factory=Event)
    done: "Future[torch.cuda.Event | None]"


class WeightWindow(Mapping[Part, Mapping[str, Tensor | Weight]]):
    """A model's weights by part: those of `use`d parts in the window, of all others as they are in
    the files.

    num_bytes_copied: into the window so far. waited_s: for which callers waited for parts. Not to
    be shared between threads.
    """

    def __init__(
        self,
        architecture: Architecture,
        mapped: MappedWeights,
        storage: Tensor,
        *,
        dtype: torch.dtype,
    ) -> None:
        """storage: uint8 [n], the memory of which the window is given bytes. dtype: of the weights
        in it.
        """
        self.num_bytes_copied, self.waited_s = 0, 0.0
        self._mapped, self._storage, self._dtype = mapped, storage, dtype
        self._linear = {
            (part, f"{node}.weight") for part, node in architecture.linear_sites.values()
        }
        self._is_cuda = storage.device.type == "cuda"
        # Of a table few rows are looked up: on a CPU they are read where they lie.
        table = {weight.tensor.dtype for weight in mapped["embed"].values()}
        self._parts = tuple(
            part for part in mapped if part != "embed" or self._is_cuda or table != {dtype}
        )
        self._sizes = {
            part: sum(_aligned(self._num_bytes(weight)) for weight in mapped[part].values())
            for part in mapped
        }
        self._room = range(0)
        self._copies: dict[Part, _Copy] = {}
        self._in_use: Part | None = None
        self._thread = ThreadPoolExecutor(1, "weights")
        self._staging: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        if self._is_cuda:
            self._stream = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]

    # -- questions ------------------------------------------------------------------

    @property
    def least_bytes(self) -> int:
        """With which a part can come while the one before it computes, in any order of
        neighbours.
        """
        sizes = [self._sizes[part] for part in self._parts]
        return max([one + other for one, other in pairwise(sizes)], default=sizes[0])

    @property
    def all_bytes(self) -> int:
        """With which each part comes once."""
        return sum([self._sizes[part] for part in self._parts])

    @property
    def parts_held(self) -> tuple[Part, ...]:
        """That are in the window, or on their way."""
        return tuple(self._copies)

    def __getitem__(self, part: Part) -> Mapping[str, Tensor | Weight]:
        if part == self._in_use and part in self._copies:
            return self._copies[part].weights
        return {
            name: self._as_read(part, name, weight.tensor)
            for name, weight in self._mapped[part].items()
        }

    def __iter__(self) -> Iterator[Part]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self._mapped)

    # -- verbs ----------------------------------------------------------------------

    def resize(self, room: range) -> float:
        """The bytes of the storage that it may use from now on; what lies outside is forgotten when
        this returns. Returns the seconds that took: 0 if nothing lay there.
        """
        assert self._in_use is None and 0 <= room.start <= room.stop <= len(self._storage)
        self._room = room
        gone = [
            part
            for part, copy in self._copies.items()
            if copy.bytes.start < room.start or copy.bytes.stop > room.stop
        ]
        started_s = perf_counter()
        for part in gone:
            self._forget(part)
        return perf_counter() - started_s if gone else 0.0

    def fetch(self, order: Sequence[Part], *, at_once: bool = False) -> None:
        """Begin to bring parts, in the order in which they will be used, as far as there is room
        for them beside those that are needed sooner; at_once: for the first one, also in place of
        parts that are on their way.
        """
        turns: dict[Part, int] = {}
        for turn, part in enumerate(order):
            turns.setdefault(part, turn)
        for part, turn in turns.items():
            if part in self._parts and part not in self._copies:
                place = self._make_place(
                    self._sizes[part], turn, turns, at_once=at_once and not turn
                )
                if place is None:
                    return
                self._copies[part] = self._begin(part, place)

    def wait(self, part: Part, most_s: float = inf) -> bool:
        """Wait until a part that was fetched is there, but no longer than that; returns whether it
        is.

        WeightsError: its file is not what it was.
        """
        copy = self._copies.get(part)
        if copy is None:
            for weight in self._mapped[part].values():
                weight.file.check_is_whole()
            return part not in self._parts
        started_s = perf_counter()
        try:
            event = copy.done.result(None if most_s == inf else max(0.0, most_s))
            if event is not None and most_s > 0:
                event.synchronize()
            return _is_over(event)
        except TimeoutError:
            return False
        except Exception:  # the next one who wants it may try again
            del self._copies[part]
            raise
        finally:
            self.waited_s += perf_counter() - started_s

    def use(self, order: Sequence[Part]) -> None:
        """Until `release`, the first part's weights are those in the window: waits for it. Then the
        next ones are fetched.

        order: in which parts will be used. WeightsError as `wait`.
        """
        assert self._in_use is None, "one part at a time"
        part = order[0]
        self.fetch(order, at_once=True)
        if not self.wait(part):
            raise AssertionError(f"a window of {len(self._room)} bytes has no room for part {part}")
        self._in_use = part
        copy = self._copies.get(part)
        if copy is not None and (event := copy.done.result()) is not None:
            torch.cuda.current_stream(self._storage.device).wait_event(event)
        self.fetch(order)

    def release(self) -> None:
        """The part that is used has been used."""
        part, self._in_use = self._in_use, None
        if part is not None and part not in self._parts:
            for weight in self._mapped[part].values():
                weight.drop()

    def close(self) -> None:
        """Forget everything, and end the thread."""
        self._in_use = None
        self.resize(range(0))
        self._thread.shutdown()

    # -- places ---------------------------------------------------------------------

    def _make_place(
        self, size: int, turn: int, turns: Mapping[Part, int], *, at_once: bool
    ) -> range | None:
        """Free bytes for a part that is needed at this turn, the highest that there are, in place
        of parts that are needed later: of as few as that takes, the last one first. at_once: also
        of those that are on their way.
        """
        later = [
            part
            for part, copy in self._copies.items()
            if part != self._in_use
            and (at_once or copy.done.done())
            and turns.get(part, inf) > turn
        ]
        later.sort(key=lambda part: turns.get(part, inf), reverse=True)
        for number in range(len(later) + 1):
            gone = later[:number]
            place = self._free_place(
                size, [copy.bytes for part, copy in self._copies.items() if part not in gone]
            )
            if place is not None:
                for part in gone:
                    held = self._copies[part].bytes
                    if held.start < place.stop and place.start < held.stop:
                        self._forget(part)
                return place
        return None

    def _free_place(self, size: int, taken: Sequence[range]) -> range | None:
        stop = self._room.stop // _ALIGNMENT * _ALIGNMENT
        for held in [
            *sorted(taken, key=lambda held: held.start, reverse=True),
            range(self._room.start, self._room.start),
        ]:
            if stop - size >= held.stop:
                return range(stop - size, stop)
            stop = held.start
        return None

    def _forget(self, part: Part) -> None:
        """Nothing is written to its bytes any more when this returns."""
        copy = self._copies.pop(part)
        copy.cancelled.set()
        if not copy.done.cancel():
            with suppress(Exception):
                event = copy.done.result()
                if event is not None:
                    torch.cuda.current_stream(self._storage.device).wait_event(event)

    # -- copies ---------------------------------------------------------------------

    def _begin(self, part: Part, place: range) -> _Copy:
        """Have the thread copy a part to its place."""
        start, moves, weights = place.start, [], {}
        for name, weight in self._mapped[part].items():
            num_bytes = self._num_bytes(weight)
            target = (
                self._storage[start : start + num_bytes].view(self._dtype).view(weight.tensor.shape)
            )
            moves.append((weight, target))
            weights[name] = self._as_read(part, name, target)
            start += _aligned(num_bytes)
        free: torch.cuda.Event | None = None
        if self._is_cuda:  # whatever the device was given before may read what was there
            free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            free.record(torch.cuda.current_stream(self._storage.device))
        cancelled = Event()
        done = self._thread.submit(self._copy, moves, free, cancelled)
        self.num_bytes_copied += len(place)
        return _Copy(bytes=place, weights=weights, cancelled=cancelled, done=done)

    @torch.inference_mode()
    def _copy(
        self,
        moves: Sequence[tuple[MappedTensor, Tensor]],
        free: "torch.cuda.Event | None",
        cancelled: Event,
    ) -> "torch.cuda.Event | None":
        """In the thread: read tensors of the files, and write them to the window."""
        for source, _ in moves:
            source.file.check_is_whole()
            source.expect()
        if self._stream is not None:
            return self._copy_pinned(moves, free, cancelled)
        for source, target in moves:
            _copy_in_pieces(source.tensor, target, cancelled)
            source.drop()
        return None

    def _copy_pinned(
        self,
        moves: Sequence[tuple[MappedTensor, Tensor]],
        free: "torch.cuda.Event | None",
        cancelled: Event,
    ) -> "torch.cuda.Event":
        assert self._stream is not None and free is not None
        if self._staging is None:
            largest = max(
                self._num_bytes(weight)
                for part in self._parts
                for weight in self._mapped[part].values()
            )
            self._staging = torch.empty(largest, dtype=torch.uint8, pin_memory=True)
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_event(free)
        for source, target in moves:
            staged = self._staging[: target.nbytes].view(target.dtype).view(target.shape)
            self._stream.synchronize()  # the last piece has left it
            _copy_in_pieces(source.tensor, staged, cancelled)
            source.drop()
            with torch.cuda.stream(self._stream):
                target.copy_(staged, non_blocking=True)
        ended.record(self._stream)
        return ended

    def _as_read(self, part: Part, name: str, tensor: Tensor) -> Tensor | Weight:
        return DenseWeight(tensor) if (part, name) in self._linear else tensor

    def _num_bytes(self, weight: MappedTensor) -> int:
        return prod(weight.tensor.shape) * self._dtype.itemsize


def _is_over(event: "torch.cuda.Event | None") -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]


def _copy_in_pieces(source: Tensor, target: Tensor, cancelled: Event) -> None:
    """Contiguous tensors of one shape; stops between two pieces if it is cancelled."""
    pieces = (torch.split(tensor.view(-1), _COPY_ELEMENTS) for tensor in (source, target))
    for piece, to in zip(*pieces, strict=True):
        if cancelled.is_set():
            return
        to.copy_(piece)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
