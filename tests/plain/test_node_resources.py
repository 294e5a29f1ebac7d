"""Ray's resources that nodes of a cluster take, with one rank and with several."""

import pytest

from coserve.cluster.ray.resources import NodeResources, node_resources, num_nodes_of
from coserve.engine.config import EngineConfig
from coserve.protocol.messages import EngineSettings


def settings(num_ranks: int, threads: int | None = None) -> EngineSettings:
    return EngineSettings(
        address="",
        model="tiny",
        dtype="auto",
        device="auto",
        threads=threads,
        engine=EngineConfig(tensor_parallel=num_ranks),
    )


@pytest.mark.parametrize(
    ("num_ranks", "threads", "uses_gpus", "num_gpus", "num_cpus"),
    [
        (1, None, True, 1, 0),
        (4, 8, True, 4, 0),
        (1, 8, False, 0, 0),
        (2, None, False, 0, 2),
        (2, 4, False, 0, 8),
    ],
)
def test_a_node_takes_a_gpu_for_each_rank_or_cpus_for_its_threads(
    num_ranks: int, threads: int | None, uses_gpus: bool, num_gpus: int, num_cpus: int
):
    found = node_resources(settings(num_ranks, threads), uses_gpus=uses_gpus)
    assert found == NodeResources(num_gpus=num_gpus, num_cpus=num_cpus)


def test_nodes_that_would_wait_for_devices_for_ever_are_warned_of():
    gpus = node_resources(settings(2), uses_gpus=True)
    assert gpus.shortage(2, num_gpus=4, num_cpus=0) == ""
    assert gpus.shortage(3, num_gpus=4, num_cpus=64).startswith(
        "3 nodes need 6 GPUs and the cluster has 4"
    )
    cpus = node_resources(settings(2, 4), uses_gpus=False)
    assert cpus.shortage(2, num_gpus=0, num_cpus=16) == ""
    assert cpus.shortage(3, num_gpus=8, num_cpus=16).startswith(
        "3 nodes need 24 CPUs for their ranks"
    )
    one = node_resources(settings(1, 8), uses_gpus=False)
    assert one.shortage(100, num_gpus=0, num_cpus=1) == "", (
        "nodes of one rank take none of Ray's CPUs"
    )


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "num_nodes"), [(0, 2, 1), (8, 1, 8), (8, 4, 2), (7, 4, 1), (2, 4, 1)]
)
def test_a_machine_has_a_node_for_each_group_of_its_gpus(
    num_gpus: int, num_ranks: int, num_nodes: int
):
    assert num_nodes_of(num_gpus, num_ranks) == num_nodes
