"""Adapters that requests can name: on the device or on the host by version, and which can be had again from disk.

Where there are more versions on the device than it should have, those that no request reads go to the host, the ones
unused longest first, as far as there is room. A version comes back as soon as a request names it.
"""

from collections import OrderedDict
from itertools import count
from typing import Self

from coserve.devices.base import Device
from coserve.devices.job_messages import PublishVersion, TrainerOpened
from coserve.devices.messages import DropVersion, OpenVersion, SaveAdapter, VersionOpened
from coserve.devices.swap_messages import SwapInTensors, SwapOutTensors
from coserve.engine.command_log import CommandLog
from coserve.engine.host_swap import HostOwner, HostSwap
from coserve.engine.versions import AdapterVersion, AdapterVersions


class AdapterLoad:
    """An adapter on its way from disk to the device. opened: once it has been read."""

    def __init__(
        self, device: Device, versions: AdapterVersions, name: str, key: str, directory: str, model: str = ""
    ) -> None:
        """model: as `OpenVersion` names it."""
        self.device, self.versions, self.name, self.key, self.directory = device, versions, name, key, directory
        self.model = model
        self.opened = VersionOpened(num_bypasses=0)

    def read(self, changed_by: str = "") -> Self:
        """Read it onto the device, beside steps; AdapterError for its files. changed_by: see `OpenVersion`."""
        with self.versions.given_up(self.key):
            loaded = self.device.execute(OpenVersion(self.key, self.directory, self.model, changed_by))
        assert isinstance(loaded, VersionOpened)
        self.opened = loaded
        return self


class ServedAdapters:
    """The versions on one device."""

    def __init__(self, device: Device, log: CommandLog, swap: HostSwap, *, most: int) -> None:
        """most: how many of those that lie on disk stay on the device, and how many versions of any kind if some can
        go to the host instead.
        """
        self.versions = AdapterVersions()
        self._device, self._log, self._swap, self._most = device, log, swap, most
        self._away: dict[str, AdapterVersion] = {}  # on the host, by key
        self._tried_at: tuple[int, ...] = ()  # the state in which no more could go there
        # Two counts: that of loads begun beside steps, which no recording has, must not show in the keys of the others.
        self._num_loads, self._num_reads = count(), count()
        self._on_disk: OrderedDict[str, None] = OrderedDict()  # can be had again; unused longest first

    def load(self, name: str, directory: str, *, model: str = "", path: str = "") -> AdapterVersion:
        """Serve an adapter in PEFT's format as `name`; AdapterError for its files. model, path: name and place of
        the one that it is of, if that is not the one that serves; then it can be trained further alone.
        """
        key = f"{name}@0#load-{next(self._num_loads)}"
        return self.finish_load(AdapterLoad(self._device, self.versions, name, key, directory, path).read(), model)

    def begin_load(self, name: str, directory: str) -> "AdapterLoad":
        """The same in three steps, of which the middle one (`AdapterLoad.read`) may be done by any thread."""
        # Not by `new_key`: when a load begins leaves no trace in the keys of what comes after it.
        return AdapterLoad(self._device, self.versions, name, f"{name}@0#read-{next(self._num_reads)}", directory)

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
        """Serve a job's adapter as it is now (of another `model`: keep it, so that it can be saved); DeviceMemoryError
        if there is no room for the copy.
        """
        key = self.versions.new_key(name, step)
        with self.versions.given_up(key):
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

        The one whose use was asked for longest ago goes first; those that are being read stay until they are not. What
        has room on the host stays there.
        """
        self._on_disk[name] = None
        self._on_disk.move_to_end(name)
        self.make_room()
        if self._num_excess > 0:
            held = [each for each in self._on_disk if any(v.key not in self._away for v in self.versions.of(each))]
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
        """What the device is to let go of: versions that no request reads and no name finds any more."""
        gone = self.versions.take_gone()
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
        """Versions that nobody reads go to the host, where the device has too many; not within a step."""
        if self._num_excess <= 0 or not self._swap.num_pages:
            return
        if self._state == self._tried_at:
            return
        idle = [version for version in self.versions.idle() if version.key not in self._away]
        for version in idle[: self._num_excess]:
            if (slots := self._swap.keep_tensors(("version", version.key), version.num_bytes)) is not None:
                self._away[version.key] = version
                self._log.send(SwapOutTensors(version=version.key, slots=slots))
        self._tried_at = self._state
        if idle:
            self._log.flush()  # at once: they are large

    @property
    def _state(self) -> tuple[int, ...]:
        """Changes with all that lets more versions go to the host. Room is asked for after every step; where there is
        none, or all versions are being read, that must cost nothing.
        """
        versions, swap = self.versions, self._swap
        return versions.num_versions, versions.num_released, swap.num_pages_used, swap.num_swapped_in

    def bring_back(self, key: str) -> None:
        """Have a version on the device, if it lies on the host; not within a step. DeviceMemoryError: it is not yet."""
        if key in self._away:
            self._log.execute(SwapInTensors(version=key, slots=self._swap.tensor_slots(("version", key))))
            del self._away[key]
            self._swap.note_tensors_back(("version", key))

    def wanted(self) -> list[str]:
        """Keys of versions that lie on the host, and that requests are to read."""
        return sorted(self._away.keys() & self.versions.being_read) if self._away else []
