"""The time of a step that is being planned: its sections, on the whole device or divided, and what
is left for jobs.
"""

from math import inf

import msgspec

from coserve.scheduling.plan import Partition, Prediction


class StepTime(msgspec.Struct):
    """A `Prediction` that grows with its plan, in seconds of the whole device."""

    overhead_s: float = 0.0
    """Time outside all sections."""
    forward_s: float = 0.0
    """Forward pass, with sampling."""
    prefill_s: float = 0.0
    """Part of forward_s that prompts add."""
    batch_s: float = 0.0
    """Part of forward_s that batch work adds."""
    window_s: float = 0.0
    """Part of forward_s that windows of jobs add."""
    loss_s: float = 0.0
    """Losses of jobs."""
    backward_s: float = 0.0
    """Tasklets."""
    update_s: float = 0.0
    """Optimizer steps."""
    until_s: float = inf
    """Time until which jobs may run, from the step's start."""
    longest_tasklet_s: float = 0.0
    """Time of the longest tasklet."""
    partition: Partition | None = None
    """Division of the device, if backward work runs beside the forward pass."""
    forward_speed: float = 1.0
    """Speed of the forward pass on its units, as a share of the whole device's."""
    backward_speed: float = 0.0
    """Speed of backward work beside the forward pass."""

    @property
    def whole_s(self) -> float:
        """Return the time of all sections, one after the other on the whole device."""
        return self.overhead_s + self.forward_s + self.loss_s + self.backward_s + self.update_s

    @property
    def step_s(self) -> float:
        """Return the time of the step, divided as planned."""
        if self.partition is None:  # nearly always
            return (
                self.overhead_s + self.forward_s + self.update_s + (self.loss_s + self.backward_s)
            )
        left_s = self.loss_s + self.backward_s - self._beside_s
        return self.overhead_s + self._side_s + self.update_s + (left_s if left_s > 0 else 0.0)

    def prediction(self, *, forward_correction: float, decode_share: float) -> Prediction:
        """Return the prediction of the finished plan."""
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
        """Run backward work beside the forward pass; None for one after the other."""
        self.partition, self.forward_speed, self.backward_speed = (
            partition,
            forward_speed,
            backward_speed,
        )

    def allow_until(self, until_s: float) -> None:
        """Let jobs take time until then. A second call, for other jobs, cuts short nothing that is
        planned.
        """
        self.until_s = until_s if self.until_s == inf else max(until_s, self.until_s)

    def left_s(self, until_s: float) -> float:
        """Return the seconds of the whole device that further tasklets may take."""
        done_s = self._side_s + self.loss_s + self.update_s + self.backward_s - self._beside_s
        return until_s - self.overhead_s - done_s

    def backward_limit_s(self) -> float | None:
        """Return the seconds after the device begins by which the last tasklet must begin; None for
        no limit.
        """
        if self.until_s == inf:
            return None
        until_s, longest_s = self.until_s - self.overhead_s - self.update_s, self.longest_tasklet_s
        if self.partition is None:
            return max(0.0, until_s - self.forward_s - longest_s)
        # What it has not done when the forward pass ends, it does on the whole device.
        after_s = until_s - self._side_s
        # The longest tasklet may even begin after the forward pass, on the whole device.
        if after_s >= longest_s:
            return until_s - longest_s
        # Enough of it must be done beside the forward pass that the rest ends in time.
        return max(0.0, self._side_s - (longest_s - after_s) / self.backward_speed)

    @property
    def _side_s(self) -> float:
        """Return the time of the forward pass on its part of the device."""
        return self.forward_s / self.forward_speed

    @property
    def _beside_s(self) -> float:
        """Return the losses and tasklets done meanwhile, in seconds of the whole device."""
        return self.backward_speed * self._side_s
