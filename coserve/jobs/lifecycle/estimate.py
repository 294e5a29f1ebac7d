"""Estimates of when a job will be done: from measured steps, or before it runs, from a profile."""

from dataclasses import dataclass

from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.plan import whole_pack
from coserve.scheduling.profile import Profile
from coserve.tuning.order import PackMembers, TrainingOrder

# Number of steps in the window: older ones ran beside other requests and jobs.
_WINDOW = 32


@dataclass(frozen=True)
class ProgressMeter:
    """Times of the steps of one run of a job; a pause or another engine starts a new meter."""

    times_s: tuple[float, ...]
    """Times at which the last steps ended, in seconds of a monotonic clock. The first entry is the
    start of the window: the start of the run, until the run has made more steps than the window
    holds.
    """

    def after_steps(self, num_steps: int, now_s: float) -> "ProgressMeter":
        """Return the meter after this many more optimizer steps."""
        return ProgressMeter((*self.times_s, *[now_s] * num_steps)[-_WINDOW - 1 :])

    def seconds_left(self, num_steps: int, now_s: float) -> float | None:
        """Return the estimated seconds for this many more steps; None before the first step.

        The current step counts with the time it has taken once that exceeds the average, so that a
        job that requests hold up is not promised for soon.
        """
        num_done = len(self.times_s) - 1
        if not num_done:
            return None
        first_s, last_s = self.times_s[0], self.times_s[-1]
        step_s = max((last_s - first_s) / num_done, (now_s - first_s) / (num_done + 1))
        return max(0.0, num_steps * step_s - (now_s - last_s))


def seconds_alone(order: TrainingOrder, profile: Profile) -> float:
    """Return the estimated seconds of a job that runs alone.

    The adapter is the profile's reference (LoRA of rank 16 at every linear layer, the default of
    jobs). Validation, checkpoints and restarts are not counted.
    """
    model, counts = LatencyModel(profile), profile.job

    def pack_s(pack: PackMembers) -> float:
        view = whole_pack(counts, pack.num_rows, pack.mean_context_len)
        forward_s = model.with_window(ForwardLoad(), view)(pack.num_rows)
        return forward_s if pack.is_reference else model.pack_s(view)

    update_s = model.update_s(counts)
    epoch_s = sum(
        pack_s(pack) for step in range(order.steps_per_epoch) for pack in order.packs(step)
    )
    return order.config.num_epochs * epoch_s + order.num_steps * update_s
