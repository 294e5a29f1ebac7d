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
    """The division of a job that its user asks for."""

    num_nodes: int = 1
    """Maximum number of nodes; fewer if there are no more."""
    synchronization: Synchronization = "synchronous"
    """Strategy by which nodes combine their contributions."""
    every_steps: int = 1
    """Optimizer steps of a node between contributions; 1 if synchronous."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One node's part of a job."""

    job: str = ""
    """Id of the whole job."""
    index: int
    """Number of the part; the first one evaluates the validation set and writes checkpoints."""
    count: int
    """Number of parts."""
    synchronization: Synchronization
    """Strategy by which nodes combine their contributions."""
    every_steps: int
    """Optimizer steps between contributions."""
    meet_every_steps: int
    """Optimizer steps after which all nodes wait for one another, so that there can be a
    checkpoint; 0 for the end alone.
    """
    directory: str
    """Directory for contributions, which all nodes can read and write."""

    @property
    def gives_gradients(self) -> bool:
        """Return whether it contributes gradients before each optimizer step; otherwise it
        contributes its progress after some.
        """
        return self.synchronization == "synchronous"

    @property
    def num_copies(self) -> int:
        """Return the number of tensors of each parameter's size that its exchange with the others
        holds: its contribution and those of all; and for progress, the values that nodes last held
        in common.
        """
        return 1 + self.count if self.gives_gradients else 1 + 3 * (1 + self.count)

    def part(self, start: int, end: int) -> tuple[int, int]:
        """Return this node's part of a range of examples; the parts have nearly the same size, and
        may be empty.
        """
        number = end - start
        return start + number * self.index // self.count, start + number * (
            self.index + 1
        ) // self.count

    def contributes_after(self, step: int, num_steps: int) -> bool:
        """Return whether progress is contributed after this many steps of a job's."""
        return step % self.every_steps == 0 or self._has_checkpoint(step, num_steps)

    def meets_after(self, step: int, num_steps: int) -> bool:
        """Return whether it then waits for all others."""
        return self.synchronization != "asynchronous" or self._has_checkpoint(step, num_steps)

    def _has_checkpoint(self, step: int, num_steps: int) -> bool:
        return step == num_steps or (
            self.meet_every_steps > 0 and step % self.meet_every_steps == 0
        )


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Contributions that a node takes in after it has contributed."""

    directories: tuple[str, ...]
    """Directories of contributions not taken in yet, its own among them, in the order of all nodes.
    """
    num_trained: int
    """Trained rows in them."""
    version: int | None = None
    """Step by which every node calls the state after the first `num_in_version` of them; None if
    none makes one.
    """
    num_in_version: int = 0
    """Number of contributions in that state."""
