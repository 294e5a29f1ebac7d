"""Blobs of uploaded files below one directory, each under the id of its record.

No name that a client gave becomes a path.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from coserve.errors import DataError, DiskFullError, LimitError
from coserve.home import is_disk_full, make_private
from coserve.jobs.files.shared_files import SharedFiles, discard
from coserve.jobs.records import FileRecord, new_id
from coserve.jobs.sql.store import Store
from coserve.jobs.sql.transaction import Transaction

_log = logging.getLogger(__name__)

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
RESULTS = "fine-tune-results"
# Advised delay after a quota error: room comes when the owner deletes something or a job ends.
QUOTA_RETRY_S = 60.0
_CHUNK_BYTES = 1 << 20
_PART = ".part"


class Files:
    """Files of all tenants: records in the store, and blobs on disk. Calls block, and may come from
    any thread.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        *,
        max_bytes: int = 512 * 10**6,
        shared: SharedFiles | None = None,
    ) -> None:
        """Open the files below a directory.

        Args:
            store: Store of the records.
            directory: Directory of the blobs.
            max_bytes: Size limit of one file.
            shared: Storage of the directory (default: this machine alone).
        """
        self._store, self._directory, self.max_bytes = store, directory, max_bytes
        self.shared = shared or SharedFiles()
        make_private(directory)

    def create(
        self,
        tenant: str,
        *,
        purpose: str,
        filename: str,
        source: BinaryIO,
        expires_after_s: int | None = None,
        max_total_bytes: int | None = None,
        id: str | None = None,
        also: Callable[[Transaction, FileRecord], None] = lambda transaction, record: None,
    ) -> FileRecord:
        """Store the content of `source` as a file; see `create_of`."""
        return self.create_of(
            iter(lambda: source.read(_CHUNK_BYTES), b""),
            tenant,
            purpose=purpose,
            filename=filename,
            expires_after_s=expires_after_s,
            max_total_bytes=max_total_bytes,
            id=id,
            also=also,
        )

    def create_of(
        self,
        chunks: Iterable[bytes],
        tenant: str,
        *,
        purpose: str,
        filename: str,
        expires_after_s: int | None = None,
        max_total_bytes: int | None = None,
        id: str | None = None,
        also: Callable[[Transaction, FileRecord], None] = lambda transaction, record: None,
    ) -> FileRecord:
        """Store a file. It is durable when this returns; on any error, nothing is left.

        Args:
            chunks: Content of the file.
            tenant: Owner of the file.
            purpose: Purpose, as clients give it.
            filename: Name, as clients give it.
            expires_after_s: Lifetime in seconds (None: unlimited).
            max_total_bytes: Limit of the sizes of all files of the tenant.
            id: Id of the file (default: a new one).
            also: Makes further changes in the same transaction. Files that it removes make room for
                this one.

        Raises:
            DataError: The file is longer than max_bytes.
            LimitError: The tenant's files would exceed max_total_bytes.
            DiskFullError: There is no room on the disk.
            StoreError: The file cannot be shared.
        """
        now = int(time.time())
        id = id or new_id("file-")
        record = FileRecord(
            id=id,
            tenant=tenant,
            purpose=purpose,
            filename=filename,
            num_bytes=self.write_blob(id, chunks),
            created_at=now,
            expires_at=None if expires_after_s is None else now + expires_after_s,
        )
        try:
            with self._store.write() as transaction:
                expired = transaction.remove_expired_files()
                transaction.add_file(record)
                also(transaction, record)
                _check_room(transaction, record, max_total_bytes)
        except BaseException:
            self.remove_blob(id)
            raise
        # After the commit, since no record names these blobs any more.
        for one in expired:
            self.remove_blob(one)
        return record

    def write_blob(self, id: str, chunks: Iterable[bytes]) -> int:
        """Write a blob whole, or not at all, and return its size in bytes. A blob without a record
        is removed at the next start.

        Raises:
            DataError: The blob is longer than max_bytes.
            DiskFullError: There is no room on the disk.
            StoreError: The blob cannot be shared.
        """
        part, num_bytes = self._directory / f"{id}{_PART}", 0
        try:
            with part.open("wb") as file:
                for chunk in chunks:
                    num_bytes += len(chunk)
                    if num_bytes > self.max_bytes:
                        raise DataError(
                            f"the file is longer than {self.max_bytes} bytes, which is the limit"
                        )
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            # Only a complete blob gets its name; `tidy` removes a part that a crash has left.
            self.shared.keep(part.rename(self._directory / id))
        except BaseException as error:
            part.unlink(missing_ok=True)
            # The rename may have succeeded, and only the upload failed.
            discard(self._directory / id)
            if isinstance(error, OSError) and is_disk_full(error):
                raise DiskFullError(
                    "the disk is full, and the file was not kept: free some space there, and try "
                    "again"
                ) from error
            raise
        return num_bytes

    def remove_blob(self, id: str) -> None:
        """Remove a blob, if it exists; if it cannot be removed now, the next start removes it."""
        self.shared.discard(self._directory / id)

    def path(self, record: FileRecord) -> Path:
        """Return the path of a file's blob, after it was fetched if it is elsewhere.

        Raises:
            StoreError: The shared storage cannot be read now.
        """
        path = self._directory / record.id
        self.shared.fetch(path)
        return path

    def find(self, tenant: str, id: str) -> FileRecord | None:
        with self._store.read() as transaction:
            return transaction.file(tenant, id)

    def delete(self, tenant: str, id: str) -> bool:
        """Delete a tenant's file; return whether it existed."""
        with self._store.write() as transaction:
            existed = transaction.remove_file(tenant, id)
        if existed:
            self.remove_blob(id)
        return existed

    def tidy(self) -> None:
        """Remove blobs without a record, of uploads that broke off, and files that have expired.

        Must be called before anything else. If the store has no room for changes, expired records
        stay for now.
        """
        try:
            with self._store.write() as transaction:
                transaction.remove_expired_files()
        except DiskFullError as error:
            _log.warning("expired files stay on record: %s", error)
        with self._store.read() as transaction:
            known = transaction.file_ids()
        for path in self.shared.entries(self._directory):
            if path.name not in known:
                self.shared.discard(path)


def _check_room(transaction: Transaction, record: FileRecord, max_total_bytes: int | None) -> None:
    there = transaction.file_bytes(record.tenant) - record.num_bytes
    if max_total_bytes is not None and there + record.num_bytes > max_total_bytes:
        raise LimitError(
            f"This file has {record.num_bytes} bytes. Your files have {there}, and may have "
            f"{max_total_bytes}: delete "
            "some, and try again.",
            what="files",
            retry_after_s=QUOTA_RETRY_S,
        )
