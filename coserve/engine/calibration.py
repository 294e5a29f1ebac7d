"""Calibration of the profile that predictions rest on: measured before the engine serves, or while
it serves, and corrected by the times of steps.
"""

from collections.abc import Callable

from coserve.devices.messages.commands import DeviceInfo, DeviceMeasured, MeasureDevice
from coserve.engine.command_log import CommandLog
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.profile import Profile
from coserve.scheduling.slo import DefaultSlo

# The default SLO follows measured step times once in as many steps.
_STEPS_PER_LOOK = 64


class Calibration:
    """The replacement of a provisional profile by a measured one, piece by piece, and what follows
    from measured step times.
    """

    def __init__(
        self,
        log: CommandLog,
        info: DeviceInfo,
        latency: LatencyModel,
        default_slo: DefaultSlo,
        keep_profile: Callable[[Profile], None] | None,
    ) -> None:
        """Begin with the device's profile. keep_profile: see `EngineCore`."""
        self._log, self._latency, self._default_slo = log, latency, default_slo
        self._keep_profile = keep_profile
        self.is_provisional = info.is_provisional
        """Whether predictions still rest on a quick and cautious profile."""

    def run_piece(self) -> tuple[int, int]:
        """Run one more piece of the device's measurement; only while the profile is provisional,
        and between two steps.

        Returns:
            The number of finished measurements, and about how many there are. With the last one,
            predictions and the default SLO follow what was measured.
        """
        measured = self._log.execute(MeasureDevice())
        assert isinstance(measured, DeviceMeasured)
        if measured.profile is not None:
            self._latency.use_profile(measured.profile)
            self._default_slo.follow_device()
            self.is_provisional = False
        return measured.done, measured.total

    def follow_steps(self, num_steps: int) -> None:
        """Adapt the default SLO, and the profile on disk, to the times of steps. num_steps: so
        far.
        """
        if num_steps % _STEPS_PER_LOOK:
            return
        self._default_slo.follow_device()
        # Ever more rarely: after 512 steps, 1024, 2048, …
        if num_steps & (num_steps - 1) or self._keep_profile is None:
            return
        if (profile := self._latency.corrections.settled(self._latency.profile)) is not None:
            self._keep_profile(profile)
