"""A window of device memory that the frozen weights of a model pass through, part by part.

HARLI section 4.3. The model stays in its files (`coserve.models.mapped_weights`). A pass through it
states which parts it will need, in what order; a thread copies the next ones into the window while
one computes, in place of those that will be needed last. The window may grow and shrink between any
two parts: what lies outside of it is dropped, and copied again when it is needed. It never holds
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

# Weights begin at multiples of as many bytes, as pages do.
_ALIGNMENT = 64
# Elements that are copied at once: for more, PyTorch would use the threads that compute.
_COPY_ELEMENTS = 32768


@dataclass(frozen=True, kw_only=True, eq=False)
class _Copy:
    """A part in the window, or on its way there."""

    bytes: range
    """Bytes of the window where the part lies."""
    weights: Mapping[str, Tensor | Weight]
    """The part's weights there, by name."""
    cancelled: Event = field(default_factory=Event)
    """Set to have the thread stop copying."""
    done: "Future[torch.cuda.Event | None]"
    """Result of the thread: on CUDA, an event at the copy's end."""


class WeightWindow(Mapping[Part, Mapping[str, Tensor | Weight]]):
    """Weights of a model by part: of a part in use those in the window, of all others those in the
    files.

    Not to be shared between threads.
    """

    def __init__(
        self,
        architecture: Architecture,
        mapped: MappedWeights,
        storage: Tensor,
        *,
        dtype: torch.dtype,
    ) -> None:
        """Begin with no bytes.

        Args:
            architecture: The model.
            mapped: Its weights in files.
            storage: Memory, uint8 [n], of which `resize` gives the window bytes.
            dtype: Dtype of the weights in the window.
        """
        self.num_bytes_copied = 0
        """Bytes that were copied into the window so far."""
        self.waited_s = 0.0
        """Seconds for which callers waited for parts so far."""
        self._mapped, self._storage, self._dtype = mapped, storage, dtype
        # Weights of linear layers, which kernels take as a `Weight`; others are plain tensors.
        self._linear = {
            (part, f"{node}.weight") for part, node in architecture.linear_sites.values()
        }
        self._is_cuda = storage.device.type == "cuda"
        # Few rows of a table of embeddings are looked up: on a CPU they are read from the file,
        # if that has them in the dtype.
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
        # One thread, so that parts are copied in the order in which they are needed.
        self._thread = ThreadPoolExecutor(1, "weights")
        self._staging: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        if self._is_cuda:
            self._stream = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]

    # -- questions ------------------------------------------------------------------

    @property
    def least_bytes(self) -> int:
        """Return the smallest window that lets the next part be prefetched while one is in use."""
        sizes = [self._sizes[part] for part in self._parts]
        return max([one + other for one, other in pairwise(sizes)], default=sizes[0])

    @property
    def all_bytes(self) -> int:
        """Return the smallest window in which all parts stay."""
        return sum([self._sizes[part] for part in self._parts])

    @property
    def parts_held(self) -> tuple[Part, ...]:
        """Return the parts that are in the window, or on their way."""
        return tuple(self._copies)

    def __getitem__(self, part: Part) -> Mapping[str, Tensor | Weight]:
        # Other parts may be in the window only in part; they are read from the files.
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
        """Set the bytes of the storage that the window may use; what lies outside is dropped on
        return.

        Returns:
            Seconds that dropping parts took; 0 if none lay there.
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
        """Begin to copy parts, as far as there is room beside those that are needed sooner.

        Args:
            order: Parts in the order in which they will be used.
            at_once: Whether the first one may also take the place of parts that are on their way.
        """
        turns: dict[Part, int] = {}
        for turn, part in enumerate(order):
            turns.setdefault(part, turn)
        for part, turn in turns.items():
            if part in self._parts and part not in self._copies:
                place = self._make_place(
                    self._sizes[part], turn, turns, at_once=at_once and not turn
                )
                # No room: what is needed even later must not be copied first.
                if place is None:
                    return
                self._copies[part] = self._begin(part, place)

    def wait(self, part: Part, most_s: float = inf) -> bool:
        """Wait until a part that was fetched is there, but no longer than `most_s`; return whether
        it is.

        Raises:
            WeightsError: The file of the part has changed.
        """
        copy = self._copies.get(part)
        if copy is None:
            # A part that is never copied, and read from its file: that must be unchanged.
            for weight in self._mapped[part].values():
                weight.file.check_is_whole()
            return part not in self._parts
        started_s = perf_counter()
        try:
            # First the thread's work, then on CUDA the copy that it has queued.
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
        """Wait for the first of these parts, whose weights are those in the window until `release`,
        and fetch the next ones.

        Args:
            order: Parts in the order in which they will be used.

        Raises:
            WeightsError: As `wait`.
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
        """End the use of the part in use."""
        part, self._in_use = self._in_use, None
        # Read from its file while in use: the pages of the mapping are dropped again.
        if part is not None and part not in self._parts:
            for weight in self._mapped[part].values():
                weight.drop()

    def close(self) -> None:
        """Drop all parts, and end the thread."""
        self._in_use = None
        self.resize(range(0))
        self._thread.shutdown()

    # -- places ---------------------------------------------------------------------

    def _make_place(
        self, size: int, turn: int, turns: Mapping[Part, int], *, at_once: bool
    ) -> range | None:
        """Return bytes for a part, the highest that there are, in place of parts that are needed
        later.

        As few parts as that takes are dropped, the one needed last first.

        Args:
            size: Bytes of the part.
            turn: When it is needed.
            turns: When each part is needed.
            at_once: Whether parts that are on their way may be dropped, too.
        """
        # Parts still on their way are given up only for a part that is needed at once.
        later = [
            part
            for part, copy in self._copies.items()
            if part != self._in_use
            and (at_once or copy.done.done())
            and turns.get(part, inf) > turn
        ]
        later.sort(key=lambda part: turns.get(part, inf), reverse=True)
        # Try with none of them gone, then with one more at a time.
        for number in range(len(later) + 1):
            gone = later[:number]
            place = self._free_place(
                size, [copy.bytes for part, copy in self._copies.items() if part not in gone]
            )
            if place is not None:
                for part in gone:
                    # Of those that were tried, only the ones that are in the way.
                    held = self._copies[part].bytes
                    if held.start < place.stop and place.start < held.stop:
                        self._forget(part)
                return place
        return None

    def _free_place(self, size: int, held_ranges: Sequence[range]) -> range | None:
        """Return the highest free bytes of the room beside those that are taken; None if there is
        no gap of this size.
        """
        stop = self._room.stop // _ALIGNMENT * _ALIGNMENT
        below = range(self._room.start, self._room.start)
        # From the top down: each gap ends where the part above it begins.
        for held in [*sorted(held_ranges, key=lambda each: each.start, reverse=True), below]:
            if stop - size >= held.stop:
                return range(stop - size, stop)
            stop = held.start
        return None

    def _forget(self, part: Part) -> None:
        """Drop a part; nothing is written to its bytes any more on return."""
        copy = self._copies.pop(part)
        copy.cancelled.set()
        # A copy that the thread has begun ends at its next piece; on CUDA what is queued still
        # runs, and later work of the device waits for it.
        if not copy.done.cancel():
            # An error of a copy that is no longer wanted has no one to report it to.
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
        if self._is_cuda:  # work that the device was given before may still read what was there
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
        """Copy tensors of the files to the window, in the thread."""
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
        # Made with the first copy, as large as the largest weight.
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
            # There is one staging buffer: the tensor before has left it then.
            self._stream.synchronize()
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
    """Copy a contiguous tensor to another one; stop between two pieces if cancelled."""
    pieces = (torch.split(tensor.view(-1), _COPY_ELEMENTS) for tensor in (source, target))
    for piece, to in zip(*pieces, strict=True):
        if cancelled.is_set():
            return
        to.copy_(piece)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
