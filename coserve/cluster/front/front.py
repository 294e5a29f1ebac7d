"""The front: the application of one device's server, with the engines of a cluster in place of one.

Only one front at a time has the store and the files, as only one server has a home: it holds the
home's lock.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from msgspec.structs import replace

from coserve.cluster.front.link import ClusterLink
from coserve.cluster.front.routes import router
from coserve.cluster.nodes.checks import NodeChecks
from coserve.cluster.nodes.messages import NodeSettings
from coserve.cluster.nodes.registry import FindNodes
from coserve.cluster.nodes.shared_paths import sampled_digest
from coserve.cluster.placement import make_placement
from coserve.cluster.scheduler import ClusterScheduler
from coserve.errors import CoserveError
from coserve.home import private_files
from coserve.jobs.files.remote_files import files_url, shared_files
from coserve.jobs.files.shared_files import SharedFiles
from coserve.models.source import model_files
from coserve.scheduling.fairness import TokenWeights
from coserve.scheduling.policies import make_policy
from coserve.server.adapters.catalogue import adapters_from_directories
from coserve.server.app import create_app
from coserve.server.config import ServerConfig
from coserve.server.context import ServerContext
from coserve.server.lifecycle.home_lock import lock_home
from coserve.server.lifecycle.job_service import start_jobs, stop_batches, stop_jobs
from coserve.server.serve import check_certificate, close_context, engine_settings, server_context

_log = logging.getLogger(__name__)

DEFAULT_PLACEMENT = "slack-affinity"
# Time to wait for the home: a front that ends keeps it until its jobs have their checkpoints.
_LOCK_WAIT_S = 30.0
_POLL_S = 0.2
# Size of a node's cache of files that come and go by a URL; the least recently used are evicted.
_CACHE_BYTES = 10 * 10**9


class Front:
    """One server of a cluster. Belongs to one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        find_nodes: FindNodes,
        placement: str,
        settings: Mapping[str, Any] | None = None,
        checks: NodeChecks | None = None,
    ) -> None:
        """Prepare a front.

        Args:
            config: Options of the server.
            find_nodes: Finds the nodes of the cluster.
            placement: Name of the placement.
            settings: Settings of the placement.
            checks: Checks of nodes (default: that they have the settings of `node_settings`; others
                are not used).

        Raises:
            ValueError: There is no such placement, or it has no such setting.
        """
        self.config = config
        self._checks = checks or NodeChecks(node_settings(config))
        scheduler = ClusterScheduler(make_placement(placement, settings), _weights(config))
        self.link = ClusterLink(
            find_nodes, scheduler, config.directory, _shared(config), self._checks
        )
        self._open = ExitStack()
        self._running: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._finish_s = 0.0
        self._context: ServerContext | None = None

    async def prepare(self) -> None:
        """Read all that needs no home: of the model, and of the server's options.

        Raises:
            CoserveError: As in `start`.
        """
        self._open.enter_context(private_files())
        try:
            self._context = context = server_context(self.config, self.link)
            await context.prompts.load()
            await context.generation.public_prefixes.load(context.prompts)
        except BaseException:
            await self._close()
            raise

    async def start(self, wait_s: float = _LOCK_WAIT_S) -> FastAPI:
        """Return the application, which answers from now on and is ready as soon as a node is.

        Args:
            wait_s: Seconds to wait for the home.

        Raises:
            CoserveError: The home is another server's, the store cannot be opened, or there is no
                such model.
        """
        if self._context is None:
            await self.prepare()
        context = self._context
        assert context is not None
        try:
            await self._lock(wait_s)
            context.keys.reload()  # it may have stood by for a long time
            await start_jobs(context)
            await asyncio.to_thread(
                self._checks.begin, lambda: adapters_from_directories(context.models.catalogues)
            )
        except BaseException:
            await self._close()
            raise
        self._running = asyncio.create_task(self.link.run())
        app = create_app(context)
        app.include_router(router)
        return app

    def reload_keys(self) -> None:
        """Read the keys' file again."""
        if self._context is not None:
            self._context.keys.reload()

    async def finish(self, wait_s: float) -> None:
        """Refuse new requests, and wait for open ones for `wait_s`; if called again, for the later
        call's time.
        """
        clock = asyncio.get_running_loop().time
        self._finish_s = clock() + wait_s
        if self._context is not None:
            # Batches would otherwise send new requests for as long as this waits.
            await stop_batches(self._context)
        self.link.close_to_requests()
        while self.link.num_open and not self.link.is_silent and clock() < self._finish_s:
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Have jobs write their checkpoints, and release the home; done once, however often it is
        called.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        # A caller that is cancelled does not interrupt the shutdown.
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        # Jobs write their checkpoints while the store still records reports.
        await self.link.stop()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        if self._context is not None:
            await stop_jobs(self._context)
        await self._close()

    async def _close(self) -> None:
        """Close what was opened, the home last."""
        self._checks.end()
        if (context := self._context) is not None:
            self._context = None
            await close_context(context)
        self._open.close()

    async def _lock(self, wait_s: float) -> None:
        """Lock the home; another front may be just about to release it."""
        directory, left_s = self.config.directory, wait_s
        while True:
            try:
                self._open.enter_context(lock_home(directory))
                return
            except CoserveError:
                if left_s <= 0:
                    raise
            await asyncio.sleep(_POLL_S)
            left_s -= _POLL_S


def _shared(config: ServerConfig) -> SharedFiles:
    return shared_files(files_url(config.files_url), config.directory)


def _weights(config: ServerConfig) -> TokenWeights | None:
    """Return what tokens cost tenants where the engines' policy shares out requests among these."""
    policy = make_policy(config.engine.policy, config.engine.policy_settings)
    return policy.token_weights if policy.is_fair else None


def node_settings(config: ServerConfig) -> NodeSettings:
    """Return the settings of every node of a server. Blocks."""
    # Placements need the nodes' profiles, which therefore are measured before a node is ready.
    engine = replace(engine_settings(config), files_cache_bytes=_CACHE_BYTES, measures_first=True)
    try:
        digest = sampled_digest(files) if (files := model_files(config.model)) else ""
    except OSError:  # nodes may have the model elsewhere
        digest = ""
    return NodeSettings(
        engine=engine,
        timeout_s=config.engine_timeout_s,
        home=str(config.directory),
        model_files=digest,
    )


def check_config(config: ServerConfig) -> None:
    """Check the options of a cluster's server.

    Raises:
        CoserveError: An option belongs to the server of one device alone, or cannot be used here.
    """
    for name, option in _OF_ONE_DEVICE.items():
        if getattr(config, name) != getattr(ServerConfig(), name):
            raise CoserveError(
                f"{option} is for coserve up, the server of one device; leave it out"
            )
    check_certificate(config.ssl_certfile, config.ssl_keyfile)
    _shared(config).check()
    for path in config.allow_adapter_paths:
        if not Path(path).is_dir():
            raise CoserveError(
                f"--allow-adapter-paths {path} is not a directory here; every node must be able to "
                f"read it"
            )


_OF_ONE_DEVICE = {
    "record": "--record",
    "role": "--role",
    "prefill_socket": "--prefill-socket",
    "prefill_min_tokens": "--prefill-min-tokens",
}
