"""Which adapters a tenant can name in a request, and what the engine calls them."""

import asyncio
import time
from typing import Protocol
from uuid import uuid4

from coserve.jobs.records import AdapterRecord


class AdapterCatalogue(Protocol):
    """Adapters by tenant; none sees another's. Calls may block; from any thread."""

    def list(self, tenant: str) -> list[AdapterRecord]:
        """Those that it can name, the oldest first."""
        ...

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """The one of a name (or of `name@step`), if there is one."""
        ...


class LoadedAdapters:
    """Those that clients have loaded from directories: an `AdapterCatalogue` that lives as long as the server.

    What the engine calls one is never given twice, so one that takes another's place is there before that goes.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # one change at a time
        self._known: dict[tuple[str, str], AdapterRecord] = {}

    def list(self, tenant: str) -> list[AdapterRecord]:
        return [known for (owner, _), known in list(self._known.items()) if owner == tenant]

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        return self._known.get((tenant, name))

    def add(self, record: AdapterRecord) -> None:
        """It has been loaded."""
        self._known[record.tenant, record.name] = record

    def remove(self, tenant: str, name: str) -> None:
        """It has been unloaded."""
        del self._known[tenant, name]


def adapter_at(directory: str, *, tenant: str, name: str, base: str) -> AdapterRecord:
    """A tenant's adapter in a directory, by a name that the engine has never heard."""
    # Nor after a restart: a job that began with one by this name must not meet another.
    engine_name = f"{tenant}/{name}#{uuid4().hex}"
    return AdapterRecord(
        tenant=tenant, name=name, base=base, directory=directory, created_at=int(time.time()), engine_name=engine_name
    )


def find_adapter(catalogues: "list[AdapterCatalogue]", tenant: str, name: str) -> AdapterRecord | None:
    """The first that any catalogue knows."""
    return next((known for each in catalogues if (known := each.find(tenant, name)) is not None), None)
