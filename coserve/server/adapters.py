"""Which adapters a tenant can name in a request, and what the engine calls them."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from coserve.jobs.messages import AdapterRef


@dataclass(frozen=True, kw_only=True)
class KnownAdapter:
    """An adapter as /v1/models lists it. ref: for the engine. root: where it came from. created: seconds since 1970."""

    name: str
    ref: AdapterRef
    root: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))


class AdapterCatalogue(Protocol):
    """Adapters by tenant; none sees another's."""

    def list(self, tenant: str) -> list[KnownAdapter]:
        """Those that it can name, the oldest first."""
        ...

    def find(self, tenant: str, name: str) -> KnownAdapter | None:
        """The one of a name (or of `name@step`), if there is one."""
        ...


class LoadedAdapters:
    """Those that clients have loaded from directories: an `AdapterCatalogue` that lives as long as the server.

    What the engine calls one is never given twice, so one that takes another's place is there before that goes.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # one change at a time
        self._known: dict[tuple[str, str], KnownAdapter] = {}

    def list(self, tenant: str) -> list[KnownAdapter]:
        return [known for (owner, _), known in list(self._known.items()) if owner == tenant]

    def find(self, tenant: str, name: str) -> KnownAdapter | None:
        return self._known.get((tenant, name))

    def reference(self, tenant: str, name: str, directory: str) -> AdapterRef:
        """What the engine is to call an adapter."""
        # Nor after a restart: a job that began with one by this name must not meet another.
        return AdapterRef(name=f"{tenant}/{name}#{uuid4().hex}", directory=directory)

    def add(self, tenant: str, name: str, ref: AdapterRef) -> None:
        """It has been loaded."""
        self._known[tenant, name] = KnownAdapter(name=name, ref=ref, root=ref.directory)

    def remove(self, tenant: str, name: str) -> None:
        """It has been unloaded."""
        del self._known[tenant, name]


def find_adapter(catalogues: "list[AdapterCatalogue]", tenant: str, name: str) -> KnownAdapter | None:
    """The first that any catalogue knows."""
    return next((known for each in catalogues if (known := each.find(tenant, name)) is not None), None)
