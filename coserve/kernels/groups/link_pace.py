"""The pace of a group's link, relative to what its ranks compute meanwhile."""

import time
from collections.abc import Callable

import torch

from coserve.kernels.base import Backend
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.weights import Weight

# Rows of what is timed: those of a window.
_ROWS = 256
_NUM_RUNS = 5
# Ranks agree on whole numbers.
_PER_UNIT = 256


def link_flops_per_byte(
    group: RankGroup, backend: Backend, weight: Weight, *, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the FLOPs that a rank computes while a gather moves a byte of what it gives, the same
    on every rank.

    Every rank times both, in some tens of milliseconds, and rank 0's clock decides.

    Args:
        group: the ranks; all of them call this.
        backend: the kernels.
        weight: matrix [out, in] of a product by which a rank's pace is taken.
        dtype: the compute dtype.
        device: where the weight is.
    """
    num_outputs, num_inputs = weight.shape
    # A product of a window's rows, and a gather of as many rows.
    x = torch.ones(_ROWS, num_inputs, dtype=dtype, device=device)
    piece = torch.ones(_ROWS, -(-num_inputs // group.size), dtype=dtype, device=device)
    gather_s = _fastest_s(lambda: group.all_gather(piece, "link"), device)
    product_s = _fastest_s(lambda: weight.product(backend, x), device)
    flops_per_s = 2 * _ROWS * num_inputs * num_outputs / product_s
    found = flops_per_s * gather_s / (group.size * piece.nbytes)
    return group.agree(round(_PER_UNIT * found)) / _PER_UNIT


def _fastest_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some runs, after one that is not counted."""
    run()
    found = []
    for _ in range(_NUM_RUNS):
        _finish(device)
        start_s = time.perf_counter()
        run()
        _finish(device)
        found.append(time.perf_counter() - start_s)
    return min(found)


def _finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
