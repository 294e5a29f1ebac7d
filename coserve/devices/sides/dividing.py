"""Choice of the sides into which a device can be divided."""

import torch

from coserve.devices.sides.base import Sides
from coserve.devices.sides.multiprocessors import stream_sides
from coserve.devices.sides.threads import ThreadSides
from coserve.models.backbone import Backbone


def sides_of(backbone: Backbone) -> Sides | None:
    """Return the sides of a model's device in this process; None where steps cannot be divided.

    That is so on one unit; where results must be the same bit for bit, since sums depend on the
    units; and on a rank of several, whose two sides would call collectives in an order that differs
    from other ranks'.
    """
    if backbone.block_rows is not None or backbone.group.size > 1:
        return None
    if backbone.device.type == "cuda":
        return stream_sides(backbone.device)
    return ThreadSides() if backbone.device.type == "cpu" and torch.get_num_threads() > 1 else None
