"""Checks of a node before the front uses it: that it has the front's settings, and sees the same
files.

A node outlives fronts. One that another front has made with other settings is replaced.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from coserve.adapters.file_names import CONFIG_FILE, WEIGHTS_FILE
from coserve.cluster.nodes.messages import NodeCalls, NodeSettings, NodeStatus, settings_digest
from coserve.cluster.nodes.shared_paths import (
    ExpectedFiles,
    SharedPaths,
    sampled_digest,
    write_probe,
)
from coserve.engine.config import EngineConfig
from coserve.errors import ClusterError
from coserve.jobs.records import AdapterRecord
from coserve.protocol.messages import Ready

# Time for a node to look at its files, and the number of adapters, the newest, among them.
_LOOK_S, _MAX_ADAPTERS = 60.0, 1_000
# Returns the adapters that are served from directories of their own.
FindAdapters = Callable[[], Sequence[AdapterRecord]]


class NodeChecks:
    """Checks of a front on nodes. Without settings, and until `begin`, every node passes.

    Belongs to one event loop.
    """

    def __init__(
        self,
        settings: NodeSettings | None = None,
        renew: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """Begin without a home.

        Args:
            settings: Settings that all nodes are to have; None: any.
            renew: Replaces the node of a name by one with these settings.
        """
        self._settings = settings
        self._renew = renew
        self._digest = None if settings is None else settings_digest(settings)
        self._renewed: set[str] = set()
        self._probe: Path | None = None
        self._find_adapters: FindAdapters | None = None

    def begin(self, find_adapters: FindAdapters | None = None) -> None:
        """Write a probe into the home, which is the front's from now on. Blocks.

        Args:
            find_adapters: Returns the adapters that all nodes must be able to read, too.

        Raises:
            ClusterError: The home cannot be written.
        """
        self._find_adapters = find_adapters
        if self._settings is None or self._settings.engine.files_url is not None:
            return
        try:
            self._probe = write_probe(Path(self._settings.home))
        except OSError as error:
            raise ClusterError(
                f"{self._settings.home} cannot be written: {error.strerror}; choose another --home"
            ) from None

    def end(self) -> None:
        """Remove the probe; the home is not the front's any more."""
        if self._probe is not None:
            self._probe.unlink(missing_ok=True)
        self._probe = self._find_adapters = None

    @property
    def most_adapters(self) -> int:
        """Number of adapters that stay on a device."""
        return (
            EngineConfig() if self._settings is None else self._settings.engine.engine
        ).max_adapters

    # -- what a node is ---------------------------------------------------------------

    def has_other_settings(self, status: NodeStatus) -> bool:
        """Return whether a node's settings differ from those that this front gives."""
        return self._digest is not None and status.settings != self._digest

    async def renew(self, name: str) -> None:
        """Replace a node by one with this front's settings.

        Raises:
            ClusterError: The node cannot be replaced, or has been and its settings still differ.
        """
        if self._renew is None or name in self._renewed:
            raise ClusterError(
                "it was started with other settings than this front gives: start it with the same "
                "ones"
            )
        await self._renew(name)
        self._renewed.add(name)

    def engine_mismatch(self, ready: Ready) -> str | None:
        """Return in one line how a node's engine differs from what this front is for; None if it
        does not.
        """
        if self._settings is None:
            return None
        asked = self._settings.engine
        for name, ours in (("model", asked.model), ("dtype", asked.dtype)):
            if ours != "auto" and (its := getattr(ready, name)) != ours:
                return (
                    f"its {name} is {its}, and that of this front {ours}: start it as the front was"
                )
        return None

    # -- what a node sees -------------------------------------------------------------

    @property
    def looks_at_files(self) -> bool:
        """True if `unseen` asks nodes at all."""
        return self._probe is not None or self._find_adapters is not None

    async def unseen(self, calls: NodeCalls, *, home_alone: bool = False) -> str | None:
        """Return in one line what a node does not see as this front does; None if it sees all.

        Args:
            calls: The node.
            home_alone: Whether adapters are left out.

        Raises:
            EngineGoneError, TimeoutError: The node does not answer.
        """
        if not self.looks_at_files or (home_alone and self._probe is None):
            return None
        shared = await asyncio.to_thread(self._shared, home_alone)
        return await asyncio.wait_for(calls.compare_files(shared), _LOOK_S)

    def _shared(self, home_alone: bool) -> SharedPaths:
        files = [] if home_alone else list(self._adapters())
        if (probe := self._probe) is None:
            return SharedPaths(files=tuple(files))
        home, advice = (
            str(probe.parent),
            "mount it on every machine by the same path, or give --files-url",
        )
        try:
            files.insert(0, _seen(f"--home {home}", [probe], advice))
        except OSError as error:
            raise ClusterError(f"the front itself cannot read {probe}: {error.strerror}") from None
        return SharedPaths(files=tuple(files), home=home)

    def _adapters(self) -> Iterator[ExpectedFiles]:
        adapters = () if self._find_adapters is None else self._find_adapters()
        for each in adapters[-_MAX_ADAPTERS:]:
            if each.directory is None:
                continue
            paths = [Path(each.directory) / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
            try:
                yield _seen(
                    f"the adapter {each.name} in {each.directory}",
                    paths,
                    "every node must be able to read it",
                )
            except OSError:  # the front cannot read it either: requests for it get an error
                continue


def _seen(what: str, paths: Sequence[Path], advice: str) -> ExpectedFiles:
    return ExpectedFiles(
        what=what, paths=tuple(map(str, paths)), digest=sampled_digest(paths), advice=advice
    )
