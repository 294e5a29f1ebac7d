"""The front: the application that one device's server is, with the engines of a cluster in place of
one.

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
# A front that ends keeps the home until its jobs have their checkpoints.
_LOCK_WAIT_S = 30.0
_POLL_S = 0.2
# Of what a node has fetched by a URL, or written for it; what was used longest ago makes room.
_CACHE_BYTES = 10 * 10**9


class Front:
    """One server of a cluster; belongs to one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        find_nodes: FindNodes,
        placement: str,
        settings: Mapping[str, Any] | None = None,
        checks: NodeChecks | None = None,
    ) -> None:
        """placement, settings: see `make_placement`, with its ValueError. checks: of nodes
        (default: that they have the settings of `node_settings`; those that have others are not
        used).
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
        """Read all that needs no home: of the model, and of what it was started with. Errors as of
        `start`.
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
        """The application; it answers from now on, and is ready as soon as a node is. wait_s: for
        the home.

        Raises:
            CoserveError: the home is another's, the store cannot be opened, or there is no such
                model.
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
        """Take no new requests, and let those that are open come to their ends, within this time;
        by the last one that was said.
        """
        clock = asyncio.get_running_loop().time
        self._finish_s = clock() + wait_s
        if self._context is not None:
            await stop_batches(self._context)
        self.link.close_to_requests()
        while self.link.num_open and not self.link.is_silent and clock() < self._finish_s:
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Let jobs have their checkpoints, and give the home back; once, however often it is asked
        for.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await self.link.stop()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        if self._context is not None:
            await stop_jobs(self._context)
        await self._close()

    async def _close(self) -> None:
        """What was opened; the home last."""
        self._checks.end()
        if (context := self._context) is not None:
            self._context = None
            await close_context(context)
        self._open.close()

    async def _lock(self, wait_s: float) -> None:
        """The home's; another front may be just about to end."""
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
    """What tokens cost tenants, where the engines' policy shares out requests among these."""
    policy = make_policy(config.engine.policy, config.engine.policy_settings)
    return policy.token_weights if policy.is_fair else None


def node_settings(config: ServerConfig) -> NodeSettings:
    """What every node of a server is to be. Blocks."""
    # Requests are placed by the nodes' profiles, which therefore are measured first.
    engine = replace(engine_settings(config), files_cache_bytes=_CACHE_BYTES, measures_first=True)
    try:
        digest = sampled_digest(files) if (files := model_files(config.model)) else ""
    except OSError:  # it may be elsewhere on nodes
        digest = ""
    return NodeSettings(
        engine=engine,
        timeout_s=config.engine_timeout_s,
        home=str(config.directory),
        model_files=digest,
    )


def check_config(config: ServerConfig) -> None:
    """CoserveError for options that are of one device's server alone."""
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
