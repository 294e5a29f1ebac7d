"""When a job will be done, from what was measured of it, or before it runs, of its model."""

from collections import deque

from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.plan import JobView
from coserve.scheduling.profile import Profile
from coserve.tuning.order import PackMembers, TrainingOrder

# What lies further back says little about now: other requests, other jobs.
_WINDOW = 32


class ProgressMeter:
    """The steps of one job while it runs; a pause, or another engine, starts it anew."""

    def __init__(self, now_s: float) -> None:
        """now_s: when it began to run, in seconds of any clock that does not jump."""
        self._times_s: deque[float] = deque([now_s], maxlen=_WINDOW + 1)

    def steps_done(self, num_steps: int, now_s: float) -> None:
        """As many more optimizer steps."""
        self._times_s.extend([now_s] * num_steps)

    def seconds_left(self, num_steps: int, now_s: float) -> float | None:
        """For as many more steps; None before one is done.

        A step that has taken longer than the others did counts with what it has taken: a job that requests
        hold up is not promised for soon.
        """
        num_done = len(self._times_s) - 1
        if not num_done:
            return None
        first_s, last_s = self._times_s[0], self._times_s[-1]
        step_s = max((last_s - first_s) / num_done, (now_s - first_s) / (num_done + 1))
        return max(0.0, num_steps * step_s - (now_s - last_s))


def seconds_alone(order: TrainingOrder, profile: Profile) -> float:
    """Of a job that nothing else holds up, with the profile's reference adapter (LoRA of rank 16 at every linear layer,
    as jobs have it unless they ask for another). Validation, checkpoints and restarts are not counted.
    """
    model, counts = LatencyModel(profile), profile.job

    def pack_s(pack: PackMembers) -> float:
        view = JobView("", "pack", pack.num_rows, pack.num_rows, counts.num_parts, pack.mean_context_len, counts)
        forward_s = model.with_window(ForwardLoad(), view)(pack.num_rows)
        return forward_s if pack.is_reference else model.pack_s(view)

    update_s = model.update_s(JobView("", "update", 0, 0, 0, 0.0, counts))
    epoch_s = sum(pack_s(pack) for step in range(order.steps_per_epoch) for pack in order.packs(step))
    return order.config.num_epochs * epoch_s + order.num_steps * update_s
