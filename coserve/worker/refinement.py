"""Schedule of an engine's measurement of its device: between steps, while no request has been there
for a moment.
"""

import logging
import time
from collections.abc import Callable

from coserve.engine.command_log import LostCommandError
from coserve.engine.engine import Engine
from coserve.errors import DeviceGoneError

_log = logging.getLogger(__name__)

# Requests often follow each other: a piece of the measurement would delay the next one.
_QUIET_S = 0.25


class ProfileRefinement:
    """Replaces a provisional profile by a measured one, piece by piece; jobs take turns with the
    pieces.
    """

    def __init__(self, engine: Engine, *, time_s: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._calibration, self._time_s = engine, engine.calibration, time_s
        self._has_failed = False
        self._busy_s = float("-inf")  # time of the last request
        self.progress: float | None = 0.0 if engine.calibration.is_provisional else None
        """Share of the measurements that are finished; None once it is measured, or measuring has
        failed."""

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next piece may run; None if there is nothing to measure."""
        if self._has_failed or not self._calibration.is_provisional:
            return None
        return max(0.0, self._busy_s + _QUIET_S - self._time_s())

    def run_piece(self) -> bool:
        """Run one piece if no request is there, or was until just now. Returns whether it was the
        last one.

        If a piece fails, no further one runs: the provisional profile stays until the next start.
        """
        if self._has_failed or not self._calibration.is_provisional:
            return False
        if self._engine.has_requests:
            self._busy_s = self._time_s()
        elif not self.wait_s:
            try:
                done, total = self._calibration.run_piece()
            except (DeviceGoneError, LostCommandError):
                raise
            except Exception:  # such as a lack of memory beside jobs
                _log.warning(
                    "measuring the device failed: its provisional profile stays", exc_info=True
                )
                self._has_failed, self.progress = True, None
                return False
            self.progress = (
                # Below 1 until the last piece has replaced the profile.
                min(done, total - 1) / total if self._calibration.is_provisional else None
            )
            return not self._calibration.is_provisional
        return False
