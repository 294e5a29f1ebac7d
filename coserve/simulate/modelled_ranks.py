"""A rank of a group that is not here: a backbone of shapes alone, as one device of several would
hold it.
"""

from torch import Tensor

from coserve.kernels.groups.base import RankGroup
from coserve.models.backbone import Backbone
from coserve.models.dividing import divided_backbone


class ModelledRank(RankGroup):
    """Rank 0 of a group without the others: its number and size are known, and nothing can be
    moved.
    """

    def __init__(self, size: int) -> None:
        super().__init__(rank=0, size=size)

    def fail(self, reason: str) -> None:
        """Do nothing: there are no other ranks."""

    def reset(self) -> None:
        """Do nothing."""

    def _sum(self, x: Tensor, y: Tensor, name: str) -> None:
        raise AssertionError("a modelled rank has no data")

    def _all_gather(self, x: Tensor, name: str) -> Tensor:
        raise AssertionError("a modelled rank has no data")

    def _agree(self, number: int) -> int:
        raise AssertionError("a modelled rank decides nothing")


def on_ranks(whole: Backbone, size: int) -> Backbone:
    """Return what each rank of a group holds of a backbone on the "meta" device; all of it for one
    rank.

    Raises:
        UnsupportedModelError: the model cannot be divided among this many ranks.
    """
    assert whole.device.type == "meta", "only shapes can be divided without the other ranks"
    return whole if size == 1 else divided_backbone(whole, ModelledRank(size))
