"""In which order requests get on that wait: on a device, and in the queue of a cluster."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar


class InOrder(Protocol):
    """What the order of requests depends on, beside when they came; see `RequestView`."""

    @property
    def priority(self) -> int: ...

    @property
    def batch_due_s(self) -> float | None: ...

    @property
    def tenant(self) -> str: ...


T = TypeVar("T", bound=InOrder)


def by_priority(waiting: Sequence[T]) -> Sequence[T]:
    """Requests in the order of their priorities, and of one priority in the order given."""
    if all(not request.priority for request in waiting):
        return waiting
    return sorted(waiting, key=lambda request: request.priority)


def by_due(batch: Sequence[T]) -> list[T]:
    """Batch work, what should be done first before all else: nobody waits for it, whatever its priority."""
    return sorted(batch, key=lambda request: request.batch_due_s or 0.0)


def by_share(waiting: Sequence[T], served: Mapping[str, float], cost: Callable[[T], float]) -> Iterator[T]:
    """Again and again the first request of the tenant that has been served least, which pays for it (Algorithm 4 of
    FlexLLM's appendix C). served: by tenant; 0 for others.
    """
    served, by_tenant = dict(served), dict[str, list[T]]()
    for request in reversed(waiting):
        by_tenant.setdefault(request.tenant, []).append(request)
    while by_tenant:
        tenant = min(by_tenant, key=lambda name: (served.get(name, 0.0), -len(by_tenant[name])))
        request = by_tenant[tenant].pop()
        served[tenant] = served.get(tenant, 0.0) + cost(request)
        if not by_tenant[tenant]:
            del by_tenant[tenant]
        yield request
