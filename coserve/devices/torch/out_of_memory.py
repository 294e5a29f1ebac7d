"""Detection of a device that has run out of memory, among all else that can go wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coserve.errors import DeviceMemoryError


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise DeviceMemoryError in place of what PyTorch raises when memory runs out; other errors
    pass.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceMemoryError(" ".join(str(error).split()) or "out of memory") from error
    except RuntimeError as error:  # what PyTorch raises for CPUs
        if "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise DeviceMemoryError(" ".join(str(error).split())) from error
        raise
