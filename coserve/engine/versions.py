"""Which adapters there are to serve: names, their immutable versions `name@step`, and who is reading them."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coserve.errors import AdapterError, CoserveError
from coserve.settings import shown


@dataclass(frozen=True, kw_only=True)
class AdapterVersion:
    """key: never given twice, so that what was computed under it (K and V) can never be mistaken for another's.
    num_bytes: of its parameters, as they go to the host. num_virtual_tokens: rows that stand before every prompt.
    vocab_size: of the adapter's model, where that is another than the one that serves (0: the same).
    model: that it is of, if that is not the one that serves; requests cannot name it then.
    """

    name: str
    step: int
    key: str
    num_bypasses: int
    num_bytes: int = 0
    num_virtual_tokens: int = 0
    vocab_size: int = 0
    model: str = ""

    @property
    def label(self) -> str:
        """What requests call it."""
        return f"{self.name}@{self.step}"


class AdapterVersions:
    """The registry. Versions that are unloaded, or superseded, stay until their last reader is gone."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[int, AdapterVersion]] = {}
        self._readers: dict[str, int] = {}  # by key; unused longest first
        self.being_read: set[str] = set()  # keys
        self.num_released = 0  # readers that are gone, so far
        self.num_model_changes = 0  # of the weights underneath: what was computed before is no prefix for what comes
        self._transient: set[str] = set()
        self._gone: list[str] = []
        self._serial = itertools.count()

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
        for old in [version for version in versions.values() if version.key in self._transient or version.step == step]:
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
        """The newest version of a name, or the one of `name@step`; AdapterError lists what there is."""
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
        raise AdapterError(f"there is no adapter {label!r}; there are: {', '.join(self._versions) or 'none'}")

    @property
    def num_versions(self) -> int:
        """That have a name, or readers."""
        return len(self._readers)

    def idle(self) -> Iterator[AdapterVersion]:
        """Versions that no request reads, unused longest first."""
        by_key = {version.key: version for versions in self._versions.values() for version in versions.values()}
        yield from [by_key[key] for key, num_readers in self._readers.items() if not num_readers]

    def of(self, name: str) -> list[AdapterVersion]:
        """The versions of a name; none if there is no such name."""
        return list(self._versions.get(name, {}).values())

    def resolve_served(self, label: str) -> AdapterVersion:
        """The same for a request; AdapterError if it is of another model than the one that serves."""
        version = self.resolve(label)
        if version.model:
            raise AdapterError(
                f"adapter {version.label} is of model {version.model!r}, which is trained here and not served: "
                "save it, and serve it with that model"
            )
        return version

    def labels(self) -> list[str]:
        """Every version's label."""
        return [version.label for versions in self._versions.values() for version in versions.values()]

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
        if not self._readers[version.key] and self._versions.get(version.name, {}).get(version.step) != version:
            self._gone.append(version.key)
            del self._readers[version.key]

    def unload(self, name: str) -> None:
        """No new request finds it; AdapterError if there is no such name."""
        if name not in self._versions:
            self.resolve(name)
        for version in self._versions.pop(name).values():
            self._forget(version)

    @contextmanager
    def given_up(self, key: str) -> Iterator[None]:
        """While a version to come is made on the device: if that is interrupted, nobody knows whether it is there."""
        try:
            yield
        except CoserveError:  # it is not
            raise
        except BaseException:
            self._gone.append(key)
            raise

    def take_gone(self) -> list[str]:
        """Keys that no request reads and no name finds any more, once each."""
        gone, self._gone = self._gone, []
        return gone

    def _forget(self, version: AdapterVersion) -> None:
        self._transient.discard(version.key)
        if not self._readers[version.key]:
            self._gone.append(version.key)
            del self._readers[version.key]
