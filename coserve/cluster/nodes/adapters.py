"""Adapters that clients have loaded: on every node, and on each that comes later before it is
used.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress

from coserve.cluster.nodes.registry import ClusterNode
from coserve.engine.commands import AdapterRef
from coserve.errors import AdapterError, CoserveError, EngineGoneError

_log = logging.getLogger(__name__)


class ClusterAdapters:
    """Since this front began; nodes read what was loaded before when it is asked for. Belongs to
    one event loop.
    """

    def __init__(self, nodes: Callable[[], Collection[ClusterNode]], most: int) -> None:
        """nodes: those that are used. most: as many stay on a device."""
        self._nodes, self._most = nodes, most
        self._refs: dict[str, AdapterRef] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._refs)

    async def load(self, adapter: AdapterRef) -> None:
        """On every node, or, if one cannot read it, on none: AdapterError names that."""
        self._refs[adapter.name] = adapter  # those that come meanwhile need it, too
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
        wrong = [(node, error) for node, error in failed if not isinstance(error, EngineGoneError)]
        if wrong:
            await self.unload(adapter.name)
            node, error = wrong[0]
            if isinstance(error, AdapterError) and len(wrong) < len(nodes):
                raise AdapterError(
                    f"{error} (on the node {node.name}: every node must be able to read it)"
                ) from error
            raise error
        if len(failed) == len(nodes):
            raise failed[0][1]

    async def unload(self, name: str) -> None:
        """On every node."""
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

    async def bring(self, node: ClusterNode, has: set[str]) -> None:
        """Have a node that is not used yet have them, as many as stay there, and no others. has:
        those that it has.

        Raises:
            AdapterError: it cannot have one that others have. EngineGoneError: it is gone.
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
        """Until others are to be had, but no longer than that."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), limit_s)

    def _wanted(self, has: set[str]) -> tuple[str, AdapterRef | None] | None:
        """One that a node is to have; or, with None, to have no more. None: it has all, and no
        others.
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
            news, self._news = self._news, asyncio.Event()
            news.set()
