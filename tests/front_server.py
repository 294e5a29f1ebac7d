"""`coserve up` as a cluster's front: the same options, with two nodes of this machine, and without
Ray."""

import asyncio
import signal
import socket

import uvicorn
from cluster_nodes import num_ready

import coserve.server.serve
from coserve.cluster.front.front import DEFAULT_PLACEMENT, Front, check_config, node_settings
from coserve.cluster.nodes.node import NodeServer
from coserve.engine_client.fork_server import ForkServer
from coserve.server.config import ServerConfig
from coserve.server.serve import Watcher
from coserve.worker.process import main as run_engine

# What `coserve up` does first, to be one.
AS_FRONT = "import front_server; front_server.install()"
NUM_NODES = 2


def install() -> None:
    coserve.server.serve.serve = _serve


async def _serve(config: ServerConfig, watcher: Watcher) -> None:
    check_config(config)
    forks = [
        ForkServer(run_engine, config.model) for _ in range(NUM_NODES)
    ]  # before there are threads
    nodes = {
        f"node-{number}": NodeServer(node_settings(config), launch=each.launch)
        for number, each in enumerate(forks)
    }

    async def find() -> dict[str, NodeServer]:
        return nodes

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    front = Front(config, find, DEFAULT_PLACEMENT)
    app = await front.start()
    listening = socket.create_server((config.host, config.port))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, ws="none"))
    serving = asyncio.create_task(
        server._serve(sockets=[listening])
    )  # whose signals are this function's affair
    try:
        while num_ready(front.link) < NUM_NODES:
            await asyncio.sleep(0.05)
        print(
            f"coserve serves {config.model}: http://{config.host}:{listening.getsockname()[1]}/v1",
            flush=True,
        )
        await ended.wait()
    finally:
        await front.stop()
        server.should_exit = True
        await serving
        await asyncio.gather(*(node.stop() for node in nodes.values()))
        for each in forks:
            each.close()
