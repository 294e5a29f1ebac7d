"""Copies of rows in calls that are captured: from tensors that stay where they are to others that
lie elsewhere each time, and back. Where these lie is read on the device when the call runs.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class RowCopies(ABC):
    """Of some tensors, each beside one of the others with rows of as many bytes
    (`Backend.row_copies`).

    others: addresses of the others' first rows, int64 [tensors]. rows: which row of the others is
    the first that is copied, and how many are, int64 [2]. Both on the device.
    """

    @abstractmethod
    def store(self, others: Tensor, rows: Tensor) -> None:
        """To the others."""

    @abstractmethod
    def load(self, others: Tensor, rows: Tensor) -> None:
        """From them."""
