"""`coserve cluster`: one server with engines on many nodes, on Ray."""

import inspect
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.connection import Json
from coserve.cli.finished import with_finished_model
from coserve.cli.server_options import server_config, with_server_options
from coserve.errors import ClusterError
from coserve.server.config import ServerConfig
from coserve.version import VERSION

if TYPE_CHECKING:
    from coserve.cluster.ray.claim import DeployClaim
    from coserve.cluster.ray.machine import Served

app = typer.Typer(
    name="cluster",
    help="Run one server on many nodes, with Ray.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="COSERVE_CLUSTER",
        metavar="HOST:PORT",
        help="Address of the Ray cluster to join, as its first coserve cluster up prints it.",
    ),
]
_Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=0,
        metavar="N",
        help=(
            "Number of nodes on this machine, each on one device or, with --tensor-parallel, on "
            "several; 0: none."
        ),
        show_default="as many as its GPUs allow, or 1",
    ),
]
_RayPort = Annotated[
    int | None,
    typer.Option(
        "--ray-port",
        min=1,
        max=65535,
        metavar="PORT",
        help="Port of the Ray cluster that is started here, for machines that join.",
        show_default="6379",
    ),
]
_Placement = Annotated[
    str | None,
    typer.Option(
        "--placement",
        metavar="NAME",
        help="Policy that assigns requests and jobs to nodes.",
        show_default="slack-affinity",
    ),
]
_Fronts = Annotated[
    int | None,
    typer.Option(
        "--fronts",
        min=1,
        metavar="N",
        help="Number of fronts: one answers, the others are on standby and take over when it dies.",
        show_default="1",
    ),
]

_Known = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="COSERVE_CLUSTER",
        metavar="HOST:PORT",
        help="Address of the Ray cluster.",
    ),
]
_DEFAULT_ADDRESS = "127.0.0.1:6379"


@app.callback()
def cluster() -> None:
    """Run one server on many nodes, with Ray."""


@dataclass(frozen=True, kw_only=True)
class _Up:
    """The command line of `coserve cluster up`."""

    address: str | None
    """Address of the Ray cluster to join; None starts one here."""

    nodes: int | None
    """Number of nodes on this machine; None: as many as its GPUs allow."""

    ray_port: int | None
    """Port of a Ray cluster that is started here; None: the default."""

    placement: str | None
    """Name of the placement; None: the default."""

    fronts: int
    """Number of fronts."""

    own: set[str]
    """Names of the options set here, other than the address and the number of nodes."""

    config: ServerConfig
    """Settings of the server, if one is started."""


def _up(
    address: str | None = None,
    nodes: int | None = None,
    ray_port: int | None = None,
    placement: str | None = None,
    fronts: int | None = None,
    **given: Any,
) -> None:
    """Serve MODEL on many nodes: start a cluster here, or join one with this machine's devices.

    The first command starts Ray and the front, which answers as `coserve up` does, and prints the
    command for other machines. MODEL may be the name (ft:…) of a fully fine-tuned model in this
    home. With `--address` alone, or with `--nodes`, this machine joins; the model and all other
    options are then the cluster's own. Files, jobs and adapters (`--home`) must be at a path that
    every node can read. Ctrl-C ends this machine's part gracefully; a second Ctrl-C does not wait
    for requests.
    """
    if address is not None and ray_port is not None:
        raise ClusterError(
            "--ray-port applies to a cluster that this command starts: remove it, or --address"
        )
    _require_ray(creates_token=address is None)
    config = with_finished_model(server_config(**given))
    up = _Up(
        address=address,
        nodes=nodes,
        ray_port=ray_port,
        placement=placement,
        fronts=fronts or 1,
        own=_own_options(given | {"placement": placement, "fronts": fronts}),
        config=config,
    )
    # First of all: the check takes no imports of several seconds, and this machine is not yet part
    # of Ray's cluster, whose devices get nodes.
    served = _ask_cluster(up)
    _check_config(up)
    _run(up, served)


def _ask_cluster(up: _Up) -> "Served | None":
    """Return what the cluster to join serves, and wait for it if this machine can only join.

    Returns:
        What the cluster serves; None if there is no cluster yet, or it serves nothing.

    Raises:
        ClusterError: The command line does not fit what the cluster serves.
    """
    from coserve.cluster.ray.joining import wait_until_served
    from coserve.cluster.ray.machine import served_at

    address = up.address
    if address is None:
        return None
    served = served_at(address)
    # A machine without devices, or with options of its own, serves from here if nobody does yet.
    only_joins = not up.own and up.nodes != 0
    if served is None and only_joins:
        _say(f"nothing is served at {address} yet: this machine joins as soon as a model is")
        served = wait_until_served(lambda: served_at(address), address)
    # A machine without devices can ask Ray itself, which knows of a front that is gone.
    if served is not None and up.nodes != 0:
        _check_joins(address, [served.model], up.own, up.config.model, served.version)
    return served


def _check_config(up: _Up) -> None:
    """Raise an error for settings that no cluster can have, before anything starts."""
    from coserve.cluster.front.front import DEFAULT_PLACEMENT, check_config
    from coserve.cluster.placement import placement_class
    from coserve.cluster.ray.token import check_reach
    from coserve.logs import configure_logs
    from coserve.models.source import check_model
    from coserve.server.serve import listen

    config = up.config
    configure_logs(config.log_format, config.log_level)
    check_config(config)
    try:
        placement_class(up.placement or DEFAULT_PLACEMENT)
    except ValueError as error:
        raise ClusterError(f"--{error}") from None
    check_model(config.model)
    if up.address is None:  # nothing of a cluster that is there already listens here
        check_reach(config.host)
        listen(config.host, config.port).close()


def _run(up: _Up, known: "Served | None") -> None:
    """Take part in a cluster until a signal ends the command.

    Args:
        up: The command line.
        known: What the cluster to join serves, if it serves something.
    """
    from coserve.cluster.ray import commands as ray_commands
    from coserve.cluster.ray.claim import DeployClaim
    from coserve.cluster.ray.machine import DEFAULT_PORT, ClusterKeys, ray_machine

    num_ranks = up.config.tensor_parallel if known is None else known.num_ranks
    number = _num_devices(up.config.device, num_ranks) if up.nodes is None else up.nodes
    # Contexts end in reverse: the fronts, the connection, Ray on this machine, the signals.
    with ExitStack() as leaving:
        claim = _claim_to_serve(up, known, leaving)
        ended = leaving.enter_context(_Signals())
        machine = leaving.enter_context(
            ray_machine(up.address, number, host=up.config.host, port=up.ray_port or DEFAULT_PORT)
        )
        if up.address is None:
            claim = leaving.enter_context(DeployClaim(ClusterKeys(machine.address), at_once=True))
        ray_commands.connect(machine.address)
        leaving.callback(ray_commands.disconnect)
        served = ray_commands.served_models()
        if served:
            _check_joins(machine.address, served, up.own, up.config.model)
            _say(f"{number} {'device joins' if number == 1 else 'devices join'} {machine.address}")
        elif claim is None:
            raise ClusterError(
                f"the front of the cluster at {machine.address} has just ended: join once there is "
                f"another one"
            )
        else:
            _serve(up, machine.address, claim, leaving)
        if claim is not None:
            # The cluster serves by now, and other commands can join it.
            claim.release()
        own_nodes = None if machine.id is None else number
        if (ready := ray_commands.wait_for_nodes(ended.is_set, machine.id, own_nodes)) is not None:
            _say(f"{ready} {'node is' if ready == 1 else 'nodes are'} ready")
        ended.wait()
        if not served:
            _say(
                "the cluster is shutting down: jobs are checkpointed, and resume at the next start"
            )
        elif machine.id is not None:
            _say("this machine leaves the cluster: its jobs continue on other nodes")
            ray_commands.drain_machines(machine.id, _say)


def _claim_to_serve(up: _Up, known: "Served | None", leaving: ExitStack) -> "DeployClaim | None":
    """Return the claim of a command that may serve from here at a cluster that exists already.

    Only one command at a time may start or end the serving of a cluster.
    """
    from coserve.cluster.ray.claim import DeployClaim
    from coserve.cluster.ray.machine import ClusterKeys, served_at

    address = up.address
    if address is None or (known is not None and up.nodes != 0):
        return None
    claim = leaving.enter_context(
        DeployClaim(ClusterKeys(address), waiting=partial(_say_waits, address))
    )
    # Another command may have been first while this one waited.
    if up.nodes != 0 and (served := served_at(address)) is not None:
        _check_joins(address, [served.model], up.own, up.config.model, served.version)
    return claim


def _serve(up: _Up, address: str, claim: "DeployClaim", leaving: ExitStack) -> None:
    """Deploy the fronts on a cluster, and have them end with this command."""
    from coserve.cluster.front.front import DEFAULT_PLACEMENT
    from coserve.cluster.ray import commands as ray_commands
    from coserve.cluster.ray import front as ray_front

    config, placement = up.config, up.placement or DEFAULT_PLACEMENT
    ray_front.check_http(config)
    claim.check()
    leaving.callback(ray_commands.undeploy, config.drain_s)
    where = {} if config.database else ray_commands.this_machine()
    ray_front.deploy(config, placement, resources=where, num_fronts=up.fronts)
    leaving.enter_context(_reloading(ray_commands.reload_keys, config.api_keys_file))
    _say(_start_line(config, address))


def _own_options(given: dict[str, Any]) -> set[str]:
    """Return the names of the options whose values differ from the defaults."""
    usual = ServerConfig()
    return {name for name, value in given.items() if value != getattr(usual, name, None)}


def _check_joins(
    address: str, served: list[str], own: set[str], model: str, version: str = VERSION
) -> None:
    """Check that a command line fits the cluster that it would join.

    Args:
        address: Address of the cluster.
        served: Names of the model that the cluster serves.
        own: Names of the options that the command line sets.
        model: Model of the command line.
        version: Version of coserve in the cluster.

    Raises:
        ClusterError: The command line has options or a model of its own, or the versions differ.
    """
    if own - {"model"} or (own and model not in served):
        raise ClusterError(
            f"the cluster at {address} already serves {served[0] or 'a model'}: to join it, use no "
            "options other than --address and --nodes"
        )
    if version != VERSION:
        raise ClusterError(
            f"the cluster at {address} runs coserve {version}, and this machine has {VERSION}: "
            f"install the same version"
        )


def _say_waits(address: str) -> None:
    _say(f"another coserve cluster up is starting or ending at {address}: waiting for it")


def _start_line(config: Any, address: str) -> str:
    scheme = "http" if config.ssl_certfile is None else "https"
    return (
        f"coserve serves {config.model} at {scheme}://{config.host}:{config.port}/v1; other "
        f"machines join with coserve cluster up --address {address}{_token_line()}"
    )


def _token_line() -> str:
    """Return the place of the token that other machines need to join, if it was created here."""
    from coserve.cluster.ray.token import token_in_use

    path = token_in_use()
    return "" if path is None else f", and the token in {path}"


_NEW = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    for name, default, kind in (
        ("address", None, _Address),
        ("nodes", None, _Nodes),
        ("ray_port", None, _RayPort),
        ("placement", None, _Placement),
        ("fronts", None, _Fronts),
    )
]
app.command("up")(with_server_options(_up, _NEW))


@app.command()
def status(
    address: _Known = _DEFAULT_ADDRESS,
    as_json: Json = False,
) -> None:
    """Show the nodes, what each of them runs, and what waits for a node."""
    _require_ray()
    from coserve.cluster.ray.machine import check_address

    check_address(address)
    from coserve.cli.tables import console, table
    from coserve.cluster.ray import commands as ray_commands

    ray_commands.connect(address)
    try:
        report = ray_commands.status()
    finally:
        ray_commands.disconnect()
    if as_json:
        print(json.dumps(report))
        return
    shown = table("node", "state", "host", "device", ">requests", ">jobs", ">free pages", "problem")
    for node in report["nodes"]:
        pages = "" if node["pages"] is None else f"{node['free_pages']} of {node['pages']}"
        numbers = (str(node["requests"]), str(len(node["jobs"])), pages)
        shown.add_row(
            node["name"],
            node["state"],
            node["host"] or "",
            node["device"] or "",
            *numbers,
            node["problem"] or "",
        )
    console().print(shown)
    print(
        f"{len(report['waiting'])} waiting for a node"
        + "".join(f"\n  {each}" for each in report["waiting"])
    )


@app.command()
def drain(
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="[NODE]",
            help="Name of the node, as in coserve cluster status.",
            show_default=False,
        ),
    ] = None,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help=(
                "Drain all nodes of this machine before it is switched off; their open requests "
                "finish first."
            ),
        ),
    ] = False,
    address: _Known = _DEFAULT_ADDRESS,
) -> None:
    """Stop assigning work to a node, and move its jobs to other nodes from their checkpoints."""
    if (node is None) != here:
        raise ClusterError("name one NODE to drain, or use --here for all nodes of this machine")
    _require_ray()
    from coserve.cluster.ray.machine import check_address

    check_address(address)
    from coserve.cluster.ray import commands as ray_commands
    from coserve.cluster.ray.joining import MOVE_S

    ray_commands.connect(address)
    try:
        if node is not None:
            ray_commands.drain(node, MOVE_S)
        else:
            ray_commands.drain_machines(None, _say)
    finally:
        ray_commands.disconnect()
    _say(
        "the nodes of this machine have drained"
        if node is None
        else f"{node} drains: its jobs have moved"
    )


def _say(line: str) -> None:
    with suppress(OSError):  # a terminal that was closed; what there is to do is done all the same
        print(line, flush=True)


def _require_ray(*, creates_token: bool = False) -> None:
    """Raise ClusterError if Ray is not installed; prepare what it reads when it is imported."""
    if find_spec("ray") is None:
        raise ClusterError(
            "clusters need Ray, which is not installed: pip install 'coserve[cluster]'"
        )
    from coserve.cluster.ray.token import use_token

    use_token(creates=creates_token)


def _num_devices(device: str, num_ranks: int) -> int:
    """Return the default number of nodes of this machine: one for each group of GPUs, or 1."""
    if device == "cpu":
        return 1
    import torch

    from coserve.cluster.ray.resources import num_nodes_of

    return num_nodes_of(torch.cuda.device_count(), num_ranks)


@contextmanager
def _reloading(reload: Callable[[], None], keys_file: str | None) -> Iterator[None]:
    """Reload the keys' file on SIGHUP while the context lasts; without a file, SIGHUP ends the
    command.
    """
    if keys_file is None:
        yield
        return

    def read(number: int, frame: object) -> None:
        threading.Thread(
            target=_told, args=(reload,)
        ).start()  # the main thread may be anywhere now

    before = signal.signal(signal.SIGHUP, read)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _told(reload: Callable[[], None]) -> None:
    try:
        reload()
    except ClusterError as error:
        print(error, file=sys.stderr, flush=True)


class _Signals:
    """A context whose event is set by the first SIGINT, SIGTERM or end of the terminal; the second
    one ends the process.
    """

    def __enter__(self) -> threading.Event:
        ended = threading.Event()

        def end(number: int, frame: object) -> None:
            if ended.is_set():
                raise KeyboardInterrupt
            ended.set()

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, end) for number in numbers}
        return ended

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
