"""Adapters that requests can name: on the device by version, and which of them can be had again from disk."""

from collections import OrderedDict
from itertools import count
from typing import Self

from coserve.devices.base import Device
from coserve.devices.messages import DropVersion, OpenVersion, PublishVersion, VersionOpened
from coserve.engine.versions import AdapterVersion, AdapterVersions


class AdapterLoad:
    """An adapter on its way from disk to the device. num_bypasses: once it has been read."""

    def __init__(self, device: Device, versions: AdapterVersions, name: str, key: str, directory: str) -> None:
        self.device, self.versions, self.name, self.key, self.directory = device, versions, name, key, directory
        self.num_bypasses = 0

    def read(self) -> Self:
        """Read it onto the device, beside steps; AdapterError for its files."""
        with self.versions.given_up(self.key):
            loaded = self.device.execute(OpenVersion(self.key, self.directory))
        assert isinstance(loaded, VersionOpened)
        self.num_bypasses = loaded.num_bypasses
        return self


class ServedAdapters:
    """The versions on one device."""

    def __init__(self, device: Device, *, max_on_disk: int) -> None:
        """max_on_disk: how many of those that lie on disk stay on the device."""
        self.versions = AdapterVersions()
        self._device, self._max_on_disk = device, max_on_disk
        # Two counts: that of loads begun beside steps, which no recording has, must not show in the keys of the others.
        self._num_loads, self._num_reads = count(), count()
        self._on_disk: OrderedDict[str, None] = OrderedDict()  # can be had again; unused longest first

    def load(self, name: str, directory: str) -> AdapterVersion:
        """Serve an adapter in PEFT's format as `name`; AdapterError for its files."""
        key = f"{name}@0#load-{next(self._num_loads)}"
        return self.finish_load(AdapterLoad(self._device, self.versions, name, key, directory).read())

    def begin_load(self, name: str, directory: str) -> "AdapterLoad":
        """The same in three steps, of which the middle one (`AdapterLoad.read`) may be done by any thread."""
        # Not by `new_key`: when a load begins leaves no trace in the keys of what comes after it.
        return AdapterLoad(self._device, self.versions, name, f"{name}@0#read-{next(self._num_reads)}", directory)

    def finish_load(self, load: "AdapterLoad") -> AdapterVersion:
        """Serve what was read."""
        return self.versions.publish(load.name, 0, load.key, num_bypasses=load.num_bypasses)

    def publish(self, job: str, name: str, step: int, *, num_bypasses: int, transient: bool) -> AdapterVersion:
        """Serve a job's adapter as it is now; DeviceMemoryError if there is no room for the copy."""
        key = self.versions.new_key(name, step)
        with self.versions.given_up(key):
            self._device.execute(PublishVersion(job, key))
        return self.versions.publish(name, step, key, num_bypasses=num_bypasses, transient=transient)

    def keep_from_disk(self, name: str) -> None:
        """It lies on disk, and was asked for now: it may make room when others are used instead.

        The one whose use was asked for longest ago goes first; those that are being read stay until they are not.
        """
        self._on_disk[name] = None
        self._on_disk.move_to_end(name)
        while len(self._on_disk) > self._max_on_disk:
            self.unload(next(iter(self._on_disk)))

    def unload(self, name: str) -> None:
        """No new request finds it; those that use it run to their end."""
        self.versions.unload(name)
        self._on_disk.pop(name, None)

    def take_unread(self) -> list[DropVersion]:
        """What the device is to let go of: versions that no request reads and no name finds any more."""
        return [DropVersion(key) for key in self.versions.take_gone()]
