"""When a job will be done, from what was measured of it, or before it runs, of its model."""

from dataclasses import dataclass

from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.plan import whole_pack
from coserve.scheduling.profile import Profile
from coserve.tuning.order import PackMembers, TrainingOrder

# What lies further back says little about now: other requests, other jobs.
_WINDOW = 32


@dataclass(frozen=True)
class ProgressMeter:
    """The steps of one run of a job; a pause, or another engine, begins a new one."""

    times_s: tuple[float, ...]
    """When the last steps were done, in seconds of any clock that does not jump; the first of them
    is where the window begins: when the run began, until it has made many steps.
    """

    def after_steps(self, num_steps: int, now_s: float) -> "ProgressMeter":
        """Return the meter after this many more optimizer steps."""
        return ProgressMeter((*self.times_s, *[now_s] * num_steps)[-_WINDOW - 1 :])

    def seconds_left(self, num_steps: int, now_s: float) -> float | None:
        """For as many more steps; None before one is done.

        A step that has taken longer than the others did counts with what it has taken: a job that
        requests hold up is not promised for soon.
        """
        num_done = len(self.times_s) - 1
        if not num_done:
            return None
        first_s, last_s = self.times_s[0], self.times_s[-1]
        step_s = max((last_s - first_s) / num_done, (now_s - first_s) / (num_done + 1))
        return max(0.0, num_steps * step_s - (now_s - last_s))


def seconds_alone(order: TrainingOrder, profile: Profile) -> float:
    """Of a job that nothing else holds up, with the profile's reference adapter (LoRA of rank 16 at
    every linear layer, as jobs have it unless they ask for another). Validation, checkpoints and
    restarts are not counted.
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
