"""The order of a job's training: which examples every optimizer step takes.

It is a pure function of the data, the configuration and the seed, so that a job can resume at any
step, and uses each example once per epoch.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Self

from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example, apart, bins_of, epoch_order
from coserve.tuning.objectives import SUPERVISED
from coserve.tuning.shard import Shard


class PackMembers(NamedTuple):
    """The examples of one pack, with its numbers, which every step needs, counted once."""

    examples: tuple[Example, ...]
    """The examples."""
    first_row: int
    """First row among all that the job ever trains on."""
    num_rows: int
    """Rows."""
    num_trained: int
    """Rows that have a target."""
    mean_context_len: float
    """Mean number of keys that a row attends to."""
    is_reference: bool = False
    """Whether it only scores the next pack, which has the same examples, without the adapter."""

    @classmethod
    def of(cls, examples: Sequence[Example], first_row: int) -> Self:
        lengths = [length for example in examples for length in example.lengths]
        num_rows, num_trained = sum(lengths), sum([example.num_trained for example in examples])
        mean_context_len = sum([length * (length + 1) / 2 for length in lengths]) / num_rows
        return cls(tuple(examples), first_row, num_rows, num_trained, mean_context_len)


def packs_of(
    examples: Sequence[Example], config: TuningConfig, *, first_row: int = 0
) -> list[PackMembers]:
    """Return the packs of some examples, one after the other; each after its reference, where the
    objective needs one.
    """
    packs = []
    for members in bins_of(packed_apart(examples, config), max_rows=config.pack_tokens):
        pack = PackMembers.of(members, first_row)
        if config.needs_reference:
            packs.append(pack._replace(is_reference=True))
        packs.append(pack)
        first_row += pack.num_rows
    return packs


def packed_apart(examples: Sequence[Example], config: TuningConfig) -> Sequence[Example]:
    """Return the examples that must be in one pack each; with the next-token loss, their
    sequences.
    """
    return apart(examples) if config.objective == SUPERVISED else examples


class TrainingOrder:
    """The optimizer steps of a job, each a batch of examples; an epoch's last batch may be
    smaller.
    """

    def __init__(
        self, examples: Sequence[Example], config: TuningConfig, shard: Shard | None = None
    ) -> None:
        """Set the data of a job.

        Args:
            shard: Restricts each batch to one node's part, which may have no examples: a part of
                the batch's packs, where the examples of a pack count together, so that they are on
                one node.
        """
        assert examples, "a job has examples"
        self.examples, self.config, self._shard = examples, config, shard
        self.steps_per_epoch = -(-len(examples) // config.batch_size)
        self.num_steps = self.steps_per_epoch * config.num_epochs
        self._order = lru_cache(maxsize=2)(self._epoch)

    def packs(self, step: int) -> list[PackMembers]:
        """Return the packs of an optimizer step (from 0)."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        order, rows_before = self._order(epoch)
        start = batch * self.config.batch_size
        end = min(start + self.config.batch_size, len(order))
        shard, by_pack = self._shard, self.config.counts_packs
        if shard is not None and not by_pack:
            start, end = shard.part(start, end)
        members = [self.examples[index] for index in order[start:end]]
        first_row = epoch * rows_before[-1] + rows_before[start]
        packs = packs_of(members, self.config, first_row=first_row)
        return packs if shard is None or not by_pack else _part(packs, shard)

    def _epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return the order of an epoch's examples, and the number of rows before each of them (and
        before the end).
        """
        config = self.config
        order = epoch_order(
            len(self.examples), seed=config.seed, epoch=epoch, shuffle=config.shuffle
        )
        lengths = (len(self.examples[index].tokens) for index in order)
        return order, list(accumulate(lengths, initial=0))


def _part(packs: Sequence[PackMembers], shard: Shard) -> list[PackMembers]:
    """Return a node's packs, each with its reference."""
    start, end = shard.part(0, sum(not pack.is_reference for pack in packs))
    numbers = accumulate(
        (not pack.is_reference for pack in packs), initial=0
    )  # of packs before each one
    return [pack for number, pack in zip(numbers, packs, strict=False) if start <= number < end]
