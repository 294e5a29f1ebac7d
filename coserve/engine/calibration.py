"""Calibration of the profile that predictions rest on: measured before the engine serves, or while
it serves.
"""

from coserve.devices.messages.commands import DeviceInfo, DeviceMeasured, MeasureDevice
from coserve.engine.command_log import CommandLog
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.slo import DefaultSlo


class Calibration:
    """A provisional profile's replacement by a measured one, piece by piece, whenever the caller
    has time for a piece.
    """

    def __init__(
        self, log: CommandLog, info: DeviceInfo, latency: LatencyModel, default_slo: DefaultSlo
    ) -> None:
        self._log, self._latency, self._default_slo = log, latency, default_slo
        self.is_provisional = info.is_provisional
        """Return whether predictions still rest on a quick and cautious profile."""

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
