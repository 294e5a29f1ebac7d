"""The layout of the memory that ranks of one machine share. `cpu/common/collectives.cpp` has the
same.

    page 0              what the arena is, and whether the group has failed or is over
    pages 1 to size     one for each rank, which that rank alone writes
    then                two buffers for each rank

Python writes integers of 8 bytes at aligned addresses here, which a processor of 64 bits stores at
once.
"""

import ctypes
import mmap
import os
from threading import Lock
from typing import Any

PAGE_BYTES = 4096
MAX_RANKS = 64
_MAGIC = 0x636F7365727665
_TEXT_BYTES = 256
_BUFFER_BYTES = 4 << 20


class ArenaHeader(ctypes.Structure):
    """First page of an arena."""

    _fields_ = (
        ("magic", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("buffer_bytes", ctypes.c_int64),
        # Process that created the arena.
        ("parent", ctypes.c_int64),
        ("unused", ctypes.c_int64 * 4),
        # generation * 2^16 + the rank that failed in it
        ("failed", ctypes.c_int64),
        # Not 0 if the group is over, for the reason below.
        ("ended", ctypes.c_int64),
        ("reason", ctypes.c_char * _TEXT_BYTES),
    )


class RankPage(ctypes.Structure):
    """A rank's page. Fields from `process` on are used by Python alone."""

    _fields_ = (
        # The last one that the rank has published, modulo 2^32.
        ("epoch", ctypes.c_uint32),
        ("num_sleepers", ctypes.c_uint32),
        # The collective that the rank is at, by parity of the epoch.
        ("words", ctypes.c_int64 * 2),
        # The rank's number for `agree`, by parity of the epoch.
        ("numbers", ctypes.c_int64 * 2),
        # Time that the rank has waited for others in collectives, all in all.
        ("waited_ns", ctypes.c_int64),
        ("process", ctypes.c_int64),
        # 1: the compiled collectives, 2: the plain ones.
        ("implementation", ctypes.c_int64),
        # Number of resets at which the rank has arrived; joining the group is the first.
        ("num_resets", ctypes.c_int64),
        # The rank's epoch when it arrived, by parity of the reset.
        ("reset_epochs", ctypes.c_int64 * 2),
        # Why the rank failed.
        ("reason", ctypes.c_char * _TEXT_BYTES),
        # The collective that the rank is at, in words, by parity of the epoch; for the debug check.
        ("labels", ctypes.c_char * _TEXT_BYTES * 2),
    )


class RankArena:
    """The shared memory of a group. It is a file without a name: nothing is left once its processes
    have ended.
    """

    def __init__(self, fd: int) -> None:
        """Map an arena; `create` makes one.

        Args:
            fd: of the file. The arena owns it.

        Raises:
            ValueError: the file is not an arena.
        """
        self.fd = fd
        """Descriptor of the file, which the ranks' processes must inherit or be sent."""
        if os.fstat(fd).st_size < PAGE_BYTES:
            raise ValueError(f"file descriptor {fd} is not an arena of ranks")
        self.memory = mmap.mmap(fd, 0)
        self.header = ArenaHeader.from_buffer(self.memory)
        if self.header.magic != _MAGIC:
            raise ValueError(f"file descriptor {fd} is not an arena of ranks")
        self.size: int = self.header.size
        """Number of ranks."""
        self.buffer_bytes: int = self.header.buffer_bytes
        """Size of each buffer. Tensors that are larger are moved in pieces."""
        self.pages = [
            RankPage.from_buffer(self.memory, PAGE_BYTES * (1 + rank)) for rank in range(self.size)
        ]

    @classmethod
    def create(cls, size: int, buffer_bytes: int = _BUFFER_BYTES) -> "RankArena":
        """Make the arena of a group of `size` ranks, in the process that starts them."""
        assert 1 <= size <= MAX_RANKS and buffer_bytes > 0 and buffer_bytes % 64 == 0
        # A file of zeros: all fields but the header's start at 0.
        fd = os.memfd_create("coserve-ranks")
        os.ftruncate(fd, PAGE_BYTES * (1 + size) + 2 * size * buffer_bytes)
        with mmap.mmap(fd, PAGE_BYTES) as first:
            header = ArenaHeader(
                magic=_MAGIC, size=size, buffer_bytes=buffer_bytes, parent=os.getpid()
            )
            first[: ctypes.sizeof(ArenaHeader)] = bytes(header)
        return cls(fd)

    @property
    def address(self) -> int:
        """Return the address at which this process has mapped the arena."""
        return ctypes.addressof(self.header)

    def buffer(self, rank: int, epoch: int) -> memoryview:
        """Return the buffer that a rank writes in an epoch."""
        # Two buffers in turn: a rank may write for the next collective while others still read this
        # one's, and comes back to a buffer only after a meeting that all reach when they have read.
        start = PAGE_BYTES * (1 + self.size) + (2 * rank + (epoch & 1)) * self.buffer_bytes
        return memoryview(self.memory)[start : start + self.buffer_bytes]

    def fail(self, rank: int, generation: int, reason: str) -> None:
        """Make all collectives fail until the next reset; the first failure of a generation
        counts.
        """
        # The text first, then the number that makes it valid. If two ranks fail at once, either may
        # win.
        if self.header.failed >> 16 < generation:
            self.pages[rank].reason = as_text(reason)
            fence()
            self.header.failed = generation << 16 | rank

    def end(self, reason: str) -> None:
        """Make all collectives fail from now on: a rank's process has ended, or the ranks are to
        end.
        """
        if not self.header.ended:
            self.header.reason = as_text(reason)
            fence()
            self.header.ended = 1

    def close(self) -> None:
        """Close the file; the memory goes with the last reference to what lies in it."""
        os.close(self.fd)


class ArenaRankState(ctypes.Structure):
    """A rank's own state, in its own memory; the compiled collectives read and write it (`Rank`
    there).
    """

    _fields_ = (
        ("arena", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("buffer_bytes", ctypes.c_int64),
        # The last one that was published, not wrapped.
        ("epoch", ctypes.c_int64),
        # Number of resets; failures of earlier generations do not count.
        ("generation", ctypes.c_int64),
        # A `CollectiveOutcome`. Unless it is COMPLETE, collectives return at once.
        ("outcome", ctypes.c_int64),
        # Rank that is gone, late or at another collective; `size` for the parent.
        ("detail", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        # Address of the process and its pidfd (or -1), two integers each: of the ranks, and of the
        # parent.
        ("processes", ctypes.c_int64),
    )


_fences = Lock()


def fence() -> None:
    """Order what this process writes and reads before with what it writes and reads afterwards, for
    other processes.

    Python has no fence. A lock's release is not overtaken by what was before it, nor its
    acquisition by what comes after; two rounds, so that a release comes before an acquisition.
    """
    with _fences:
        pass
    with _fences:
        pass


def as_text(line: str) -> bytes:
    """Return a line as a field of the arena has it, shortened to its size."""
    return " ".join(line.split()).encode()[: _TEXT_BYTES - 1]


def from_text(field: Any) -> str:
    """Return the line that is in a field."""
    return bytes(field).decode(errors="replace")
