"""Imported by Python as it starts: the time of day is as many seconds from the real one as a file
says, and one prompt is deadly.
"""

import os
import time

import deadly_requests  # type: ignore[import-not-found]  # beside this file

_real, _real_ns, _path = time.time, time.time_ns, os.environ["STORM_CLOCK"]


def _offset_s() -> int:
    try:
        with open(_path) as file:
            return int(file.read() or 0)
    except OSError:
        return 0


time.time = lambda: _real() + _offset_s()
time.time_ns = lambda: _real_ns() + _offset_s() * 10**9
deadly_requests.install()
