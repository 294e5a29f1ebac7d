"""What a step takes that is being planned: its sections, on the whole device or divided, and what
is left for jobs.
"""

from math import inf

import msgspec

from coserve.scheduling.plan import Partition, Prediction


class StepTime(msgspec.Struct):
    """A `Prediction` that grows with its plan: the fields of the same names mean the same."""

    overhead_s: float = 0.0
    forward_s: float = 0.0
    prefill_s: float = 0.0
    batch_s: float = 0.0
    window_s: float = 0.0
    loss_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    until_s: float = inf
    """Time that jobs were given, from the step's start."""
    longest_tasklet_s: float = 0.0
    """Time of the longest tasklet."""
    partition: Partition | None = None
    """How the device is divided, if backward work runs beside the forward pass."""
    forward_speed: float = 1.0
    backward_speed: float = 0.0

    @property
    def whole_s(self) -> float:
        """All of it, one section after the other on the whole device."""
        return self.overhead_s + self.forward_s + self.loss_s + self.backward_s + self.update_s

    @property
    def step_s(self) -> float:
        """All of it, as the step is to run."""
        if self.partition is None:  # nearly always
            return (
                self.overhead_s + self.forward_s + self.update_s + (self.loss_s + self.backward_s)
            )
        left_s = self.loss_s + self.backward_s - self._beside_s
        return self.overhead_s + self._side_s + self.update_s + (left_s if left_s > 0 else 0.0)

    def prediction(self, *, forward_correction: float, decode_share: float) -> Prediction:
        """Return what the finished plan is predicted to take."""
        return Prediction(
            forward_s=self.forward_s,
            prefill_s=self.prefill_s,
            batch_s=self.batch_s,
            window_s=self.window_s,
            loss_s=self.loss_s,
            backward_s=self.backward_s,
            update_s=self.update_s,
            overhead_s=self.overhead_s,
            forward_correction=forward_correction,
            forward_speed=self.forward_speed,
            backward_speed=self.backward_speed,
            decode_share=decode_share,
        )

    def divide(
        self, partition: Partition | None, forward_speed: float = 1.0, backward_speed: float = 0.0
    ) -> None:
        """Have backward work run beside the forward pass; None: one after the other."""
        self.partition, self.forward_speed, self.backward_speed = (
            partition,
            forward_speed,
            backward_speed,
        )

    def allow_until(self, until_s: float) -> None:
        """Let jobs take time until then. A second call, for other jobs, cuts short nothing that is
        planned already.
        """
        self.until_s = until_s if self.until_s == inf else max(until_s, self.until_s)

    def left_s(self, until_s: float) -> float:
        """Seconds of the whole device that further tasklets may take."""
        done_s = self._side_s + self.loss_s + self.update_s + self.backward_s - self._beside_s
        return until_s - self.overhead_s - done_s

    def backward_limit_s(self) -> float | None:
        """Until when the last tasklet must begin, from when the device does; None: at any time."""
        if self.until_s == inf:
            return None
        until_s, longest_s = self.until_s - self.overhead_s - self.update_s, self.longest_tasklet_s
        if self.partition is None:
            return max(0.0, until_s - self.forward_s - longest_s)
        # What it has not done when the forward pass ends, it does on the whole device.
        after_s = until_s - self._side_s
        if after_s >= longest_s:
            return until_s - longest_s
        return max(0.0, self._side_s - (longest_s - after_s) / self.backward_speed)

    @property
    def _side_s(self) -> float:
        """The forward pass on its part of the device."""
        return self.forward_s / self.forward_speed

    @property
    def _beside_s(self) -> float:
        """What is done of losses and tasklets meanwhile, in seconds of the whole device."""
        return self.backward_speed * self._side_s
