"""Models that requests can name: the base and its adapters."""

import asyncio
import time
from pathlib import Path

from msgspec import structs

from coserve.jobs.manager import JobManager
from coserve.jobs.records import AdapterRecord
from coserve.protocol.messages import Ready
from coserve.server.adapters.catalogue import AdapterCatalogue, LoadedAdapters, find_adapter
from coserve.server.stored.opened import Opened
from coserve.server.text.adapter_readers import AdapterReaders
from coserve.server.text.prompts import Prompts


class ServedModels:
    """The base model, by its names, and the adapters of it that tenants can name.

    `name` is the base model's name in /v1/models, `base_names` are all names by which requests can
    ask for it. Adapters are looked up in `catalogues`, in order; the start of the server may append
    to them.
    """

    def __init__(
        self,
        model: str,
        served_names: tuple[str, ...],
        *,
        prompts: Prompts,
        jobs: Opened[JobManager],
    ) -> None:
        """Serve a model.

        Args:
            model: Directory or hub id of the model.
            served_names: Names that requests use for it, the first of which /v1/models shows; if
                empty, the name of the directory or the hub id.
            prompts: Tokenizer of the model.
            jobs: Job manager, which has the models that jobs train.
        """
        self.created = int(time.time())
        self.loaded = LoadedAdapters()
        self.catalogues: list[AdapterCatalogue] = [self.loaded]
        self.name = served_names[0] if served_names else _own_name(model)
        self.base_names = served_names or (self.name, model)
        self._prompts, self._jobs = prompts, jobs
        self._readers = AdapterReaders(prompts)

    def find_adapter(self, tenant: str, name: str) -> AdapterRecord | None:
        """Return the adapter that a tenant calls by a name. Blocks."""
        return find_adapter(self.catalogues, tenant, name)

    async def look_up(self, tenant: str, name: str) -> AdapterRecord | None:
        """Return the adapter that a tenant calls by a name, without blocking the event loop."""
        return self.loaded.find(tenant, name) or await asyncio.to_thread(
            self.find_adapter, tenant, name
        )

    async def adapters(self, tenant: str) -> list[AdapterRecord]:
        """Return all adapters that a tenant can name, the oldest first.

        Of those created in one second, adapters that the server was started with come first.
        """

        def listed() -> list[AdapterRecord]:
            records: list[AdapterRecord] = []
            for catalogue in reversed(self.catalogues):
                records += catalogue.list(tenant)
            return sorted(records, key=lambda record: record.created_at)

        return await asyncio.to_thread(listed)

    async def reader_of(self, adapter: AdapterRecord | None, ready: Ready) -> tuple[Prompts, Ready]:
        """Return the tokenizer of an adapter, and `ready` with the adapter's vocabulary size.

        Args:
            adapter: The adapter; None: the base model.
            ready: Description of the engine.
        """
        if adapter is None or adapter.directory is None:
            return self._prompts, ready
        prompts, vocab_size = await asyncio.to_thread(self._readers.of, adapter.directory)
        if vocab_size != ready.vocab_size:
            ready = structs.replace(ready, vocab_size=vocab_size)
        return prompts, ready

    def only_trained(self, tenant: str, name: str) -> str | None:
        """Return the model that this server trains but does not serve and that a name refers to.

        The name is the model's own, or that of an adapter of it. None if there is no such model.
        Blocks.
        """
        manager = self._jobs.value
        if manager is None:
            return None
        adapter = manager.adapters.find_on_any(tenant, name)
        model = name if adapter is None else adapter.base
        return model if model in manager.models.others else None


def _own_name(model: str) -> str:
    """Return the name of a model's directory, or its hub id."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
