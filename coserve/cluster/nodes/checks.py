"""What a front asks of a node before it uses it: that it is what this front is for, and sees the
same files.

A node outlives fronts. One that was made by another front, with other settings, is not asked for
anything else: another one is made in its place.
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

# What a node may take to look at its files, and of how many adapters, the newest, these are.
_LOOK_S, _MOST_ADAPTERS = 60.0, 1_000
# Adapters that are served from directories of their own.
FindAdapters = Callable[[], Sequence[AdapterRecord]]


class NodeChecks:
    """Belongs to one event loop. Without settings, and until `begin`, every node will do."""

    def __init__(
        self,
        settings: NodeSettings | None = None,
        renew: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """settings: that all nodes are to have. renew: makes the node of a name anew, with them."""
        self._settings, self._renew = settings, renew
        self._digest = None if settings is None else settings_digest(settings)
        self._renewed: set[str] = set()
        self._probe: Path | None = None
        self._find_adapters: FindAdapters | None = None

    def begin(self, find_adapters: FindAdapters | None = None) -> None:
        """The home is the front's from now on. find_adapters: what all nodes must be able to read,
        too. Blocks.

        ClusterError if the home cannot be written.
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
        """The inverse."""
        if self._probe is not None:
            self._probe.unlink(missing_ok=True)
        self._probe = self._find_adapters = None

    @property
    def most_adapters(self) -> int:
        """That stay on a device."""
        return (
            EngineConfig() if self._settings is None else self._settings.engine.engine
        ).max_adapters

    # -- what a node is ---------------------------------------------------------------

    def has_other_settings(self, status: NodeStatus) -> bool:
        """Whether it is not what it would be if this front had made it."""
        return self._digest is not None and status.settings != self._digest

    async def renew(self, name: str) -> None:
        """Have it made anew. ClusterError if that cannot be, or has been done and did not help."""
        if self._renew is None or name in self._renewed:
            raise ClusterError(
                "it was started with other settings than this front gives: start it with the same "
                "ones"
            )
        await self._renew(name)
        self._renewed.add(name)

    def wrong_engine(self, ready: Ready) -> str | None:
        """How its engine differs from what this front is for."""
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
        """Whether `unseen` asks at all."""
        return self._probe is not None or self._find_adapters is not None

    async def unseen(self, calls: NodeCalls, *, home_alone: bool = False) -> str | None:
        """What a node does not see as this front does; None: it sees all. home_alone: and no
        adapters are asked for. EngineGoneError or TimeoutError if it does not say.
        """
        if not self.looks_at_files or (home_alone and self._probe is None):
            return None
        shared = await asyncio.to_thread(self._shared, home_alone)
        return await asyncio.wait_for(calls.look_at(shared), _LOOK_S)

    def _shared(self, home_alone: bool) -> SharedPaths:
        seen = [] if home_alone else list(self._adapters())
        if (probe := self._probe) is None:
            return SharedPaths(files=tuple(seen))
        home, advice = (
            str(probe.parent),
            "mount it on every machine by the same path, or give --files-url",
        )
        try:
            seen.insert(0, _seen(f"--home {home}", [probe], advice))
        except OSError as error:
            raise ClusterError(f"the front itself cannot read {probe}: {error.strerror}") from None
        return SharedPaths(files=tuple(seen), home=home)

    def _adapters(self) -> Iterator[ExpectedFiles]:
        found = () if self._find_adapters is None else self._find_adapters()
        for each in found[-_MOST_ADAPTERS:]:
            if each.directory is None:
                continue
            paths = [Path(each.directory) / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
            try:
                yield _seen(
                    f"the adapter {each.name} in {each.directory}",
                    paths,
                    "every node must be able to read it",
                )
            except OSError:  # it is not to be had here either: those who ask for it are told
                continue


def _seen(what: str, paths: Sequence[Path], advice: str) -> ExpectedFiles:
    return ExpectedFiles(
        what=what, paths=tuple(map(str, paths)), digest=sampled_digest(paths), advice=advice
    )
