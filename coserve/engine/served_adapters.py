"""Adapters that requests can name: on the device or on the host by version, and which can be had
again from disk.

Where there are more versions on the device than it should have, those that no request reads go to
the host, the ones unused longest first, as far as there is room. A version comes back as soon as a
request names it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Self

from coserve.devices.base import Device
from coserve.devices.messages.commands import DropVersion, OpenVersion, SaveAdapter, VersionOpened
from coserve.devices.messages.jobs import PublishVersion, TrainerOpened
from coserve.devices.messages.pages import SwapInTensors, SwapOutTensors
from coserve.engine.command_log import CommandLog
from coserve.engine.host_swap import HostOwner, HostSwap
from coserve.errors import AdapterError, CoserveError
from coserve.settings import shown


@dataclass(frozen=True, kw_only=True)
class AdapterVersion:
    """An immutable state of an adapter that requests can name."""

    name: str
    step: int
    key: str
    """Never given twice, so that K and V that were computed under it are never mistaken for another
    version's."""
    num_bypasses: int
    num_bytes: int = 0
    """Bytes of its parameters, as they go to the host."""
    num_virtual_tokens: int = 0
    """Rows that stand before every prompt."""
    vocab_size: int = 0
    """Vocabulary of the adapter's model, where that is another than the one that serves; 0: the
    same."""
    model: str = ""
    """The adapter's model, if that is not the one that serves; requests cannot name the version
    then."""

    @property
    def label(self) -> str:
        """What requests call it."""
        return f"{self.name}@{self.step}"


class AdapterVersions:
    """Names of adapters, their versions, and who reads them. A version that is unloaded or
    superseded stays until its last reader is gone.
    """

    def __init__(self) -> None:
        self._versions: dict[str, dict[int, AdapterVersion]] = {}
        self._readers: dict[str, int] = {}  # by key; unused longest first
        self.being_read: set[str] = set()  # keys
        self.num_released = 0  # readers that are gone, so far
        self.num_model_changes = (
            0  # of the weights underneath: what was computed before is no prefix for what comes
        )
        self._transient: set[str] = set()
        self._gone: list[str] = []
        self._serial = count()

    def new_key(self, name: str, step: int) -> str:
        """A key for a version to come."""
        return f"{name}@{step}#{next(self._serial)}"

    def publish(
        self,
        name: str,
        step: int,
        key: str,
        *,
        num_bypasses: int,
        num_bytes: int = 0,
        num_virtual_tokens: int = 0,
        vocab_size: int = 0,
        transient: bool = False,
        model: str = "",
    ) -> AdapterVersion:
        """Make a version the newest of its name. transient: the next one takes its place."""
        versions = self._versions.setdefault(name, {})
        for old in [
            version
            for version in versions.values()
            if version.key in self._transient or version.step == step
        ]:
            self._forget(versions.pop(old.step))
        versions[step] = AdapterVersion(
            name=name,
            step=step,
            key=key,
            num_bypasses=num_bypasses,
            num_bytes=num_bytes,
            num_virtual_tokens=num_virtual_tokens,
            vocab_size=vocab_size,
            model=model,
        )
        self._readers[key] = 0
        if transient:
            self._transient.add(key)
        return versions[step]

    def resolve(self, label: str) -> AdapterVersion:
        """The newest version of a name, or the one of `name@step`; AdapterError lists what there
        is.
        """
        if not isinstance(label, str):
            raise AdapterError(f"an adapter is asked for by its name, which {shown(label)} is not")
        name, _, step = label.rpartition("@")
        if name in self._versions and step.isdecimal():
            if (found := self._versions[name].get(int(step))) is not None:
                return found
            have = ", ".join(str(one) for one in self._versions[name])
            raise AdapterError(f"adapter {name!r} has no version {step}; it has {have}")
        if label in self._versions:
            return next(reversed(self._versions[label].values()))
        raise AdapterError(
            f"there is no adapter {label!r}; there are: {', '.join(self._versions) or 'none'}"
        )

    @property
    def num_versions(self) -> int:
        """That have a name, or readers."""
        return len(self._readers)

    def idle(self) -> Iterator[AdapterVersion]:
        """Versions that no request reads, unused longest first."""
        by_key = {
            version.key: version
            for versions in self._versions.values()
            for version in versions.values()
        }
        yield from [by_key[key] for key, num_readers in self._readers.items() if not num_readers]

    def of(self, name: str) -> list[AdapterVersion]:
        """The versions of a name; none if there is no such name."""
        return list(self._versions.get(name, {}).values())

    def resolve_served(self, label: str) -> AdapterVersion:
        """The same for a request; AdapterError if it is of another model than the one that
        serves.
        """
        version = self.resolve(label)
        if version.model:
            raise AdapterError(
                f"adapter {version.label} is of model {version.model!r}, which is trained here and "
                f"not served: "
                "save it, and serve it with that model"
            )
        return version

    def labels(self) -> list[str]:
        """Every version's label."""
        return [
            version.label for versions in self._versions.values() for version in versions.values()
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._versions

    def hold(self, version: AdapterVersion) -> None:
        """Count one more reader."""
        self._readers[version.key] = self._readers.pop(version.key) + 1
        self.being_read.add(version.key)

    def release(self, version: AdapterVersion) -> None:
        """Count one reader less."""
        self.num_released += 1
        self._readers[version.key] -= 1
        if not self._readers[version.key]:
            self.being_read.discard(version.key)
        if (
            not self._readers[version.key]
            and self._versions.get(version.name, {}).get(version.step) != version
        ):
            self._gone.append(version.key)
            del self._readers[version.key]

    def unload(self, name: str) -> None:
        """No new request finds it; AdapterError if there is no such name."""
        if name not in self._versions:
            self.resolve(name)
        for version in self._versions.pop(name).values():
            self._forget(version)

    @contextmanager
    def dropped_on_interruption(self, key: str) -> Iterator[None]:
        """While a version to come is made on the device: if that is interrupted, nobody knows
        whether it is there.
        """
        try:
            yield
        except CoserveError:  # it is not
            raise
        except BaseException:
            self._gone.append(key)
            raise

    def take_unreferenced(self) -> list[str]:
        """Keys that no request reads and no name finds any more, once each."""
        gone, self._gone = self._gone, []
        return gone

    def _forget(self, version: AdapterVersion) -> None:
        self._transient.discard(version.key)
        if not self._readers[version.key]:
            self._gone.append(version.key)
            del self._readers[version.key]


class AdapterLoad:
    """An adapter on its way from disk to the device. opened: once it has been read."""

    def __init__(
        self,
        device: Device,
        versions: AdapterVersions,
        name: str,
        key: str,
        directory: str,
        model: str = "",
    ) -> None:
        """model: as `OpenVersion` names it."""
        self.device, self.versions, self.name, self.key, self.directory = (
            device,
            versions,
            name,
            key,
            directory,
        )
        self.model = model
        self.opened = VersionOpened(num_bypasses=0)

    def read(self, changed_by: str = "") -> Self:
        """Read it onto the device, beside steps; AdapterError for its files. changed_by: see
        `OpenVersion`.
        """
        with self.versions.dropped_on_interruption(self.key):
            loaded = self.device.execute(
                OpenVersion(self.key, self.directory, self.model, changed_by)
            )
        assert isinstance(loaded, VersionOpened)
        self.opened = loaded
        return self


class ServedAdapters:
    """The versions on one device, and on its host."""

    def __init__(self, device: Device, log: CommandLog, swap: HostSwap, *, most: int) -> None:
        """most: how many of those that lie on disk stay on the device, and how many versions of any
        kind if some can go to the host instead.
        """
        self.versions = AdapterVersions()
        self._device, self._log, self._swap, self._most = device, log, swap, most
        self._away: dict[str, AdapterVersion] = {}  # on the host, by key
        self._tried_at: tuple[int, ...] = ()  # the state in which no more could go there
        # Two counts: that of loads begun beside steps, which no recording has, must not show in the
        # keys of the others.
        self._num_loads, self._num_reads = count(), count()
        self._on_disk: OrderedDict[str, None] = (
            OrderedDict()
        )  # can be had again; unused longest first

    def load(self, name: str, directory: str, *, model: str = "", path: str = "") -> AdapterVersion:
        """Serve an adapter in PEFT's format as `name`; AdapterError for its files. model, path:
        name and place of the one that it is of, if that is not the one that serves; then it can be
        trained further alone.
        """
        key = f"{name}@0#load-{next(self._num_loads)}"
        return self.finish_load(
            AdapterLoad(self._device, self.versions, name, key, directory, path).read(), model
        )

    def begin_load(self, name: str, directory: str) -> "AdapterLoad":
        """The same in three steps, of which the middle one (`AdapterLoad.read`) may be done by any
        thread.
        """
        # Not by `new_key`: when a load begins leaves no trace in the keys of what comes after it.
        return AdapterLoad(
            self._device, self.versions, name, f"{name}@0#read-{next(self._num_reads)}", directory
        )

    def finish_load(self, load: "AdapterLoad", model: str = "") -> AdapterVersion:
        """Serve what was read."""
        opened = load.opened
        return self.versions.publish(
            load.name,
            0,
            load.key,
            num_bypasses=opened.num_bypasses,
            num_bytes=opened.num_bytes,
            num_virtual_tokens=opened.num_virtual_tokens,
            vocab_size=opened.vocab_size,
            model=model,
        )

    def publish(
        self, job: str, name: str, step: int, *, costs: TrainerOpened, transient: bool, model: str
    ) -> AdapterVersion:
        """Serve a job's adapter as it is now (of another `model`: keep it, so that it can be
        saved); DeviceMemoryError if there is no room for the copy.
        """
        key = self.versions.new_key(name, step)
        with self.versions.dropped_on_interruption(key):
            self._log.execute(PublishVersion(job, key))
        return self.versions.publish(
            name,
            step,
            key,
            num_bypasses=costs.counts.num_bypasses,
            num_bytes=costs.version_bytes,
            num_virtual_tokens=costs.num_virtual_tokens,
            vocab_size=costs.vocab_size,
            transient=transient,
            model=model,
        )

    def keep_from_disk(self, name: str) -> None:
        """It lies on disk, and was asked for now: it may make room when others are used instead.

        The one whose use was asked for longest ago goes first; those that are being read stay until
        they are not. What has room on the host stays there.
        """
        self._on_disk[name] = None
        self._on_disk.move_to_end(name)
        self.make_room()
        if self._num_excess > 0:
            held = [
                each
                for each in self._on_disk
                if any(v.key not in self._away for v in self.versions.of(each))
            ]
            for each in held[: len(held) - self._most]:
                self.unload(each)

    def unload(self, name: str) -> None:
        """No new request finds it; those that use it run to their end."""
        self.versions.unload(name)
        self._on_disk.pop(name, None)

    def save(self, label: str, directory: str) -> None:
        """Write a version (`name` or `name@step`) in PEFT's format."""
        key = self.versions.resolve(label).key
        self.bring_back(key)
        self._log.execute(SaveAdapter(key, directory))

    def take_unread(self) -> list[DropVersion]:
        """What the device is to let go of: versions that no request reads and no name finds any
        more.
        """
        gone = self.versions.take_unreferenced()
        for key in gone:
            self._away.pop(key, None)
            self._swap.release_tensors(("version", key))
        return [DropVersion(key) for key in gone]

    # -- host memory ----------------------------------------------------------------

    @property
    def _num_excess(self) -> int:
        """By how many versions the device has too many."""
        return self.versions.num_versions - len(self._away) - self._most

    @property
    def on_host(self) -> list[HostOwner]:
        """Versions that lie there."""
        return [("version", key) for key in self._away]

    def make_room(self) -> None:
        """Versions that nobody reads go to the host, where the device has too many; not within a
        step.
        """
        if self._num_excess <= 0 or not self._swap.num_pages:
            return
        if self._state == self._tried_at:
            return
        idle = [version for version in self.versions.idle() if version.key not in self._away]
        for version in idle[: self._num_excess]:
            if (
                slots := self._swap.keep_tensors(("version", version.key), version.num_bytes)
            ) is not None:
                self._away[version.key] = version
                self._log.send(SwapOutTensors(version=version.key, slots=slots))
        self._tried_at = self._state
        if idle:
            self._log.flush()  # at once: they are large

    @property
    def _state(self) -> tuple[int, ...]:
        """Changes with all that lets more versions go to the host. Room is asked for after every
        step; where there is none, or all versions are being read, that must cost nothing.
        """
        versions, swap = self.versions, self._swap
        return (
            versions.num_versions,
            versions.num_released,
            swap.num_pages_used,
            swap.num_swapped_in,
        )

    def bring_back(self, key: str) -> None:
        """Have a version on the device, if it lies on the host; not within a step.
        DeviceMemoryError: it is not yet.
        """
        if key in self._away:
            self._log.execute(
                SwapInTensors(version=key, slots=self._swap.tensor_slots(("version", key)))
            )
            del self._away[key]
            self._swap.note_tensors_back(("version", key))

    def wanted(self) -> list[str]:
        """Keys of versions that lie on the host, and that requests are to read."""
        return sorted(self._away.keys() & self.versions.being_read) if self._away else []
