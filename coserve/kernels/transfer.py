"""Copies of numbers from the host to a device that do not wait for work under way on the device."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def int_tensor(values: Sequence[int]) -> Tensor:
    """Return int64 [n] on the CPU, made by way of an array: PyTorch takes several times as long to
    look at each number of a list.
    """
    return (
        torch.frombuffer(array("q", values), dtype=torch.int64)
        if values
        else torch.empty(0, dtype=torch.int64)
    )


def on_device(
    values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor of these values on a device.

    A GPU copies it from pinned memory when its turn comes; from any other memory PyTorch would wait
    until everything that was launched before is done.

    Raises:
        RuntimeError: calls are being captured (`Backend.capture`). They would copy again from where
            the values lay.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("values of the host cannot be part of captured calls")
    return tensor.pin_memory().to(device, non_blocking=True)
