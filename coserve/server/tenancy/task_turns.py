"""A thread pool that tenants share: each has a queue of its own, and the queues take turns.

A tenant's flood thus delays another's work by one piece of work, not by all that came before it.
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
    """A thread pool with one queue for each tenant that has work waiting."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Start with no work.

        Args:
            num_threads: Number of threads.
            name: Prefix of the names of the threads.
        """
        self._pool, self._lock = ThreadPoolExecutor(num_threads, name), Lock()
        self._queues: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant: str, work: Callable[[], Any]) -> "Future[Any]":
        """Queue a function of a tenant; return the future of its result."""
        future: Future[Any] = Future()
        with self._lock:
            self._queues.setdefault(tenant, deque()).append((future, work))
        # One call for each piece of work, but it takes whichever is next in turn.
        self._pool.submit(self._do_next)
        return future

    async def run(self, work: Callable[[], Any]) -> Any:
        """Run a function in the pool, in the turn of the tenant whose request is being answered."""
        return await asyncio.wrap_future(self.submit(current_tenant.get(), work))

    def shutdown(self) -> None:
        """Start no more work."""
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
