"""Speeds of the two sides of a divided device: the forward pass on some of its units, losses and
tasklets on others.

In two stages, as HARLI section 5 predicts decode steps. The first is measured for each number of
units: the speed of a side that works there alone (equation 2). The second is what the sides take
from each other, which grows with the units of the other (equation 3): they share caches and the
memory's bandwidth. Speeds are shares of that on the whole device, so that all that is known of a
step on the whole device carries over; and steps correct them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from coserve.scheduling.aged_factors import AgedFactors, bounded, size_class
from coserve.scheduling.plan import Partition

Side = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Speeds on some units of a device while the others rest, at some numbers of rows."""

    units: int
    """Number of units."""
    rows: tuple[int, ...]
    """Numbers of rows, rising."""
    forward: tuple[float, ...]
    """Speeds of the forward pass at these rows, as shares of the whole device's."""
    backward: tuple[float, ...]
    """Speeds of losses and tasklets at these rows."""

    def __post_init__(self) -> None:
        if not self.rows or list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"speeds need rising numbers of rows, not {self.rows}")
        if (
            not len(self.rows) == len(self.forward) == len(self.backward)
            or min(*self.forward, *self.backward) <= 0
        ):
            raise ValueError(
                f"speeds must be above 0 and as many as rows, not {self.forward} and "
                f"{self.backward}"
            )


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Measurements of a divided device."""

    num_units: int
    """Units of the device."""
    shares: tuple[Share, ...]
    """Speeds on numbers of units below num_units."""
    forward_interference: float = 0.0
    """Share of its time that the forward pass takes longer if the whole device worked for the other
    side beside it.
    """
    backward_interference: float = 0.0
    """The same for losses and tasklets."""
    pays: bool = True
    """Whether dividing gets more done where the speeds say so; otherwise only policies that divide
    for other reasons do.
    """

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Sharing":
        """Return what `dataclasses.asdict` was made from.

        Raises:
            ValueError, TypeError, KeyError: The fields are not those of a `Sharing`.
        """
        shares = [
            {name: _tuple(value) for name, value in share.items()} for share in fields["shares"]
        ]
        return cls(**{**fields, "shares": tuple([Share(**share) for share in shares])})


class SharingModel:
    """Predicted speeds of both sides. Arithmetic alone: no clock, no I/O."""

    def __init__(self, sharing: Sharing | None) -> None:
        """Predict by measurements; None if the device cannot be divided, or was not measured."""
        self._sharing = sharing
        self._shares = {share.units: share for share in sharing.shares} if sharing else {}
        # Speeds by rows, without corrections.
        self._measured: dict[tuple[Partition, Side, int], float] = {}
        self._factors = AgedFactors()  # for a side in general, and of a partition at some rows
        self.partitions: tuple[Partition, ...] = ()
        if sharing is not None:
            others = [(units, sharing.num_units - units) for units in sorted(self._shares)]
            self.partitions = tuple(
                [Partition(*each) for each in others if each[1] in self._shares]
            )

    def speeds(
        self, partition: Partition, *, forward_rows: int, tasklet_rows: int
    ) -> tuple[float, float]:
        """Return the speeds of the forward pass and of tasklets beside it, as shares of those on
        the whole device.

        Args:
            partition: Numbers of units that were measured: one of `partitions`, which use all
                units, or one that leaves some.
            forward_rows: Rows of the forward pass.
            tasklet_rows: Rows of a tasklet.
        """
        return (
            self._measured_speed(partition, "forward", forward_rows)
            * self._correction(partition, "forward", forward_rows),
            self._measured_speed(partition, "backward", tasklet_rows)
            * self._correction(partition, "backward", tasklet_rows),
        )

    def _measured_speed(self, partition: Partition, side: Side, rows: int) -> float:
        """Return the speed by both stages, worked out once for each number of rows: every plan
        needs all partitions.
        """
        key = partition, side, rows
        if key not in self._measured:
            assert self._sharing is not None, "the device was not measured in parts"
            forward_units, backward_units, _ = partition
            if side == "forward":
                own, other, interference = (
                    forward_units,
                    backward_units,
                    self._sharing.forward_interference,
                )
            else:
                own, other, interference = (
                    backward_units,
                    forward_units,
                    self._sharing.backward_interference,
                )
            share = self._shares[own]
            alone = between(
                share.rows, share.forward if side == "forward" else share.backward, rows
            )
            # The speed alone (equation 2), slowed as the other side has more units (equation 3).
            self._measured[key] = alone / (1 + interference * other / self._sharing.num_units)
        return self._measured[key]

    def best(
        self,
        *,
        forward_rows: int,
        tasklet_rows: int,
        most_stretch: float = inf,
        margin: float = 0.0,
    ) -> tuple[Partition, float, float] | None:
        """Return the partition that gets most of tasklets done by any moment after the forward
        pass, with its speeds; None if none gets more done than one side after the other, or it does
        not pay.

        A forward pass of a second takes 1 / f on its side. Meanwhile tasklets lose (1 - t) / f to
        those on the whole device, f and t being the speeds of the sides; one after the other they
        would lose that second.

        Args:
            forward_rows: Rows of the forward pass.
            tasklet_rows: Rows of a tasklet.
            most_stretch: Factor by which the forward pass may take longer.
            margin: Share by which steps take longer than predicted, at most: more than that must be
                gained.
        """
        best, least = None, 1 / (1 + margin)
        pays = self._sharing is not None and self._sharing.pays
        for partition in self.partitions if pays else ():
            speeds = self.speeds(partition, forward_rows=forward_rows, tasklet_rows=tasklet_rows)
            lost_s = (1 - speeds[1]) / speeds[0]
            if lost_s < least and speeds[0] * most_stretch >= 1:
                best, least = (partition, *speeds), lost_s
        return best

    def observe(self, partition: Partition, side: Side, rows: int, *, measured: float) -> None:
        """Learn the speed that a side reached with these rows; plans may have asked for others, so
        their prediction says nothing about the correction for these.
        """
        if measured <= 0:
            return
        believed = self._correction(partition, side, rows)
        right = believed * bounded(
            measured / (believed * self._measured_speed(partition, side, rows))
        )
        # A partition that was never seen begins with the factor of its side.
        self._factors.move(_key(partition, side, rows), right, believed=self._factors.of(side, 1.0))
        self._factors.move(side, right)

    def count_step(self) -> None:
        """Count a step that has ended, divided or not."""
        self._factors.count_step()

    def refresh(self) -> None:
        """Take everything learned as seen just now."""
        self._factors.refresh()

    def _correction(self, partition: Partition, side: Side, rows: int) -> float:
        if not self._factors.num_changes:  # no step was divided yet, as with most plans
            return 1.0
        return self._factors.of(_key(partition, side, rows), self._factors.of(side, 1.0))


def between(rows: Sequence[int], values: Sequence[float], num_rows: int) -> float:
    """Return the value at a number of rows, interpolated between neighbours; beyond the ends, the
    value there.
    """
    high = bisect_left(rows, num_rows)
    if high == 0 or high == len(rows):
        return values[min(high, len(rows) - 1)]
    (r0, r1), (v0, v1) = rows[high - 1 : high + 1], values[high - 1 : high + 1]
    return v0 + (v1 - v0) * (num_rows - r0) / (r1 - r0)


def _key(partition: Partition, side: Side, rows: int) -> tuple[Partition, Side, int]:
    """Return the key of a correction: a partition that stops is as fast as one that does not."""
    return (
        (partition._replace(stops=False) if partition.stops else partition),
        side,
        size_class(rows),
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
