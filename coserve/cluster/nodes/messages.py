"""Messages between a front and a node, beside those of the engine's process
(`coserve.protocol.messages`).

Clocks of machines differ: both sides send what their own clock shows, and translate.
"""

from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from coserve.cluster.nodes.shared_paths import SharedPaths
from coserve.protocol.messages import EngineSettings, Report


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which a front makes a node."""

    engine: EngineSettings
    """Settings of the node's engine."""
    timeout_s: float
    """Seconds of silence after which the engine is restarted: `Supervisor`."""
    home: str = ""
    """The front's home."""
    model_files: str = ""
    """Digest of the model's files as the front sees them; "" if the model is not a directory there.
    """


def settings_digest(settings: NodeSettings) -> str:
    """Return a digest that is the same on the front and on the node."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    # An integer that was passed for a float arrives as a float.
    arrived = decode(encode(settings), type=NodeSettings)
    return blake2b(encode(arrived), digest_size=16).hexdigest()


class NodeEngineLost(msgspec.Struct, tag=True, frozen=True):
    """Report that the node's engine has died, and that another one is being started."""

    reason: str
    """Why it has died, in one line."""
    jobs_at_death: tuple[str, ...] | None
    """Jobs that it may have died of: `EngineHost.jobs_at_death`."""


class CommandBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Commands that a front sends at once."""

    number: int
    """1 for a session's first batch, and so forth."""
    now_s: float
    """Time of sending, by the front's clock."""
    seen: int
    """Number of the newest report that the front has taken in: commands for an engine that has died
    since are for no other.
    """
    commands: list[bytes]
    """Encoded commands, in order."""


class NodeReports(msgspec.Struct, frozen=True, kw_only=True):
    """Reports of a node's engine since the front last asked."""

    reports: list[bytes]
    """Encoded reports, in order."""
    last: int
    """Number of the newest report."""
    now_s: float
    """Time of sending, by the node's clock."""
    silent_s: float
    """Seconds since the engine was heard of."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a node, for people and for those who decide whether to use it."""

    version: str
    """Version of coserve."""
    host: str
    """Name of its machine."""
    pid: int
    """Id of its process."""
    state: str
    """"starting", "ready", or "failed" if its engine cannot start with its settings."""
    settings: str = ""
    """Digest of its settings."""
    error: str | None = None
    """Why it has failed, in one line."""
    device: str | None = None
    """Device of its engine."""
    model: str | None = None
    """Model that it serves."""
    dtype: str | None = None
    """Dtype of the model."""
    num_restarts: int = 0
    """Number of engines that have died."""
    machine: str | None = None
    """Ray's id of its machine; None if the node is not on Ray."""


class NodeCalls(Protocol):
    """Calls to a node. Each raises EngineGoneError if it was not answered, or not by the node that
    is attached.
    """

    async def describe(self) -> NodeStatus:
        """Return the node's status, attached or not."""
        ...

    async def compare_files(self, shared: SharedPaths) -> str | None:
        """Return in one line what the node does not see there as the front does; None if it sees
        all.
        """
        ...

    async def attach(self, session: str) -> None:
        """Begin a session with a fresh engine: work of another session is forgotten."""
        ...

    async def send(self, session: str, batch: "CommandBatch") -> None:
        """Send commands in order; a batch is taken once, however often it is sent."""
        ...

    async def reports(self, session: str, after: int, wait_s: float) -> NodeReports:
        """Return the reports after a number, which acknowledges those before it; wait for some, but
        no longer than `wait_s`.
        """
        ...

    async def detach(self, session: str) -> None:
        """End the session: the engine forgets all."""
        ...


_decoder = msgspec.msgpack.Decoder(Report | NodeEngineLost)


def decode_node_report(message: bytes) -> Any:
    """Return a `Report` or a `NodeEngineLost`."""
    return _decoder.decode(message)
