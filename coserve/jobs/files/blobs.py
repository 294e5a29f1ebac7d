"""Files: blobs on disk below one directory, each under its record's id. No name that a client gave
is ever a path.
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
# What a tenant has too much of goes when its owner, or a job's end, takes it away: nobody knows
# when.
QUOTA_RETRY_S = 60.0
_CHUNK_BYTES = 1 << 20
_PART = ".part"


class Files:
    """Calls block; from any thread."""

    def __init__(
        self,
        store: Store,
        directory: Path,
        *,
        max_bytes: int = 512 * 10**6,
        shared: SharedFiles | None = None,
    ) -> None:
        """max_bytes: of one file. shared: where `directory` is (default: here alone)."""
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
        """Keep what `source` holds; see `create_of`."""
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
        """Keep a file. It is durable when this returns; on any error, nothing is left.

        Args:
            max_total_bytes: of all files of the tenant.
            id: of the file (default: a new one).
            also: what else is written down with it, or not at all. What it removes makes room.

        Raises:
            DataError: it is longer than max_bytes. LimitError: the tenant's files would be more
                than it may have.
            DiskFullError: there is no room. StoreError: it cannot be shared.
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
        for one in expired:
            self.remove_blob(one)
        return record

    def write_blob(self, id: str, chunks: Iterable[bytes]) -> int:
        """Write a blob whole, or not at all; returns its bytes. Without a record, it is gone after
        the next start.

        DiskFullError if there is no room for it; StoreError if it cannot be shared.
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
            self.shared.keep(part.rename(self._directory / id))
        except BaseException as error:
            part.unlink(missing_ok=True)
            discard(self._directory / id)
            if isinstance(error, OSError) and is_disk_full(error):
                raise DiskFullError(
                    "the disk is full, and the file was not kept: free some space there, and try "
                    "again"
                ) from error
            raise
        return num_bytes

    def remove_blob(self, id: str) -> None:
        """No error if it is not there, or cannot be removed: then it is gone after the next
        start.
        """
        self.shared.discard(self._directory / id)

    def path(self, record: FileRecord) -> Path:
        """Where its blob is, if it is anywhere; StoreError if that cannot be known now."""
        path = self._directory / record.id
        self.shared.fetch(path)
        return path

    def find(self, tenant: str, id: str) -> FileRecord | None:
        with self._store.read() as transaction:
            return transaction.file(tenant, id)

    def delete(self, tenant: str, id: str) -> bool:
        """Returns whether it was there."""
        with self._store.write() as transaction:
            found = transaction.remove_file(tenant, id)
        if found:
            self.remove_blob(id)
        return found

    def tidy(self) -> None:
        """Remove what nothing refers to: blobs of uploads that broke off, and of files that are
        past their time. Only before anything else is asked. Without room for a change of the store,
        records of the latter stay for now.
        """
        try:
            with self._store.write() as transaction:
                transaction.remove_expired_files()
        except DiskFullError as error:
            _log.warning("files that are past their time stay on record: %s", error)
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
