"""Which adapters a tenant can name in a request, and what the engine calls them."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from coserve.adapters.peft_directory import check_directory
from coserve.errors import AdapterError, EngineGoneError
from coserve.jobs.records import AdapterRecord
from coserve.jobs.sql.store import Store
from coserve.server.options.lora_option import lora_module

_log = logging.getLogger(__name__)


class AdapterCatalogue(Protocol):
    """Adapters by tenant; none sees another's. Calls may block; from any thread."""

    def list(self, tenant: str) -> list[AdapterRecord]:
        """Those that it can name, the oldest first."""
        ...

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """The one of a name (or of `name@step`), if there is one."""
        ...


class LoadedAdapters:
    """Those that clients have loaded from directories: an `AdapterCatalogue` that survives the
    server.

    What the engine calls one is never given twice, so one that takes another's place is there
    before that goes. The engine reads an adapter when it is asked for, so after a restart it is
    enough to know of it.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # one change at a time
        self._known: dict[tuple[str, str], AdapterRecord] = {}
        self._unusable: set[tuple[str, str]] = set()  # kept, but not served
        self._store: Store | None = None

    def restore(self, store: Store, *, base: str, allowed: tuple[Path, ...]) -> None:
        """Know those again that were loaded when the server ended. Blocks.

        One that cannot be read now, or lies outside of the directories that are allowed now, is
        told in the log and not served; it stays on record, so that a disk that comes late loses
        nothing, until it is unloaded or its name is loaded anew.
        """
        with store.read() as transaction:
            records = transaction.loaded_adapters(base)
        for record in records:
            assert record.directory is not None
            try:
                if not lies_in(Path(record.directory).resolve(), allowed):
                    raise AdapterError(
                        f"{record.directory} is no longer below a directory of --allow-adapter-paths"
                    )
                check_directory(record.directory)
            except (AdapterError, OSError, ValueError, RuntimeError) as error:
                self._unusable.add((record.tenant, record.name))
                _log.error(
                    "the adapter %r of %r is not served: %s", record.name, record.tenant, error
                )
            else:
                self._known[record.tenant, record.name] = _with_engine_name(record)
        self._store = store

    def list(self, tenant: str) -> list[AdapterRecord]:
        return [known for (owner, _), known in list(self._known.items()) if owner == tenant]

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        return self._known.get((tenant, name))

    @property
    def records(self) -> Sequence[AdapterRecord]:
        """Of all tenants."""
        return tuple(self._known.values())

    def knows(self, tenant: str, name: str) -> bool:
        """Whether it is on record, served or not."""
        return (tenant, name) in self._known or (tenant, name) in self._unusable

    def add(self, record: AdapterRecord) -> None:
        """It has been loaded. Blocks; StoreError if that cannot be kept."""
        with self._open_store().write() as transaction:
            transaction.put_loaded_adapter(record)
        self._known[record.tenant, record.name] = record
        self._unusable.discard((record.tenant, record.name))

    def remove(self, tenant: str, name: str) -> None:
        """It is to be served no longer. Blocks; StoreError if that cannot be kept."""
        with self._open_store().write() as transaction:
            transaction.remove_loaded_adapter(tenant, name)
        self._known.pop((tenant, name), None)
        self._unusable.discard((tenant, name))

    def _open_store(self) -> Store:
        if self._store is None:
            raise EngineGoneError("the server is starting; try again in a few seconds")
        return self._store


class GivenAdapters:
    """Those that the server was started with: an `AdapterCatalogue` that all tenants share."""

    def __init__(self, modules: Sequence[str], *, base: str, taken: Collection[str]) -> None:
        """modules: see `lora_module`. taken: names that they cannot have. AdapterError if one
        cannot be read.
        """
        self._known: dict[str, AdapterRecord] = {}
        for module in modules:
            name, path = lora_module(module)
            if name in taken or name in self._known or "@" in name:
                raise AdapterError(
                    f"--lora-modules {name}: the name is taken, or has an @; choose another"
                )
            try:
                check_directory(path, reads_tensors=True)
            except (AdapterError, OSError, ValueError) as error:
                raise AdapterError(f"--lora-modules {name}: {error}") from None
            directory = str(Path(path).resolve())
            self._known[name] = adapter_at(directory, tenant="", name=name, base=base)

    @property
    def records(self) -> Sequence[AdapterRecord]:
        """Of all tenants."""
        return tuple(self._known.values())

    def list(self, tenant: str) -> list[AdapterRecord]:
        return list(self._known.values())

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        return self._known.get(name)


def adapter_at(directory: str, *, tenant: str, name: str, base: str) -> AdapterRecord:
    """A tenant's adapter in a directory, by a name that the engine has never heard."""
    return _with_engine_name(
        AdapterRecord(
            tenant=tenant, name=name, base=base, directory=directory, created_at=int(time.time())
        )
    )


def lies_in(path: Path, allowed: tuple[Path, ...]) -> bool:
    """Whether a path without links is, or lies below, one of some directories. OSError, ValueError
    or RuntimeError if one cannot be followed.
    """
    return any(path.is_relative_to(directory.resolve()) for directory in allowed)


def adapters_from_directories(catalogues: "list[AdapterCatalogue]") -> list[AdapterRecord]:
    """Those that no job has made, of all tenants."""
    return [
        record
        for each in catalogues
        if isinstance(each, LoadedAdapters | GivenAdapters)
        for record in each.records
    ]


def find_adapter(
    catalogues: "list[AdapterCatalogue]", tenant: str, name: str
) -> AdapterRecord | None:
    """The first that any catalogue knows."""
    return next(
        (known for each in catalogues if (known := each.find(tenant, name)) is not None), None
    )


def _with_engine_name(record: AdapterRecord) -> AdapterRecord:
    # Not even after a restart the same: a job that began with one by this name must not meet
    # another.
    return replace(record, engine_name=f"{record.tenant}/{record.name}#{uuid4().hex}")
