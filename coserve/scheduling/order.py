"""The order in which waiting requests get their turn: on a device, and in the queue of a cluster.

What the order depends on is read by functions, since a cluster's tasks have it elsewhere than an
engine's requests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")

_PRIORITY, _DUE_S, _TENANT = (
    attrgetter("info.priority"),
    attrgetter("info.batch_due_s"),
    attrgetter("info.tenant"),
)


def by_priority(waiting: Sequence[T], priority: Callable[[T], int] = _PRIORITY) -> Sequence[T]:
    """Return requests in the order of their priorities, and of one priority in the order given."""
    return sorted(waiting, key=priority) if any(map(priority, waiting)) else waiting


def by_due(batch: Sequence[T], due_s: Callable[[T], float | None] = _DUE_S) -> list[T]:
    """Return batch work with what should be done first at the front: nobody waits for it, whatever
    its priority.
    """
    return sorted(batch, key=lambda request: due_s(request) or 0.0)


def by_share(
    waiting: Sequence[T],
    served: Mapping[str, float],
    cost: Callable[[T], float],
    tenant_of: Callable[[T], str] = _TENANT,
) -> Iterator[T]:
    """Yield again and again the first request of the tenant that has been served least, which pays
    for it (Algorithm 4 of FlexLLM's appendix C).

    Args:
        served: Weighted tokens by tenant; 0 for others.
        cost: Weighted tokens of a request.
    """
    served, by_tenant = dict(served), dict[str, list[T]]()
    for request in reversed(waiting):
        by_tenant.setdefault(tenant_of(request), []).append(request)
    while by_tenant:
        tenant = min(by_tenant, key=lambda name: (served.get(name, 0.0), -len(by_tenant[name])))
        request = by_tenant[tenant].pop()
        served[tenant] = served.get(tenant, 0.0) + cost(request)
        if not by_tenant[tenant]:
            del by_tenant[tenant]
        yield request
