"""Static spatial sharing: FlexLLM's baseline (section 8.2) and HARLI's StaticMode (section 8.1).

Requests have a fixed share of the device, and jobs run beside them on the rest, whatever the load
and the SLOs. `_sides` describes how near this comes to processes on fixed parts of a device. On a
device that cannot be divided, each step of requests is followed by work of jobs for the time that
their share would have been worth.
"""

from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Partition, Plan, View
from coserve.scheduling.policies._sides import tune_beside
from coserve.scheduling.policies._turns import next_job, serving_step, slo_s
from coserve.scheduling.policies.base import Policy, setting


@dataclass(frozen=True, kw_only=True)
class SpatialSharing(Policy):
    """Requests and jobs side by side on fixed shares of the device."""

    summary: ClassVar[str] = (
        "requests and jobs side by side on fixed shares of the device (FlexLLM section 8.2)"
    )

    inference_share: float = setting(
        0.6, "Share of the device that requests have.", least=0.05, most=0.95
    )

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        memory, build = serving_step(view, latency)
        job = next_job(view, memory)
        if job is None:
            return build.build()
        if not build.num_rows:  # an arriving request has its share of the device almost at once
            build.tune([job], slo_s(view, memory))
            return build.build()
        if view.num_units > 1 and latency.sharing.partitions:
            partition = min(latency.sharing.partitions, key=self._distance)
            return tune_beside(build, job, latency, partition)
        until_s = build.seconds + (1 / self.inference_share - 1) * build.forward_s
        build.tune([job], until_s, least_share=1 - self.inference_share)
        return build.build()

    def _distance(self, partition: Partition) -> float:
        """Return the distance of a partition from the requests' share."""
        units, others = partition.forward_units, partition.backward_units
        return abs(units / (units + others) - self.inference_share)
