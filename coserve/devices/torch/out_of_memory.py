"""Telling that a device has run out of memory from everything else that can go wrong on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coserve.errors import DeviceMemoryError


@contextmanager
def memory_errors() -> Iterator[None]:
    """What PyTorch raises when memory runs out, as DeviceMemoryError; other errors pass as they
    are.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceMemoryError(" ".join(str(error).split()) or "out of memory") from error
    except RuntimeError as error:  # what PyTorch raises for CPUs
        if "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise DeviceMemoryError(" ".join(str(error).split())) from error
        raise
