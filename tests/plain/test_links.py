"""Links of the catalogue against published sums: the tables that they are made of, and others."""

import pytest

from coserve.simulate.links import (
    NVLINK_3,
    NVLINK_3_MESH,
    NVLINK_4,
    NVLINK_BRIDGE,
    PCIE_4,
    Link,
    SumTimes,
)

MB = 1 << 20
# Microseconds of all sizes from 8 kB to 1 GB, doubling; links.py names the sources.
TABLES = [
    (
        NVLINK_3,
        2,
        "10.49 11.07 11.26 11.54 12.16 14.07 17.2 33.18 40.34 50.02 79.09 117.2 209.2 374.7 724.9 "
        "1393.9 2718.0 5196.2",
    ),
    (
        PCIE_4,
        4,
        "17.92 19.73 20.93 21.88 31.54 64.6 73.72 93.18 136.8 225.1 437.5 865.0 1761.5 3362.9 "
        "6646.9 13144.0 26266.0 "
        "52288.0",
    ),
    (
        NVLINK_4,
        8,
        "16.85 17.46 18.78 19.09 19.37 20.27 21.17 28.56 43.45 55.44 84.29 124.0 198.6 326.6 592.8 "
        "1121.4 2165.3 "
        "4253.0",
    ),
]
# Of other tables: bytes, devices, GB/s of bus bandwidth.
BUS_GB_PER_S = [
    # "A100 - All reduce performance": two with NVLink, three of which a pair has none.
    (NVLINK_3, 1 << 30, 2, 208, "github.com/NVIDIA/nccl-tests/issues/178"),
    (PCIE_4, 1 << 30, 2, 20, "github.com/NVIDIA/nccl-tests/issues/178"),
    (NVLINK_3, 1 << 32, 8, 232.54, "github.com/NVIDIA/nccl-tests/issues/175"),
    (NVLINK_3_MESH, 1 << 30, 2, 72, "github.com/NVIDIA/nccl-tests/issues/331"),
    # Rings over two to eight H100, and what switches add up.
    (NVLINK_4, 1 << 32, 2, 367, "github.com/NVIDIA/nccl/issues/1455"),
    (NVLINK_4, 1 << 32, 4, 367, "github.com/NVIDIA/nccl/issues/1455"),
    (NVLINK_4, 1 << 33, 8, 480, "github.com/NVIDIA/nccl-tests/issues/212"),
    # Eight H200 with the same link, from where what PyTorch adds to a call no longer counts.
    (
        NVLINK_4,
        16 * MB,
        8,
        219.89,
        "github.com/stas00/ml-engineering, network/benchmarks/results/all-reduce-8xH200.md",
    ),
    (
        NVLINK_4,
        128 * MB,
        8,
        401.93,
        "github.com/stas00/ml-engineering, network/benchmarks/results/all-reduce-8xH200.md",
    ),
]


@pytest.mark.parametrize(
    ("link", "num_devices", "us"), TABLES, ids=[link.name for link, *_ in TABLES]
)
def test_sums_of_every_size_are_within_20_percent_of_the_table(
    link: Link, num_devices: int, us: str
):
    for index, measured in enumerate(map(float, us.split())):
        assert 1e6 * link.sum_s(8192 << index, num_devices) == pytest.approx(measured, rel=0.2), (
            8192 << index
        )


@pytest.mark.parametrize(
    ("megabytes", "us"),
    [(0.5, 17.0), (1.0, 19.0), (1.5, 22.0), (2.0, 26.0), (3.0, 31.0), (4.0, 37.0)],
)
def test_sums_over_four_of_a_board_are_those_of_nccl_there(megabytes: float, us: float):
    """Four H100 as vLLM measures them, in whole microseconds
    (github.com/vllm-project/vllm/pull/24111)."""
    assert 1e6 * NVLINK_4.sum_s(megabytes * MB, 4) == pytest.approx(us, rel=0.05)


@pytest.mark.parametrize(("link", "num_bytes", "num_devices", "gb_per_s", "source"), BUS_GB_PER_S)
def test_sums_are_within_20_percent_of_other_tables(
    link: Link, num_bytes: int, num_devices: int, gb_per_s: float, source: str
):
    bus_bytes = 2 * (num_devices - 1) / num_devices * num_bytes
    assert bus_bytes / link.sum_s(num_bytes, num_devices) == pytest.approx(
        1e9 * gb_per_s, rel=0.2
    ), source


def test_small_sums_over_eight_devices_take_what_they_do_on_another_board():
    """Eight H20, which have the same link: 16.2 to 16.7 us
    (github.com/deepseek-ai/DeepEP/issues/303)."""
    for num_bytes, us in ((512, 16.26), (1024, 16.38), (2048, 16.49), (4096, 16.69)):
        assert 1e6 * NVLINK_4.sum_s(num_bytes, 8) == pytest.approx(us, rel=0.05)


@pytest.mark.parametrize(
    "link", [NVLINK_3, NVLINK_3_MESH, NVLINK_4, NVLINK_BRIDGE, PCIE_4], ids=lambda link: link.name
)
def test_larger_sums_take_longer_and_one_device_has_none(link: Link):
    for num_devices in (2, 4, 8):
        seconds = [link.sum_s(2**power, num_devices) for power in range(34)]
        assert seconds == sorted(seconds) and seconds[0] > 1e-6
        assert link.gather_s(2**24, num_devices) == link.sum_s(2**23, num_devices)
    assert link.sum_s(1e9, 1) == 0.0


def test_times_between_sizes_lie_on_a_straight_line_of_logarithms_and_beyond_them_are_proportional():
    times = SumTimes(num_devices=2, us=((1 << 10, 10.0), (1 << 20, 1000.0)))
    assert times.seconds(1) == pytest.approx(10e-6)
    assert times.seconds(1 << 15) == pytest.approx(100e-6)
    assert times.seconds(1 << 22) == pytest.approx(4000e-6)


def test_another_number_of_devices_has_the_bus_bandwidth_of_the_nearest_that_was_measured_up_to_its_most():
    times = tuple(
        SumTimes(num_devices=size, us=((1, float(size)), (1000, 1000.0 * size))) for size in (2, 8)
    )
    link = Link(name="any", times=times, most_bytes_per_s=((4, 1e5),))
    assert link.sum_s(1000, 2) == pytest.approx(2e-3)
    assert link.sum_s(1000, 3) == pytest.approx(2e-3 * 4 / 3)
    assert link.sum_s(1000, 16) == pytest.approx(8e-3 * 1.875 / 1.75)
    assert link.sum_s(1000, 4) == pytest.approx(1.5 * 1000 / 1e5)
