"""Threads that tenants share: the work of each waits in a queue of its own, and the queues take
turns.

One tenant's flood so keeps another's work waiting for one piece of work, not for all that came
before it.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from threading import Lock
from typing import Any

# The tenant whose HTTP request is being answered; "" where nobody asks.
current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")


class TenantTurns:
    """A pool of threads with one queue for each tenant that has work waiting."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Start with no work; name: of the threads."""
        self._pool, self._lock = ThreadPoolExecutor(num_threads, name), Lock()
        self._queues: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant: str, work: Callable[[], Any]) -> "Future[Any]":
        """Have a thread do this once the tenant's turn has come."""
        future: Future[Any] = Future()
        with self._lock:
            self._queues.setdefault(tenant, deque()).append((future, work))
        self._pool.submit(self._do_next)
        return future

    async def run(self, work: Callable[[], Any]) -> Any:
        """Return what a thread makes of this, in the turn of the tenant that is being answered."""
        return await asyncio.wrap_future(self.submit(current_tenant.get(), work))

    def shutdown(self) -> None:
        """Begin no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _do_next(self) -> None:
        with self._lock:
            tenant, queue = self._queues.popitem(last=False)
            future, work = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # after those of all others
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
