"""Verdicts: the ranks of a group end what they did together alike, whatever happened on one of
them.

A rank that fails calls `RankGroup.fail`, so that no other rank waits for it. At the end of every
step all ranks call `agree_on_end`. Where one has failed, all clear the failure together and learn
which it was, so that they continue, or raise, as one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Self
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from coserve.errors import DeviceMemoryError, RankError, RankGoneError
from coserve.kernels.groups.base import RankGroup

# What of a message crosses, and the bytes of everything that does.
_MAX_CHARACTERS, _MAX_BYTES = 500, 4096
# Of the failures of several ranks the first of these is told: one that was stopped by another is
# nobody's fault.
_KINDS = ("error", "memory", "stopped")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of a rank."""

    rank: int
    """Number of the rank."""
    kind: Literal["error", "memory", "stopped"]
    """An error; running out of memory; or a collective that ended since another rank had failed."""
    message: str
    """One line."""
    broken_update: str | None = None
    """See `StepFailure`."""

    @classmethod
    def of(cls, error: Exception, rank: int, *, broken_update: str | None = None) -> Self:
        """Return the failure that an exception of a rank stands for.

        Raises:
            RankGoneError: That was the exception: no rank can learn anything from another one any
                more.
        """
        if isinstance(error, RankGoneError):
            raise error
        message = one_line(error)
        if isinstance(error, RankError):
            kind: Literal["error", "memory", "stopped"] = "stopped"
        elif isinstance(error, DeviceMemoryError):
            kind = "memory"
        else:
            kind, message = "error", f"{type(error).__name__}: {message}"
        return cls(rank=rank, kind=kind, message=message, broken_update=broken_update)

    @property
    def text(self) -> str:
        """Return the message, with the rank."""
        return self.message if self.kind == "stopped" else f"{self.message} (on rank {self.rank})"

    def error(self, rank: int, own: Exception | None) -> Exception:
        """Return what a rank raises: its own error where that is the failure."""
        return own if own is not None and rank == self.rank else RankError(self.text)


def agree_on_end(group: RankGroup, own: Failure | None) -> Failure | None:
    """Return the failure of any rank: the same on all ranks; None if no rank has failed.

    Every rank calls this once at the end of what ranks do together; one that has failed has called
    `RankGroup.fail` before, as soon as it had. No rank can pass while another one has failed, and a
    rank that has passed has nothing left that could fail.

    Args:
        group: This rank's end of the group.
        own: Failure of this rank.

    Raises:
        RankGoneError: A rank has ended or does not come.
    """
    if own is None:
        try:
            # Raises on this rank, too, once any other rank has called `fail`.
            group.barrier()
        except RankError as error:
            own = Failure.of(error, group.rank)
        else:
            return None
    # Failed ranks meet here; only after that can collectives carry the failures.
    group.reset()
    failures = [_decoded(row) for row in group.all_gather(_encoded(own), "failures")]
    # The same choice on all ranks, from the same list.
    first = min(failures, key=lambda each: (_KINDS.index(each.kind), each.rank))
    broken = [each.broken_update for each in failures if each.broken_update is not None]
    return msgspec.structs.replace(first, broken_update=broken[0] if broken else None)


def fail_on_all(group: RankGroup, error: Exception) -> None:
    """Fail a step on all ranks that this one cannot begin: the others are in it, and call
    `agree_on_end`.
    """
    group.fail(one_line(error))
    # An error even if memory was missing: this rank has no step that could have a failed result.
    agree_on_end(group, msgspec.structs.replace(Failure.of(error, group.rank), kind="error"))


@contextmanager
def last_word(group: RankGroup) -> Iterator[None]:
    """Run what follows after all ranks have agreed on success, and must not fail on one of them any
    more.

    Raises:
        RankGoneError: It did fail: other ranks have a result, so that the group is over.
    """
    try:
        yield
    except Exception as error:
        if group.size == 1:
            raise
        raise RankGoneError(
            f"rank {group.rank} failed after all ranks had ended: {one_line(error)}"
        ) from error


def one_line(reason: object) -> str:
    """Return an error's message as one line that is not too long."""
    return " ".join(str(reason).split())[:_MAX_CHARACTERS]


def check_alike(group: RankGroup, what: object, name: str) -> None:
    """Check that all ranks have the same, with COSERVE_RANK_CHECK=1; else do nothing.

    Args:
        group: This rank's end of the group.
        what: Anything that msgspec encodes.
        name: Name of it, for the message.

    Raises:
        RankError: One of the ranks has something else; on all ranks.
    """
    if group.size == 1 or os.environ.get("COSERVE_RANK_CHECK") != "1":
        return
    digest = torch.tensor([crc32(msgspec.msgpack.encode(what))])
    digests = group.all_gather(digest, f"digest of {name}").view(-1).tolist()
    if len(set(digests)) > 1:
        raise RankError(f"ranks have different {name}: digests {digests}")


def _encoded(failure: Failure) -> Tensor:
    """Return a failure as uint8 [_MAX_BYTES]: its length, and its bytes."""
    # Of one length for all ranks, since a gather takes tensors of the same shape.
    data = msgspec.msgpack.encode(failure)
    assert len(data) <= _MAX_BYTES - 2, "a message has an end"
    return torch.frombuffer(
        bytearray(len(data).to_bytes(2, "big") + data).ljust(_MAX_BYTES, b"\0"), dtype=torch.uint8
    )


def _decoded(row: Tensor) -> Failure:
    data = bytes(row.tolist())
    return msgspec.msgpack.decode(data[2 : 2 + int.from_bytes(data[:2], "big")], type=Failure)
