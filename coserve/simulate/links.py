"""Links between the devices of a group: how long sums over all of them take, by what others have
measured.

Every table but that of four H100 is of nccl-tests (`all_reduce_perf`, out of place). A sum over
another number of devices than was measured is taken to have the same bus bandwidth at the same
size: of n devices each sends and receives 2 (n - 1) / n of the bytes (nccl-tests,
doc/PERFORMANCE.md). `tests/plain/test_links.py` holds the catalogue against all that was found.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from math import exp, log


@dataclass(frozen=True, kw_only=True)
class SumTimes:
    """Measured times of sums of some sizes."""

    num_devices: int
    """Number of devices that were summed over."""
    us: tuple[tuple[int, float], ...]
    """Bytes of each device's tensor, and microseconds; in the order of sizes."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time of a sum: interpolated between the logarithms of the sizes, as long as
        the smallest size below it, and proportional to the bytes above the largest.
        """
        sizes, logs = self._points
        if num_bytes <= sizes[0]:
            return 1e-6 * exp(logs[0])
        if num_bytes >= sizes[-1]:
            return 1e-6 * exp(logs[-1]) * num_bytes / sizes[-1]
        at = bisect_left(sizes, num_bytes)
        share = log(num_bytes / sizes[at - 1]) / log(sizes[at] / sizes[at - 1])
        return 1e-6 * exp(logs[at - 1] + share * (logs[at] - logs[at - 1]))

    @cached_property
    def _points(self) -> tuple[list[int], list[float]]:
        return [size for size, _ in self.us], [log(us) for _, us in self.us]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between the devices of a group."""

    name: str
    """Name of the link."""
    times: tuple[SumTimes, ...]
    """Measured sums, by the number of devices."""
    most_bytes_per_s: tuple[tuple[int, float], ...] = ()
    """Numbers of devices, and the bus bandwidth that sums over as many reach at most, where that is
    less than what was measured over another number."""

    def sum_s(self, num_bytes: float, num_devices: int) -> float:
        """Return the time of a sum of a tensor over all devices, each of which gets the result; 0
        for one device.

        Args:
            num_bytes: Bytes of the tensor.
            num_devices: Devices of the group.
        """
        if num_devices == 1:
            return 0.0
        nearest = min(self.times, key=lambda each: abs(log(each.num_devices / num_devices)))
        moved = _moved(num_devices)
        seconds = nearest.seconds(num_bytes) * moved / _moved(nearest.num_devices)
        most = dict(self.most_bytes_per_s).get(num_devices)
        return seconds if most is None else max(seconds, moved * num_bytes / most)

    def gather_s(self, num_bytes: float, num_devices: int) -> float:
        """Return the time of a gather after which every device has a tensor of this size.

        It moves half of what a sum of the tensor does, as does a sum of which each device gets its
        part.
        """
        return self.sum_s(num_bytes / 2, num_devices)


def _moved(num_devices: int) -> float:
    """Return the share of a tensor's bytes that each device sends for a sum: what nccl-tests call
    the bus factor.
    """
    return 2 * (num_devices - 1) / num_devices


# Two A100 with twelve links of NVLink 3 between them (Azure's NC48ads A100 v4), NCCL 2.1x, the
# table with the topology's file alone; and four A100 that are two such pairs, with PCIe 4 and the
# host between the pairs (NC96ads): https://github.com/JingchaoZhang/JingchaoZhang.github.io,
# "_posts/2023-07-14-Azure NCCL Test on NCv4.md", read on 2026-11-30.
_TWO_A100 = SumTimes(
    num_devices=2,
    us=(
        (1 << 10, 9.22),
        (1 << 13, 10.49),
        (1 << 16, 11.54),
        (1 << 18, 14.07),
        (1 << 19, 17.2),
        (1 << 20, 33.18),
        (1 << 22, 50.02),
        (1 << 24, 117.2),
        (1 << 26, 374.7),
        (1 << 28, 1393.9),
        (1 << 30, 5196.2),
        (1 << 32, 19344.0),
    ),
)
_TWO_PAIRS = SumTimes(
    num_devices=4,
    us=(
        (1 << 10, 15.17),
        (1 << 13, 17.92),
        (1 << 16, 21.88),
        (1 << 17, 31.54),
        (1 << 18, 64.6),
        (1 << 20, 93.18),
        (1 << 22, 225.1),
        (1 << 24, 865.0),
        (1 << 26, 3362.9),
        (1 << 28, 13144.0),
        (1 << 30, 52288.0),
    ),
)
# Eight H100 with NVLink 4 and NVSwitch (AWS p5.48xlarge), whose switches add up (NVLS) from 1 MB
# on: https://github.com/aws-samples/awsome-distributed-training,
# 1.architectures/3.aws-batch/README.md, read on 2026-11-30.
_EIGHT_H100 = SumTimes(
    num_devices=8,
    us=(
        (1 << 10, 16.43),
        (1 << 13, 16.85),
        (1 << 16, 19.09),
        (1 << 19, 21.17),
        (1 << 20, 28.56),
        (1 << 21, 43.45),
        (1 << 22, 55.44),
        (1 << 24, 124.0),
        (1 << 26, 326.6),
        (1 << 28, 1121.4),
        (1 << 30, 4253.0),
        (1 << 32, 15791.0),
    ),
)

# Four of eight H100, NCCL as vLLM calls it, in whole microseconds:
# https://github.com/vllm-project/vllm/pull/24111, read on 2026-11-30. Its table has no other sizes:
# smaller sums are taken to wait as long as the smallest, and larger ones to have the bus bandwidth
# of eight devices.
_FOUR_H100 = SumTimes(
    num_devices=4,
    us=(
        (1 << 19, 17.0),
        (1 << 20, 19.0),
        (3 << 19, 22.0),
        (1 << 21, 26.0),
        (3 << 20, 31.0),
        (1 << 22, 37.0),
        *((size, us * _moved(4) / _moved(8)) for size, us in _EIGHT_H100.us if size > 1 << 22),
    ),
)

# At most 235 GB/s among all A100 of a node, of which 232 were measured
# (github.com/stas00/ml-engineering, network; github.com/NVIDIA/nccl-tests issue 175).
NVLINK_3 = Link(name="NVLink 3", times=(_TWO_A100,), most_bytes_per_s=((4, 2.35e11), (8, 2.35e11)))
# Four A100 without a switch, each pair of which has four of the twelve links (Perlmutter,
# Leonardo): two of them reach 72 GB/s (github.com/NVIDIA/nccl-tests issue 331); that all four reach
# what they do with a switch is taken from there.
NVLINK_3_MESH = Link(
    name="NVLink 3, four links a pair",
    times=(_TWO_A100,),
    most_bytes_per_s=((2, 7.2e10), (4, 2.35e11)),
)
# Rings of two to four H100 reach 365 to 370 GB/s, and the switches help from five on
# (github.com/NVIDIA/nccl issue 1455). No table of sums over two was found: they follow from that of
# four.
NVLINK_4 = Link(
    name="NVLink 4", times=(_FOUR_H100, _EIGHT_H100), most_bytes_per_s=((2, 3.7e11), (4, 3.7e11))
)
# Two devices reach 20 GB/s where a pair has no NVLink (github.com/NVIDIA/nccl-tests issue 178).
PCIE_4 = Link(name="PCIe 4", times=(_TWO_PAIRS,), most_bytes_per_s=((2, 2e10),))
# Pairs of A40 or RTX 3090 with their bridge, four links of NVLink 3: no table was found. Two are
# taken to reach 0.82 of the bridge's 56 GB/s, as H100s do of their 450
# (github.com/NVIDIA/nccl-tests issue 212), and with small sums what two A100 do; four are two pairs
# with PCIe between them.
NVLINK_BRIDGE = Link(
    name="NVLink bridge", times=(_TWO_A100, _TWO_PAIRS), most_bytes_per_s=((2, 4.6e10),)
)
