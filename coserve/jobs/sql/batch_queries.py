"""Queries about uploads and batches."""

from typing import Any

from sqlalchemy import func, select, update

from coserve.jobs.records import BATCH_OVER, BatchRecord, FileRecord, Page, UploadRecord
from coserve.jobs.sql.queries import Queries, row_of
from coserve.jobs.sql.tables import BatchTable, FileTable, UploadTable

# Purpose of parts of an upload, whose file name is the upload's id; clients do not see them.
PART_PURPOSE = "upload-part"
# Folder of a home with the results of batches that are under way.
BATCHES_FOLDER = "batches"


class BatchQueries(Queries):
    """The part of `Transaction` about uploads and batches."""

    def add_upload(self, record: UploadRecord) -> None:
        self._session.add(row_of(UploadTable, record))

    def upload(self, tenant: str, id: str) -> UploadRecord | None:
        return self._one(
            UploadRecord,
            select(UploadTable).where(UploadTable.tenant == tenant, UploadTable.id == id),
        )

    def change_upload(self, id: str, **values: Any) -> None:
        """Set fields of an upload."""
        self._execute(update(UploadTable).where(UploadTable.id == id).values(**values))

    def parts(self, upload: str) -> tuple[FileRecord, ...]:
        """Return the parts of an upload, in the order of their arrival."""
        where = (FileTable.purpose == PART_PURPOSE, FileTable.filename == upload)
        return self._all(FileRecord, select(FileTable).where(*where).order_by(FileTable.seq))

    def add_batch(self, record: BatchRecord) -> None:
        self._session.add(row_of(BatchTable, record))

    def batch(self, tenant: str, id: str) -> BatchRecord | None:
        return self._one(
            BatchRecord, select(BatchTable).where(BatchTable.tenant == tenant, BatchTable.id == id)
        )

    def batches(self, tenant: str, *, after: str | None, limit: int) -> Page:
        """Return a page of a tenant's batches, the newest first."""
        query = select(BatchTable).where(BatchTable.tenant == tenant)
        return self._page(BatchRecord, BatchTable, tenant, query, after, limit, True)

    def unfinished_batches(self) -> tuple[BatchRecord, ...]:
        """Return the unfinished batches of every tenant, the oldest first."""
        query = select(BatchTable).where(BatchTable.status.not_in(BATCH_OVER))
        return self._all(BatchRecord, query.order_by(BatchTable.seq))

    def num_unfinished_batches(self, tenant: str) -> int:
        query = select(func.count()).where(
            BatchTable.tenant == tenant, BatchTable.status.not_in(BATCH_OVER)
        )
        return int(self._session.scalar(query) or 0)

    def change_batch(self, id: str, **values: Any) -> None:
        """Set fields of a batch."""
        self._execute(update(BatchTable).where(BatchTable.id == id).values(**values))
