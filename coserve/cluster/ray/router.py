"""Router of requests to the front that answers. A module of its own: Ray Serve's HTTP servers
import it, and would import PyTorch with all that a front runs.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from coserve.cluster.front.choice import choose_front


class FrontRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """A router that has Ray Serve give every request, and every call, to the front that answers."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Where no front answers, Ray asks again after a while, and not in a tight loop.
            pending_request.routing_context.should_backoff = True
        return [choose_front({replica: replica.routing_stats for replica in candidate_replicas})]
