"""The two sides of a step on a divided device: the forward pass on some of its units, a job's work
beside it on others.

Each side is launched by a thread of its own: the forward pass by the caller's, the other by one
that stays. The units of a CPU are its threads (`coserve.devices.sides.threads`), those of a GPU
groups of its multiprocessors (`coserve.devices.sides.multiprocessors`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from coserve.scheduling.plan import Partition
from coserve.scheduling.sharing import Side

# Work beside a forward pass. Its argument returns, at any time, whether that pass has ended.
Work = Callable[[Callable[[], bool]], None]


class Sides(Protocol):
    """The sides of one device."""

    num_units: int
    """Number of units that the device is divided in."""

    def running(self, work: Work, partition: Partition) -> AbstractContextManager[None]:
        """Run `work` on the partition's backward units while the body, which is the forward pass,
        runs on its forward units.

        Ends when both are done, or on a GPU launched, before whatever comes after. An error of
        either is raised; of two, the body's.
        """

    def alone(self, side: Side, units: int) -> AbstractContextManager[None]:
        """Run the body on a side's units while the others rest."""

    def close(self) -> None:
        """End the thread."""
