"""Catalogues of adapters that tenants can name in requests, with the engine's names for them."""

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
    """Adapters by tenant; no tenant sees another's.

    Methods may block, and may be called from any thread.
    """

    def list(self, tenant: str) -> list[AdapterRecord]:
        """Return all adapters that a tenant can name, the oldest first."""
        ...

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """Return the adapter of a name, or of `name@step`; None if there is none."""
        ...


class LoadedAdapters:
    """Catalogue of adapters that clients loaded from directories, which survives a restart.

    The engine's name for an adapter is never used again, so that a replacement is loaded before the
    old one is unloaded. The engine reads an adapter when a request needs it, so that a restart only
    needs the catalogue.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # one change at a time
        self._known: dict[tuple[str, str], AdapterRecord] = {}
        self._unusable: set[tuple[str, str]] = set()  # kept, but not served
        self._store: Store | None = None

    def restore(self, store: Store, *, base: str, allowed: tuple[Path, ...]) -> None:
        """Restore the adapters that were loaded when the server ended. Blocks.

        An adapter that cannot be read now, or is outside of the allowed directories, is logged and
        not served. It stays on record until it is unloaded or its name is loaded anew, so that
        nothing is lost if a disk is mounted late.
        """
        with store.read() as transaction:
            records = transaction.loaded_adapters(base)
        for record in records:
            assert record.directory is not None
            try:
                if not lies_in(Path(record.directory).resolve(), allowed):
                    raise AdapterError(
                        f"{record.directory} is not below --allow-adapter-paths any more"
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
        """Adapters of all tenants."""
        return tuple(self._known.values())

    def has(self, tenant: str, name: str) -> bool:
        """Return whether an adapter is on record, served or not."""
        return (tenant, name) in self._known or (tenant, name) in self._unusable

    def add(self, record: AdapterRecord) -> None:
        """Record an adapter as loaded. Blocks.

        Raises:
            StoreError: It cannot be stored.
        """
        with self._open_store().write() as transaction:
            transaction.put_loaded_adapter(record)
        self._known[record.tenant, record.name] = record
        self._unusable.discard((record.tenant, record.name))

    def remove(self, tenant: str, name: str) -> None:
        """Remove an adapter. Blocks.

        Raises:
            StoreError: The store cannot be written.
        """
        with self._open_store().write() as transaction:
            transaction.remove_loaded_adapter(tenant, name)
        self._known.pop((tenant, name), None)
        self._unusable.discard((tenant, name))

    def _open_store(self) -> Store:
        if self._store is None:
            raise EngineGoneError("the server is starting; try again in a few seconds")
        return self._store


class GivenAdapters:
    """Catalogue of the adapters that the server was started with, which all tenants share."""

    def __init__(self, modules: Sequence[str], *, base: str, taken: Collection[str]) -> None:
        """Read the adapters.

        Args:
            modules: Values of --lora-modules; see `lora_module`.
            base: Name of the base model.
            taken: Names that adapters cannot have.

        Raises:
            AdapterError: An adapter cannot be read, or its name is not possible.
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
        """Adapters of all tenants."""
        return tuple(self._known.values())

    def list(self, tenant: str) -> list[AdapterRecord]:
        return list(self._known.values())

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        return self._known.get(name)


def adapter_at(directory: str, *, tenant: str, name: str, base: str) -> AdapterRecord:
    """Return a tenant's adapter in a directory, under a new name for the engine."""
    return _with_engine_name(
        AdapterRecord(
            tenant=tenant, name=name, base=base, directory=directory, created_at=int(time.time())
        )
    )


def lies_in(path: Path, allowed: tuple[Path, ...]) -> bool:
    """Return whether a resolved path is one of some directories, or below one.

    Raises:
        OSError, ValueError, RuntimeError: A directory cannot be resolved.
    """
    return any(path.is_relative_to(directory.resolve()) for directory in allowed)


def adapters_from_directories(catalogues: "list[AdapterCatalogue]") -> list[AdapterRecord]:
    """Return the adapters of all tenants that were not made by jobs."""
    return [
        record
        for each in catalogues
        if isinstance(each, LoadedAdapters | GivenAdapters)
        for record in each.records
    ]


def find_adapter(
    catalogues: "list[AdapterCatalogue]", tenant: str, name: str
) -> AdapterRecord | None:
    """Return the adapter from the first catalogue that has it."""
    return next(
        (known for each in catalogues if (known := each.find(tenant, name)) is not None), None
    )


def _with_engine_name(record: AdapterRecord) -> AdapterRecord:
    # Unique even across restarts: a job that began with an adapter must not get another one.
    return replace(record, engine_name=f"{record.tenant}/{record.name}#{uuid4().hex}")
