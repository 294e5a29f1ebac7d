"""Adapters that requests can name: versions on the device and on the host, and adapters that can be
loaded from disk again.

Where the device has more versions than it should, those that no request reads are swapped to the
host, the ones unused longest first, as far as there is room. A version is swapped in as soon as a
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
    """Name of the adapter."""
    step: int
    """Optimizer step at which the version was published; 0 if it was loaded."""
    key: str
    """Key that is never given twice, so that no keys and values in the cache are taken for another
    version's.
    """
    num_bypasses: int
    """Number of sites at which the adapter adds something."""
    num_bytes: int = 0
    """Size of the parameters, as they are swapped to the host."""
    num_virtual_tokens: int = 0
    """Number of virtual tokens before every prompt."""
    vocab_size: int = 0
    """Vocabulary of the adapter's model, where that is another than the one that serves; 0: the
    same."""
    model: str = ""
    """The adapter's model, if that is not the one that serves; requests cannot name the version
    then."""

    @property
    def label(self) -> str:
        """Return the label by which requests can name this version."""
        return f"{self.name}@{self.step}"


class AdapterVersions:
    """Versions of adapters by name, and the number of readers of each. A version that is unloaded
    or superseded stays until its last reader is gone.
    """

    def __init__(self) -> None:
        self._versions: dict[str, dict[int, AdapterVersion]] = {}
        # Number of readers by key; the version unused longest is first.
        self._readers: dict[str, int] = {}
        self.being_read: set[str] = set()
        """Keys of versions that have readers."""
        self.num_released = 0
        """Number of readers that are gone, so far."""
        self.num_model_changes = 0
        """Number of changes of the weights: prefixes computed before are not valid after."""
        self._transient: set[str] = set()
        self._gone: list[str] = []
        self._serial = count()

    def new_key(self, name: str, step: int) -> str:
        """Return a new key for a version."""
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
        """Make a version the newest of its name. transient: it is replaced by the next one."""
        versions = self._versions.setdefault(name, {})
        # Replaced: the last transient version, and any of the same step.
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
        """Return the newest version of a name, or the one of `name@step`.

        Raises:
            AdapterError: there is none; the message lists what there is.
        """
        if not isinstance(label, str):
            raise AdapterError(f"the name of an adapter must be text, not {shown(label)}")
        name, _, step = label.rpartition("@")
        if name in self._versions and step.isdecimal():
            if (version := self._versions[name].get(int(step))) is not None:
                return version
            have = ", ".join(str(one) for one in self._versions[name])
            raise AdapterError(f"adapter {name!r} has no version {step}; it has {have}")
        if label in self._versions:
            return next(reversed(self._versions[label].values()))
        raise AdapterError(
            f"there is no adapter {label!r}; there are: {', '.join(self._versions) or 'none'}"
        )

    @property
    def num_versions(self) -> int:
        """Return the number of versions that have a name or readers."""
        return len(self._readers)

    def idle(self) -> Iterator[AdapterVersion]:
        """Yield the versions that no request reads, the one unused longest first."""
        by_key = {
            version.key: version
            for versions in self._versions.values()
            for version in versions.values()
        }
        yield from [by_key[key] for key, num_readers in self._readers.items() if not num_readers]

    def of(self, name: str) -> list[AdapterVersion]:
        """Return the versions of a name; none if there is no such name."""
        return list(self._versions.get(name, {}).values())

    def resolve_served(self, label: str) -> AdapterVersion:
        """Resolve the label of a request's adapter.

        Raises:
            AdapterError: there is none, or it belongs to another model than the one that serves.
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
        """Return the labels of all versions."""
        return [
            version.label for versions in self._versions.values() for version in versions.values()
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._versions

    def hold(self, version: AdapterVersion) -> None:
        """Count one more reader."""
        # Reinserted at the end, since the order of the dict is that of last use.
        self._readers[version.key] = self._readers.pop(version.key) + 1
        self.being_read.add(version.key)

    def release(self, version: AdapterVersion) -> None:
        """Count one reader less."""
        self.num_released += 1
        self._readers[version.key] -= 1
        if not self._readers[version.key]:
            self.being_read.discard(version.key)
        # The last reader of a version that was unloaded or superseded.
        if (
            not self._readers[version.key]
            and self._versions.get(version.name, {}).get(version.step) != version
        ):
            self._gone.append(version.key)
            del self._readers[version.key]

    def unload(self, name: str) -> None:
        """Remove a name, so that no new request finds it.

        Raises:
            AdapterError: there is no such name.
        """
        if name not in self._versions:
            # Raises the error, which lists the names that exist.
            self.resolve(name)
        for version in self._versions.pop(name).values():
            self._forget(version)

    @contextmanager
    def dropped_on_interruption(self, key: str) -> Iterator[None]:
        """Have a version dropped if making it on the device is interrupted, since it is not known
        then whether it is there.
        """
        try:
            yield
        except CoserveError:  # it is not
            raise
        except BaseException:
            self._gone.append(key)
            raise

    def take_unreferenced(self) -> list[str]:
        """Return the keys of versions that no request reads and no name refers to any more, once
        each.
        """
        gone, self._gone = self._gone, []
        return gone

    def _forget(self, version: AdapterVersion) -> None:
        self._transient.discard(version.key)
        if not self._readers[version.key]:
            self._gone.append(version.key)
            del self._readers[version.key]


class AdapterLoad:
    """An adapter that is being loaded from disk. `opened` describes it once it has been read."""

    def __init__(
        self,
        device: Device,
        versions: AdapterVersions,
        name: str,
        key: str,
        directory: str,
        model: str = "",
    ) -> None:
        """Begin a load. model: as in `OpenVersion`."""
        self.device = device
        self.versions = versions
        self.name = name
        self.key = key
        self.directory = directory
        self.model = model
        self.opened = VersionOpened(num_bypasses=0)

    def read(self, changed_by: str = "") -> Self:
        """Read the adapter onto the device, beside steps. changed_by: see `OpenVersion`.

        Raises:
            AdapterError: its files cannot be used.
        """
        with self.versions.dropped_on_interruption(self.key):
            loaded = self.device.execute(
                OpenVersion(self.key, self.directory, self.model, changed_by)
            )
        assert isinstance(loaded, VersionOpened)
        self.opened = loaded
        return self


class ServedAdapters:
    """Adapter versions on one device, and on its host."""

    def __init__(
        self, device: Device, log: CommandLog, swap: HostSwap, *, max_versions: int
    ) -> None:
        """Begin without adapters. max_versions: maximum number of loaded adapters on the device
        that can be loaded from disk again; with host memory, of versions of any kind.
        """
        self.versions = AdapterVersions()
        self._device, self._log, self._swap = device, log, swap
        self._max_versions = max_versions
        self._away: dict[str, AdapterVersion] = {}  # versions on the host, by key
        self._tried_at: tuple[int, ...] = ()  # the state in which no more could go there
        # Two counts: that of loads begun beside steps, which no recording has, must not show in the
        # keys of the others.
        self._num_loads, self._num_reads = count(), count()
        # Names of adapters that can be loaded again; the one unused longest is first.
        self._on_disk: OrderedDict[str, None] = OrderedDict()

    def load(self, name: str, directory: str, *, model: str = "", path: str = "") -> AdapterVersion:
        """Load an adapter in PEFT's format and serve it as `name`.

        Args:
            model: Name of the model that it belongs to, if that is not the one that serves; then it
                can only be trained further.
            path: Directory or hub id of that model.

        Raises:
            AdapterError: its files cannot be used.
        """
        key = f"{name}@0#load-{next(self._num_loads)}"
        return self.finish_load(
            AdapterLoad(self._device, self.versions, name, key, directory, path).read(), model
        )

    def begin_load(self, name: str, directory: str) -> "AdapterLoad":
        """Return a load whose `read` may be called by any thread, before `finish_load`."""
        # This is not `new_key`: the moment at which a load begins must not show in later keys.
        return AdapterLoad(
            self._device, self.versions, name, f"{name}@0#read-{next(self._num_reads)}", directory
        )

    def finish_load(self, load: "AdapterLoad", model: str = "") -> AdapterVersion:
        """Serve an adapter that was read."""
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
        """Publish a job's adapter as it is now, as the newest version of a name. An adapter of
        another model can be saved, not served.

        Raises:
            DeviceMemoryError: there is no room for the copy.
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
        """Note that an adapter can be loaded from disk again and was used now, and evict others
        where there are too many.

        The one unused longest is evicted first; those that are being read stay until they are not.
        What has room on the host stays there.
        """
        self._on_disk[name] = None
        self._on_disk.move_to_end(name)
        self.make_room()
        if self._num_excess > 0:
            held = [each for each in self._on_disk if self._is_on_device(each)]
            for each in held[: len(held) - self._max_versions]:
                self.unload(each)

    def _is_on_device(self, name: str) -> bool:
        return any(version.key not in self._away for version in self.versions.of(name))

    def unload(self, name: str) -> None:
        """Withdraw an adapter from new requests; requests that use it run to their end."""
        self.versions.unload(name)
        self._on_disk.pop(name, None)

    def save(self, label: str, directory: str) -> None:
        """Write a version (`name` or `name@step`) in PEFT's format."""
        key = self.versions.resolve(label).key
        self.bring_back(key)
        self._log.execute(SaveAdapter(key, directory))

    def take_unread(self) -> list[DropVersion]:
        """Return the commands that drop versions that no request reads and no name refers to any
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
        """Return by how many versions the device has too many."""
        return self.versions.num_versions - len(self._away) - self._max_versions

    @property
    def on_host(self) -> list[HostOwner]:
        """Return the versions on the host, as owners of host memory."""
        return [("version", key) for key in self._away]

    def make_room(self) -> None:
        """Swap versions that nobody reads to the host, where the device has too many; not within a
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
        # The state after these swaps, so that only a later change leads to another attempt.
        self._tried_at = self._state
        if idle:
            self._log.flush()  # at once: they are large

    @property
    def _state(self) -> tuple[int, ...]:
        """Return a value that changes with all that lets more versions go to the host.

        Room is checked after every step; where there is none, or all versions are being read, the
        check must cost nothing.
        """
        versions, swap = self.versions, self._swap
        return (
            versions.num_versions,
            versions.num_released,
            swap.num_pages_used,
            swap.num_swapped_in,
        )

    def bring_back(self, key: str) -> None:
        """Swap a version in, if it lies on the host; not within a step.

        Raises:
            DeviceMemoryError: there is no room on the device; the version stays on the host.
        """
        if key in self._away:
            self._log.execute(
                SwapInTensors(version=key, slots=self._swap.tensor_slots(("version", key)))
            )
            del self._away[key]
            self._swap.note_tensors_back(("version", key))

    def wanted(self) -> list[str]:
        """Return the keys of versions on the host that requests are to read."""
        return sorted(self._away.keys() & self.versions.being_read) if self._away else []
