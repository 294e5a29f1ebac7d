"""Ranks as threads of one process, for tests: no process has to start and nothing is compiled."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, TypeVar

import torch
from torch import Tensor

from coserve.errors import RankError, RankGoneError
from coserve.kernels.groups.base import RankGroup, describe, sum_in_rank_order

T = TypeVar("T")
_TIMEOUT_S = 60.0


class ThreadGroup(RankGroup):
    """A rank that is a thread. Every collective compares the labels of all ranks."""

    def __init__(self, meeting: "_Meeting", rank: int) -> None:
        super().__init__(rank=rank, size=meeting.size)
        self._meeting = meeting

    def fail(self, reason: str) -> None:
        self._meeting.fail(f"rank {self.rank} failed: {reason}")

    def reset(self) -> None:
        self._meeting.reset(self.rank)

    def _sum(self, x: Tensor, y: Tensor, name: str) -> None:
        # A copy, since other ranks read it while this one overwrites its own.
        y.copy_(
            sum_in_rank_order(
                self._meeting.exchange(self.rank, describe("sum", name, x), x.clone())
            )
        )

    def _all_gather(self, x: Tensor, name: str) -> Tensor:
        return torch.stack(
            self._meeting.exchange(self.rank, describe("gather", name, x), x.clone())
        )

    def _agree(self, number: int) -> int:
        found: int = self._meeting.exchange(self.rank, "agree", number)[0]
        return found


class _Meeting:
    """A meeting point where the ranks of a group exchange objects, all ranks' at once."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._failure = ""
        # Labels and objects that ranks have brought to the collective under way, by rank.
        self._brought = dict[int, tuple[str, Any]]()
        # The objects of the last complete collective, in rank order; the next one cannot complete
        # before all ranks have read them.
        self._exchanged = list[Any]()
        self._num_complete = 0
        self._resetting = set[int]()
        self._num_resets = 0

    def fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def exchange(self, rank: int, label: str, brought: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, once all have brought theirs."""
        with self._changed:
            self._raise_failure()
            self._brought[rank] = (label, brought)
            num_complete = self._num_complete
            if len(self._brought) == self.size:
                self._complete()
            else:
                # A number and not a flag: by the time this rank wakes, the next collective may have
                # begun.
                self._wait(lambda: bool(self._failure) or self._num_complete > num_complete)
            # A collective to which all have come is complete, also for a rank that learns of it
            # only after another one has failed in what follows.
            if self._num_complete == num_complete:
                self._raise_failure()
            return self._exchanged

    def reset(self, rank: int) -> None:
        with self._changed:
            self._resetting.add(rank)
            if len(self._resetting) == self.size:
                self._failure = ""
                self._brought.clear()
                self._resetting.clear()
                self._num_resets += 1
                self._changed.notify_all()
                return
            num_resets = self._num_resets
            self._wait(lambda: self._num_resets > num_resets)

    def _complete(self) -> None:
        labels = {rank: label for rank, (label, _) in sorted(self._brought.items())}
        if len(set(labels.values())) > 1:
            self._failure = f"ranks are at different collectives: {labels}"
            self._changed.notify_all()
            return
        self._exchanged = [self._brought[rank][1] for rank in range(self.size)]
        self._brought.clear()
        self._num_complete += 1
        self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        if not self._changed.wait_for(until, self._timeout_s):
            self._failure = self._failure or f"a rank did not come within {self._timeout_s:g} s"
            self._changed.notify_all()
            raise RankGoneError(self._failure)

    def _raise_failure(self) -> None:
        if self._failure:
            raise RankError(self._failure)


def thread_groups(size: int, timeout_s: float = _TIMEOUT_S) -> list[ThreadGroup]:
    """Return a group's ranks, each to be used by a thread of its own.

    Args:
        size: number of ranks.
        timeout_s: longest time that a rank waits for the others before `RankGoneError`.
    """
    meeting = _Meeting(size, timeout_s)
    return [ThreadGroup(meeting, rank) for rank in range(size)]


def run_ranks(size: int, run: Callable[[RankGroup], T], timeout_s: float = _TIMEOUT_S) -> list[T]:
    """Call a function on every rank of a group of threads, and return their results in rank order.

    An exception on one rank ends the collectives of the others. It is the one that is raised here,
    rather than the `RankError` of those others.
    """
    groups = thread_groups(size, timeout_s)
    # Threads begin with PyTorch's defaults, not with the caller's.
    records_gradients, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run_rank(group: ThreadGroup) -> T:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(records_gradients):
            try:
                return run(group)
            except BaseException as error:
                group.fail(f"{type(error).__name__}: {error}")
                raise

    with ThreadPoolExecutor(size) as pool:
        tasks = [pool.submit(run_rank, group) for group in groups]
        errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, RankError)):
        raise error
    return [task.result() for task in tasks]
