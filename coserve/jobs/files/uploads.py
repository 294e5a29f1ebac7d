"""Uploads: files that arrive in parts. Each part is stored by itself until they are joined to one
file.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import BinaryIO

from coserve.errors import JobError
from coserve.jobs.files.blobs import Files
from coserve.jobs.records import FileRecord, UploadRecord, new_id
from coserve.jobs.sql.batch_queries import PART_PURPOSE
from coserve.jobs.sql.store import Store
from coserve.jobs.sql.transaction import Transaction

# Lifetime of parts, as at OpenAI.
_PARTS_KEPT_S = 3600
_CHUNK_BYTES = 1 << 20


class Uploads:
    """Uploads of all tenants. Calls block, and may come from any thread."""

    def __init__(self, store: Store, files: Files) -> None:
        self._store, self._files = store, files

    def create(
        self,
        tenant: str,
        *,
        purpose: str,
        filename: str,
        mime_type: str,
        num_bytes: int,
        expires_after_s: int | None,
    ) -> UploadRecord:
        """Create an upload that waits for its parts.

        Raises:
            JobError: The file would be too long.
        """
        if num_bytes > self._files.max_bytes:
            raise JobError(
                f"bytes is {num_bytes}; a file may have {self._files.max_bytes}", param="bytes"
            )
        now = int(time.time())
        record = UploadRecord(
            id=new_id("upload_"),
            tenant=tenant,
            created_at=now,
            expires_at=now + _PARTS_KEPT_S,
            purpose=purpose,
            filename=filename,
            mime_type=mime_type,
            num_bytes=num_bytes,
            expires_after_s=expires_after_s,
        )
        with self._store.write() as transaction:
            transaction.add_upload(record)
        return record

    def find(self, tenant: str, id: str) -> UploadRecord | None:
        with self._store.read() as transaction:
            return transaction.upload(tenant, id)

    def add_part(
        self, upload: UploadRecord, source: BinaryIO, *, max_total_bytes: int | None
    ) -> FileRecord:
        """Store a part; see `Files.create` for other errors.

        Raises:
            JobError: The upload takes no parts any more.
        """
        # Early, before the content is read; `also` checks again within the transaction.
        _check_pending(upload)

        def also(transaction: Transaction, record: FileRecord) -> None:
            _check_pending(_found(transaction, upload))  # it may have ended meanwhile

        return self._files.create(
            upload.tenant,
            purpose=PART_PURPOSE,
            filename=upload.id,
            source=source,
            # Parts expire together with their upload.
            expires_after_s=max(1, upload.expires_at - int(time.time())),
            max_total_bytes=max_total_bytes,
            id=new_id("part_"),
            also=also,
        )

    def complete(
        self,
        upload: UploadRecord,
        parts: Sequence[str],
        *,
        md5: str | None,
        max_total_bytes: int | None = None,
    ) -> FileRecord:
        """Join parts, in this order, to one file; only one of several concurrent calls succeeds.
        See `Files.create` for other errors.

        Raises:
            JobError: The parts are wrong, or the upload is over or being completed.
        """
        with _one_at_a_time(upload):
            with self._store.read() as transaction:
                _check_pending(_found(transaction, upload))
                known = {part.id: part for part in transaction.parts(upload.id)}
            chosen = _chosen(upload, parts, known)

            def also(transaction: Transaction, record: FileRecord) -> None:
                _check_pending(_found(transaction, upload))
                for part in transaction.parts(upload.id):  # including those that arrived meanwhile
                    known[part.id] = part
                    transaction.remove_file(upload.tenant, part.id)
                transaction.change_upload(upload.id, status="completed", file=record.id)

            record = self._files.create_of(
                self._joined(chosen, md5),
                upload.tenant,
                purpose=upload.purpose,
                filename=upload.filename,
                expires_after_s=upload.expires_after_s,
                max_total_bytes=max_total_bytes,
                also=also,
            )
        self._forget(known)
        return record

    def cancel(self, upload: UploadRecord) -> None:
        """Cancel an upload and delete its parts.

        Raises:
            JobError: The upload is over.
        """
        with self._store.write() as transaction:
            _check_pending(_found(transaction, upload), "it cannot be cancelled any more")
            parts = [part.id for part in transaction.parts(upload.id)]
            for part in parts:
                transaction.remove_file(upload.tenant, part)
            transaction.change_upload(upload.id, status="cancelled")
        self._forget(parts)

    def _joined(self, parts: Sequence[FileRecord], md5: str | None) -> Iterator[bytes]:
        """Yield the content of parts.

        Raises:
            JobError: A part is gone, or the whole content does not match `md5`.
        """
        digest = hashlib.md5(usedforsecurity=False)
        for part in parts:
            try:
                file = self._files.path(part).open("rb")
            except FileNotFoundError:  # the upload was cancelled or has expired
                raise JobError(
                    f"The part {part.id} is not there any more", param="part_ids"
                ) from None
            with file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    yield chunk
        if md5 is not None and digest.hexdigest() != md5.lower():
            raise JobError(
                f"the file's MD5 is {digest.hexdigest()}, and md5 is {md5[:100]}", param="md5"
            )

    def _forget(self, parts: Iterable[str]) -> None:
        for part in parts:
            self._files.remove_blob(part)


# Uploads that are being completed in this process: concurrent calls would each write the file.
_completing: set[str] = set()
_completing_lock = Lock()


@contextmanager
def _one_at_a_time(upload: UploadRecord) -> Iterator[None]:
    """Raise JobError if an upload is being completed already."""
    with _completing_lock:
        if upload.id in _completing:
            raise JobError(f"Upload {upload.id} is being completed: it cannot be completed twice")
        _completing.add(upload.id)
    try:
        yield
    finally:
        with _completing_lock:
            _completing.remove(upload.id)


def _chosen(
    upload: UploadRecord, parts: Sequence[str], known: Mapping[str, FileRecord]
) -> list[FileRecord]:
    """Return the parts of these ids; JobError if they are wrong."""
    if missing := [id for id in parts if id not in known]:
        raise JobError(
            f"part_ids names {missing[0][:100]!r}, which is not a part of {upload.id}",
            param="part_ids",
        )
    if len(set(parts)) < len(parts):
        raise JobError("part_ids names a part twice", param="part_ids")
    chosen = [known[id] for id in parts]
    num_bytes = sum(part.num_bytes for part in chosen)
    if num_bytes != upload.num_bytes:
        raise JobError(
            f"the parts have {num_bytes} bytes, and bytes is {upload.num_bytes}", param="part_ids"
        )
    return chosen


def _found(transaction: Transaction, upload: UploadRecord) -> UploadRecord:
    """Return an upload as it is now."""
    record = transaction.upload(upload.tenant, upload.id)
    assert record is not None, f"upload {upload.id} is not in the store"
    return record


def status_of(upload: UploadRecord) -> str:
    """Return the status of an upload: pending, completed, cancelled or expired."""
    is_late = upload.status == "pending" and upload.expires_at <= time.time()
    return "expired" if is_late else upload.status


def _check_pending(upload: UploadRecord, so: str = "it takes no parts any more") -> None:
    if (status := status_of(upload)) != "pending":
        raise JobError(f"Upload {upload.id} is {status}: {so}")
