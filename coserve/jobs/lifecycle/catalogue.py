"""The adapters that jobs have made, by tenant and name: those in the store, and those of live
jobs.
"""

from collections.abc import Callable
from pathlib import Path

from coserve.errors import JobError
from coserve.jobs.files.folders import Folders
from coserve.jobs.records import AdapterRecord, JobRecord, adapter_of
from coserve.jobs.sql.store import Store


class JobAdapters:
    """An `AdapterCatalogue`. Questions from any thread; changes from the event loop alone."""

    def __init__(self, store: Store, base: str, folders: Folders) -> None:
        """base: the model that is served; adapters of others are not found. folders: where jobs
        keep them.
        """
        self._store, self._base, self._folders = store, base, folders
        self._kept: dict[tuple[str, str], AdapterRecord] = {}
        self._live: dict[tuple[str, str], AdapterRecord] = {}

    def list(self, tenant: str) -> list[AdapterRecord]:
        """Those that a tenant's jobs have made, the oldest first, and those of its live jobs."""
        with self._store.read() as transaction:
            found = transaction.adapters(tenant, self._base)
        return [*found, *(each for (owner, _), each in list(self._live.items()) if owner == tenant)]

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """The one of a name; the store is asked once."""
        found = self.find_on_any(tenant, name)
        return None if found is None or found.base != self._base else found

    def find_on_any(self, tenant: str, name: str) -> AdapterRecord | None:
        """The same on whatever model, served or not."""
        kept = self._kept  # another, if something changes while the store is asked
        if (found := kept.get((tenant, name)) or self._live.get((tenant, name))) is not None:
            return found
        with self._store.read() as transaction:
            found = transaction.adapter(tenant, name)
        if found is None:
            return None
        kept[tenant, name] = found
        return found

    def is_live(self, tenant: str, name: str) -> bool:
        """Whether a job that has not ended serves it."""
        return (tenant, name) in self._live

    def changed(self) -> None:
        """What is in the store may have changed."""
        self._kept = {}

    def add_live(self, job: JobRecord) -> None:
        """A live job has published; no error if it had before."""
        self._live.setdefault((job.tenant, job.name), adapter_of(job, job.name, None))

    def remove_live(self, job: JobRecord) -> None:
        """The job has ended."""
        self._live.pop((job.tenant, job.name), None)

    def lose_live(self, is_lost: Callable[[str], bool]) -> None:
        """An engine has died, and what was on its device alone is gone. is_lost: whether it had a
        job.
        """
        self._live = {name: each for name, each in self._live.items() if not is_lost(each.job)}

    def delete(self, tenant: str, name: str) -> tuple[str, ...]:
        """Forget an adapter and remove it from disk: a checkpoint, or a model with all checkpoints
        of its job. Blocks; may be called from any thread, and `changed` has to be called after it.

        Returns:
            The names that are gone; none if it was not there.

        Raises:
            JobError: A job needs it, or trains it now.
        """
        is_live = self.is_live(tenant, name)
        with self._store.write() as transaction:
            found = transaction.adapter(tenant, name)
            if found is None:
                if is_live:
                    raise JobError(f"{name} is being trained: cancel its job first", param="model")
                return ()
            job = transaction.any_job(found.job)
            is_model = job is not None and job.name == name
            gone = transaction.adapters_of(found.job) if is_model else (found,)
            directories = {each.directory for each in gone if each.directory is not None}
            for other in transaction.unfinished_jobs():
                if other.id == found.job or (
                    other.start is not None and other.start["directory"] in directories
                ):
                    raise JobError(
                        f"job {other.id} needs {name}: cancel it first, or wait for it",
                        param="model",
                    )
            for each in gone:
                transaction.remove_adapter(tenant, each.name)
            if is_model:
                transaction.remove_checkpoints(found.job)
            else:
                transaction.remove_checkpoint_of_name(found.job, name)
            unused = [Path(each) for each in directories if not transaction.adapters_in(each)]
        for directory in unused:
            if self._folders.holds(directory):
                self._folders.shared.discard(directory)
        if is_model:
            self._folders.remove(found.job)
        return tuple(each.name for each in gone)
