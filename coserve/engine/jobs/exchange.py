"""Where a job that is divided among nodes stands in its exchange with the others; see `coserve.tuning.shard`."""

from coserve.engine.jobs.checkpoint import Checkpoint, TakenCopy
from coserve.tuning.shard import Combination, Shard


class Exchange:
    """Bookkeeping of one node's part. is_waiting: it has contributed, and what to combine has not been taken in yet.
    combination: has come. common: a copy of the job when nodes last met, where each goes its own way between.
    num_trained: trained rows of the gradients that were combined; None: they were not yet.
    """

    def __init__(self, shard: Shard, num_steps: int) -> None:
        """num_steps: of the whole job."""
        self.shard, self._num_steps = shard, num_steps
        self.is_waiting = False
        self.combination: Combination | None = None
        self.common: Checkpoint | None = None
        self.num_trained: int | None = None
        self.num_taken_in = 0
        """Contributions that the device has taken in since the job was opened."""
        self._num_before = 0  # of these, those of earlier combinations
        self.taking: TakenCopy | None = None
        """The copy of what this node contributes, until the combination comes, for all who ask for it."""
        self._step = 0

    def begin(self, step: int) -> None:
        """A contribution is made."""
        self.taking = None
        self._step, self.is_waiting = step, True

    def arrive(self, combination: Combination) -> None:
        """What nodes have contributed is to be taken in, this node's among it; again, if a caller was interrupted."""
        if self.combination is None:
            self.taking, self._num_before = None, self.num_taken_in
        self.combination = combination

    @property
    def num_combined(self) -> int:
        """Contributions of the combination that the device has taken in."""
        return self.num_taken_in - self._num_before

    def end(self, combination: Combination) -> None:
        """All of it has been taken in."""
        self.is_waiting, self.combination = False, None
        if self.shard.gives_gradients:
            self.num_trained = combination.num_trained

    def finish_update(self, step: int) -> bool:
        """An optimizer step has been made. Returns whether a contribution is due after it."""
        self.num_trained = None
        return not self.shard.gives_gradients and self.shard.contributes_after(step, self._num_steps)

    def holds_what_all_hold(self, step: int) -> bool:
        """Whether all nodes have the same after this many steps."""
        return self.shard.gives_gradients or (
            self.shard.contributes_after(step, self._num_steps) and self.shard.meets_after(step, self._num_steps)
        )

    @property
    def meets(self) -> bool:
        """Whether the contribution waits for those of all others."""
        return self.shard.meets_after(self._step, self._num_steps)
