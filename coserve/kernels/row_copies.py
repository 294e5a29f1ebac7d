"""Copies of rows in calls that are captured: from tensors that stay where they are to others that
lie elsewhere each time, and back. The call reads these addresses on the device when it runs.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class RowCopies(ABC):
    """Copies of rows between some tensors and one other tensor for each, with rows of as many bytes
    (`Backend.row_copies`).

    others: addresses of the others' first rows, int64 [tensors]. rows: the first of the others'
    rows that is copied, and the number of copied rows, int64 [2]. Both are on the device.
    """

    @abstractmethod
    def store(self, others: Tensor, rows: Tensor) -> None:
        """Copy rows to the others."""

    @abstractmethod
    def load(self, others: Tensor, rows: Tensor) -> None:
        """Copy rows from the others."""
