"""Catalogue of the adapters that jobs have made, by tenant and name: those in the store, and those
of live jobs.
"""

from collections.abc import Callable
from pathlib import Path

from coserve.errors import JobError
from coserve.jobs.files.folders import Folders
from coserve.jobs.records import AdapterRecord, JobRecord, adapter_of
from coserve.jobs.sql.store import Store


class JobAdapters:
    """An `AdapterCatalogue` of jobs' adapters.

    Lookups may come from any thread; changes come from the event loop alone.
    """

    def __init__(self, store: Store, base: str, folders: Folders) -> None:
        """Open the catalogue of the adapters of one base model.

        Args:
            store: Store that records adapters.
            base: Model that is served; `find` and `list` leave out adapters of other models.
            folders: Folders in which jobs keep their adapters.
        """
        self._store, self._base, self._folders = store, base, folders
        self._kept: dict[tuple[str, str], AdapterRecord] = {}
        self._live: dict[tuple[str, str], AdapterRecord] = {}

    def list(self, tenant: str) -> list[AdapterRecord]:
        """Return the adapters of a tenant's finished jobs and checkpoints, the oldest first, then
        those of its live jobs.
        """
        with self._store.read() as transaction:
            stored = transaction.adapters(tenant, self._base)
        return [
            *stored,
            *(each for (owner, _), each in list(self._live.items()) if owner == tenant),
        ]

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """Return the adapter of a name, on the served model; the store is queried once per name."""
        record = self.find_on_any(tenant, name)
        return None if record is None or record.base != self._base else record

    def find_on_any(self, tenant: str, name: str) -> AdapterRecord | None:
        """Return the adapter of a name, on any model, served or not."""
        kept = self._kept  # `changed` replaces it, so that a stale answer is not kept
        if (record := kept.get((tenant, name)) or self._live.get((tenant, name))) is not None:
            return record
        with self._store.read() as transaction:
            record = transaction.adapter(tenant, name)
        if record is None:
            return None
        kept[tenant, name] = record
        return record

    def is_live(self, tenant: str, name: str) -> bool:
        """Return whether the adapter is that of a live job that has not ended."""
        return (tenant, name) in self._live

    def changed(self) -> None:
        """Discard cached lookups, since the store may have changed."""
        self._kept = {}

    def add_live(self, job: JobRecord) -> None:
        """Add the adapter of a live job that has published a version; a repeated call changes
        nothing.
        """
        self._live.setdefault((job.tenant, job.name), adapter_of(job, job.name, None))

    def remove_live(self, job: JobRecord) -> None:
        """Remove the adapter of a live job that has ended."""
        self._live.pop((job.tenant, job.name), None)

    def lose_live(self, is_lost: Callable[[str], bool]) -> None:
        """Remove live adapters whose engine has died: they existed on its device alone.

        Args:
            is_lost: Returns whether the dead engine had a job.
        """
        self._live = {name: each for name, each in self._live.items() if not is_lost(each.job)}

    def delete(self, tenant: str, name: str) -> tuple[str, ...]:
        """Delete an adapter from the store and from disk: a checkpoint, or a model with all
        checkpoints of its job.

        Blocks; may be called from any thread, and `changed` must be called afterwards.

        Returns:
            The names that were deleted; none if the adapter does not exist.

        Raises:
            JobError: A job needs the adapter, or is training it.
        """
        is_live = self.is_live(tenant, name)
        with self._store.write() as transaction:
            record = transaction.adapter(tenant, name)
            if record is None:
                if is_live:
                    raise JobError(f"{name} is being trained: cancel its job first", param="model")
                return ()
            job = transaction.any_job(record.job)
            is_model = job is not None and job.name == name
            gone = transaction.adapters_of(record.job) if is_model else (record,)
            directories = {each.directory for each in gone if each.directory is not None}
            # Neither the job that makes an adapter nor one that starts from it may lose it.
            for other in transaction.unfinished_jobs():
                if other.id == record.job or (
                    other.start is not None and other.start["directory"] in directories
                ):
                    raise JobError(
                        f"job {other.id} needs {name}: cancel it first, or wait for it",
                        param="model",
                    )
            for each in gone:
                transaction.remove_adapter(tenant, each.name)
            if is_model:
                transaction.remove_checkpoints(record.job)
            else:
                transaction.remove_checkpoint_of_name(record.job, name)
            # A job's model shares its directory with the checkpoint that it is.
            unused = [Path(each) for each in directories if not transaction.adapters_in(each)]
        for directory in unused:
            if self._folders.holds(directory):
                self._folders.shared.discard(directory)
        if is_model:
            self._folders.remove(record.job)
        return tuple(each.name for each in gone)
