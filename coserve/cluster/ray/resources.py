"""Resources that a node takes of a machine: Ray's GPUs, or its CPUs where several ranks hold the
model together.
"""

from dataclasses import dataclass

from coserve.protocol.messages import EngineSettings


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """Ray's resources of an actor."""

    num_gpus: int
    """GPUs of a node."""
    num_cpus: int
    """CPUs of a node."""

    def shortage(self, num_nodes: int, *, num_gpus: int, num_cpus: int) -> str:
        """Return why a cluster with these resources cannot run as many nodes, as one line; "" if it
        can.
        """
        if self.num_gpus * num_nodes > num_gpus:
            return (
                f"{num_nodes} nodes need {self.num_gpus * num_nodes} GPUs and the cluster has "
                f"{num_gpus}, so those "
                "without GPUs have none to start on; --device cpu has all nodes on CPUs"
            )
        if self.num_cpus * num_nodes > num_cpus:
            return (
                f"{num_nodes} nodes need {self.num_cpus * num_nodes} CPUs for their ranks and the "
                f"cluster has "
                f"{num_cpus}, so some have none to start on"
            )
        return ""


def node_resources(settings: EngineSettings, *, uses_gpus: bool) -> NodeResources:
    """Return what each node needs.

    Args:
        settings: Settings of the node's engine.
        uses_gpus: Whether nodes run on GPUs. On CPUs a node of one rank needs none of Ray's, which
            then counts nodes alone.
    """
    num_ranks = settings.engine.tensor_parallel
    if uses_gpus:
        return NodeResources(num_gpus=num_ranks, num_cpus=0)
    return NodeResources(
        num_gpus=0, num_cpus=0 if num_ranks == 1 else num_ranks * (settings.threads or 1)
    )


def num_nodes_of(num_gpus: int, num_ranks: int) -> int:
    """Return how many nodes a machine has by default: one for each group of its GPUs, but at least
    one.
    """
    return max(1, num_gpus // num_ranks)
