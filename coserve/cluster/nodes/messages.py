"""What a front and a node say to each other, beside what the engine's process says
(`coserve.protocol.messages`).

Clocks of machines differ: both sides say what their own shows when they send, and translate.
"""

from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from coserve.cluster.nodes.shared_paths import SharedPaths
from coserve.protocol.messages import EngineSettings, Report


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is to be. timeout_s: see `Supervisor`. home: the front's. model_files: a digest
    of the model as the front sees it; "": it is no directory there.
    """

    engine: EngineSettings
    timeout_s: float
    home: str = ""
    model_files: str = ""


def settings_digest(settings: NodeSettings) -> str:
    """The same where they are given, and where they have arrived."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    # What was given as a whole number arrives as what it is declared to be.
    arrived = decode(encode(settings), type=NodeSettings)
    return blake2b(encode(arrived), digest_size=16).hexdigest()


class NodeEngineLost(msgspec.Struct, tag=True, frozen=True):
    """The node's engine has died, and another one is being started. jobs_at_death: see
    `EngineHost`.
    """

    reason: str
    jobs_at_death: tuple[str, ...] | None


class CommandBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What a front says at once. number: 1 for a session's first. now_s: by the front's clock.
    seen: the newest report that the front has taken in: what it says to an engine that has died
    since is for no other.
    """

    number: int
    now_s: float
    seen: int
    commands: list[bytes]


class NodeReports(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's engine has reported since it was last asked. last: number of the newest of
    them. now_s: by the node's clock. silent_s: since the engine was heard of.
    """

    reports: list[bytes]
    last: int
    now_s: float
    silent_s: float


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node, for people and for those who decide whether to use it. state: "starting", "ready", or
    "failed" with an error, if its engine cannot start as it was asked. settings: their digest.
    machine: Ray's id of where it is; None: it is not on Ray.
    """

    version: str
    host: str
    pid: int
    state: str
    settings: str = ""
    error: str | None = None
    device: str | None = None
    model: str | None = None
    dtype: str | None = None
    num_restarts: int = 0
    machine: str | None = None


class NodeCalls(Protocol):
    """A node as the front sees it; each call raises EngineGoneError if it was not answered, or not
    by the node that is attached.
    """

    async def describe(self) -> NodeStatus:
        """How it is, attached or not."""
        ...

    async def look_at(self, shared: SharedPaths) -> str | None:
        """What it does not see there as the front does; None: it sees all."""
        ...

    async def attach(self, session: str) -> None:
        """Be this session's from now on, with a fresh engine: what was asked by another is
        forgotten.
        """
        ...

    async def send(self, session: str, batch: "CommandBatch") -> None:
        """Commands in order; a batch is taken once, however often it comes."""
        ...

    async def reports(self, session: str, after: int, wait_s: float) -> NodeReports:
        """Those after a number, which says that earlier ones have arrived; waits for some, but no
        longer than that.
        """
        ...

    async def detach(self, session: str) -> None:
        """Nothing more is asked of it: the engine forgets all."""
        ...


_decoder = msgspec.msgpack.Decoder(Report | NodeEngineLost)


def decode_node_report(message: bytes) -> Any:
    """A `Report`, or `NodeEngineLost`."""
    return _decoder.decode(message)
