"""Data parallelism: a job divided among nodes, each of which trains on its part of every batch.

Nodes exchange contributions, and combine them, by one of three strategies:

- synchronous: the gradients of each optimizer step are added up before it is made, so that all
  nodes make the step that one node would make with the whole batch.
- local-sgd (arXiv 1805.09767): each node makes optimizer steps of its own; after some of them, all
  wait for one another, and the mean of their values, and of their optimizers' moments, is
  everybody's.
- asynchronous (arXiv 2401.09135): likewise, but nobody waits: a node adds its progress to what the
  others have brought so far, and continues with that. Only where a checkpoint is due do they wait
  for one another.

Where all have met, all hold the same; a checkpoint is of such a moment, and resumes the job on any
number of nodes.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Synchronization = Literal["synchronous", "local-sgd", "asynchronous"]
SYNCHRONIZATIONS: tuple[Synchronization, ...] = get_args(Synchronization)


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """What a job asks for. num_nodes: at most; fewer if there are no more. every_steps: optimizer
    steps of a node from one contribution to the next (synchronous: 1).
    """

    num_nodes: int = 1
    synchronization: Synchronization = "synchronous"
    every_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One node's part of a job. job: the whole of it. index: of `count`; the first one measures the
    validation set, and writes checkpoints. meet_every_steps: after as many steps all nodes wait for
    one another, so that there can be a checkpoint (0: at the end alone). directory: that all nodes
    can read and write, for contributions.
    """

    job: str = ""
    index: int
    count: int
    synchronization: Synchronization
    every_steps: int
    meet_every_steps: int
    directory: str

    @property
    def gives_gradients(self) -> bool:
        """Before each optimizer step; else it gives its progress, after some of these."""
        return self.synchronization == "synchronous"

    @property
    def num_copies(self) -> int:
        """Tensors of each parameter's size that its exchange with the others holds: what it gives
        and reads of all; and of progress, what nodes last held in common.
        """
        return 1 + self.count if self.gives_gradients else 1 + 3 * (1 + self.count)

    def part(self, start: int, end: int) -> tuple[int, int]:
        """Of a range of examples, those of this node: a range of nearly the same size for each; may
        be empty.
        """
        number = end - start
        return start + number * self.index // self.count, start + number * (
            self.index + 1
        ) // self.count

    def contributes_after(self, step: int, num_steps: int) -> bool:
        """Whether progress is given after this many steps of a job's."""
        return step % self.every_steps == 0 or self._has_checkpoint(step, num_steps)

    def meets_after(self, step: int, num_steps: int) -> bool:
        """Whether it then waits for all others."""
        return self.synchronization != "asynchronous" or self._has_checkpoint(step, num_steps)

    def _has_checkpoint(self, step: int, num_steps: int) -> bool:
        return step == num_steps or (
            self.meet_every_steps > 0 and step % self.meet_every_steps == 0
        )


@dataclass(frozen=True, kw_only=True)
class Combination:
    """What a node takes in after it has contributed. directories: of contributions that it has not
    taken in yet, its own among them, in the order of all nodes. num_trained: trained rows in them.
    version: the first `num_in_version` of them make the state that every node calls by this step;
    None: none of them does.
    """

    directories: tuple[str, ...]
    num_trained: int
    version: int | None = None
    num_in_version: int = 0
