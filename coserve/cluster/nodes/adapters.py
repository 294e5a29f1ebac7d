"""Adapters that clients have loaded: on every node, and on each that joins before it is used."""

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress

from coserve.cluster.nodes.registry import ClusterNode
from coserve.engine.commands import AdapterRef
from coserve.errors import AdapterError, CoserveError, EngineGoneError

_log = logging.getLogger(__name__)


class ClusterAdapters:
    """Adapters that were loaded since this front began; nodes read older ones when a request names
    them.

    Belongs to one event loop.
    """

    def __init__(self, nodes: Callable[[], Collection[ClusterNode]], most: int) -> None:
        """Begin without adapters.

        Args:
            nodes: Returns the nodes that are used.
            most: Number of adapters that stay on a device.
        """
        self._nodes = nodes
        self._most = most
        self._refs: dict[str, AdapterRef] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._refs)

    async def load(self, adapter: AdapterRef) -> None:
        """Load an adapter on every node, or, if one cannot read it, on none.

        Raises:
            AdapterError: A node cannot read the adapter; the message names the node.
        """
        self._refs[adapter.name] = adapter  # nodes that join meanwhile need it, too
        try:
            await self._load(adapter, self._nodes())
        except BaseException:
            self._forget(adapter.name)
            raise

    async def _load(self, adapter: AdapterRef, nodes: Collection[ClusterNode]) -> None:
        outcomes = await asyncio.gather(
            *(each.link.load_adapter(adapter) for each in nodes), return_exceptions=True
        )
        failed = [
            (node, error) for node, error in zip(nodes, outcomes, strict=True) if error is not None
        ]
        refusals = [
            (node, error) for node, error in failed if not isinstance(error, EngineGoneError)
        ]
        if refusals:
            await self.unload(adapter.name)
            node, error = refusals[0]
            if isinstance(error, AdapterError) and len(refusals) < len(nodes):
                raise AdapterError(
                    f"{error} (on the node {node.name}: every node must be able to read it)"
                ) from error
            raise error
        # Every engine has died, so no node has the adapter.
        if len(failed) == len(nodes):
            raise failed[0][1]

    async def unload(self, name: str) -> None:
        """Unload an adapter from every node."""
        self._forget(name)
        nodes = self._nodes()
        for node in nodes:
            if node.tracker is not None:
                node.tracker.adapters.discard(name)
        outcomes = await asyncio.gather(
            *(each.link.unload_adapter(name) for each in nodes), return_exceptions=True
        )
        for error in outcomes:
            if error is not None and not isinstance(
                error, EngineGoneError
            ):  # one that is gone does not have it
                raise error

    # -- nodes that come ------------------------------------------------------------------

    async def load_on(self, node: ClusterNode, has: set[str]) -> None:
        """Load the newest adapters on a node that is not used yet, as many as stay there, and
        unload others.

        Args:
            node: The node.
            has: Names of the adapters that it has; changes with them.

        Raises:
            AdapterError: The node cannot have an adapter that others have.
            EngineGoneError: The node's engine has died.
        """
        while wanted := self._wanted(has):
            name, adapter = wanted
            if adapter is None:
                has.discard(name)
                await node.link.unload_adapter(name)
                continue
            has.add(name)
            try:
                await node.link.load_adapter(adapter)
            except EngineGoneError:
                raise
            except CoserveError as error:
                has.discard(name)
                self._cannot_have(node, adapter, error)

    async def wait(self, limit_s: float) -> None:
        """Wait until an adapter is unloaded, but no longer than `limit_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), limit_s)

    def _wanted(self, has: set[str]) -> tuple[str, AdapterRef | None] | None:
        """Return the name of an adapter that a node is to load, or, with None, to unload; None if
        it has all that it should have.
        """
        newest = dict(list(self._refs.items())[-self._most :])
        for name in has - self._refs.keys():
            return name, None
        return next(((name, adapter) for name, adapter in newest.items() if name not in has), None)

    def _cannot_have(self, node: ClusterNode, adapter: AdapterRef, error: CoserveError) -> None:
        if adapter.name not in self._refs:
            return
        shown, where = adapter.name.partition("#")[0].strip("/"), adapter.directory
        if self._nodes():
            raise AdapterError(
                f"it cannot have the adapter {shown} in {where}, which the others have: {error}; "
                f"every node must be "
                "able to read it"
            )
        _log.error(
            "no node has the adapter %s in %s, and %s cannot have it: %s",
            shown,
            where,
            node.name,
            error,
        )
        self._forget(adapter.name)

    def _forget(self, name: str) -> None:
        if self._refs.pop(name, None) is not None:
            # Wakes those who wait now; later waiters get an event that is not set.
            news, self._news = self._news, asyncio.Event()
            news.set()
