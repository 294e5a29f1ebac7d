"""Measurement of a device that serves meanwhile: one piece at a time, whenever the engine has time
for it.
"""

import torch

from coserve.devices.messages.commands import DeviceMeasured
from coserve.devices.profiles.kept import agreed_profile, keep_profile
from coserve.devices.profiles.profiling import Measurement, measurement
from coserve.models.backbone import Backbone


class OwnMeasurement:
    """A whole profile under way; it holds memory from the first piece to the last."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._pieces: Measurement | None = None
        self._done, self._total = 0, 1

    def run_piece(self) -> DeviceMeasured:
        """Run one more piece; the profile that comes with the last one is kept on disk."""
        with torch.inference_mode():
            if self._pieces is None:
                self._pieces = measurement(self._backbone, self._note)
            try:
                next(self._pieces)
            except StopIteration as ended:
                self._pieces = None
                profile = agreed_profile(self._backbone, ended.value)
                keep_profile(self._backbone, profile)
                return DeviceMeasured(self._total, self._total, profile)
            except BaseException:
                self._pieces = None  # frees its memory
                raise
        return DeviceMeasured(self._done, self._total)

    def _note(self, done: int, total: int) -> None:
        self._done, self._total = done, total
