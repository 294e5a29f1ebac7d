"""Files that come in parts: each part is kept by itself, and all of them become one file."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from coserve.errors import JobError
from coserve.jobs.batch_rows import PART_PURPOSE
from coserve.jobs.files import Files
from coserve.jobs.records import FileRecord, UploadRecord, new_id
from coserve.jobs.store import Store
from coserve.jobs.transaction import Transaction

# As OpenAI keeps them.
_PARTS_KEPT_S = 3600
_CHUNK_BYTES = 1 << 20


class Uploads:
    """Calls block; from any thread."""

    def __init__(self, store: Store, files: Files) -> None:
        self._store, self._files = store, files

    def create(
        self, tenant: str, *, purpose: str, filename: str, mime_type: str, num_bytes: int, expires_after_s: int | None
    ) -> UploadRecord:
        """One that waits for its parts; JobError if the file would be too long."""
        if num_bytes > self._files.max_bytes:
            raise JobError(f"bytes is {num_bytes}; a file may have {self._files.max_bytes}", param="bytes")
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

    def add_part(self, upload: UploadRecord, source: BinaryIO, *, max_total_bytes: int | None) -> FileRecord:
        """Keep a part; JobError if the upload takes none any more. Other errors: see `Files.create`."""
        _check_pending(upload)
        return self._files.create(
            upload.tenant,
            purpose=PART_PURPOSE,
            filename=upload.id,
            source=source,
            expires_after_s=max(1, upload.expires_at - int(time.time())),
            max_total_bytes=max_total_bytes,
            id=new_id("part_"),
        )

    def complete(self, upload: UploadRecord, parts: Sequence[str], *, md5: str | None) -> FileRecord:
        """Join its parts, in this order.

        Raises:
            JobError: names what is wrong with them.
        """
        _check_pending(upload)
        with self._store.read() as transaction:
            known = {part.id: part for part in transaction.parts(upload.id)}
        if missing := [id for id in parts if id not in known]:
            raise JobError(f"part_ids names {missing[0][:100]!r}, which is no part of {upload.id}", param="part_ids")
        if len(set(parts)) < len(parts):
            raise JobError("part_ids names a part twice", param="part_ids")
        chosen = [known[id] for id in parts]
        num_bytes = sum(part.num_bytes for part in chosen)
        if num_bytes != upload.num_bytes:
            raise JobError(f"the parts have {num_bytes} bytes, and bytes said {upload.num_bytes}", param="part_ids")
        digest = hashlib.md5(usedforsecurity=False)

        def chunks() -> Iterator[bytes]:
            for part in chosen:
                with self._files.path(part).open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        yield chunk
            if md5 is not None and digest.hexdigest() != md5.lower():
                raise JobError(f"the file's MD5 is {digest.hexdigest()}, and md5 said {md5[:100]}", param="md5")

        def also(transaction: Transaction, record: FileRecord) -> None:
            transaction.change_upload(upload.id, status="completed", file=record.id)
            for part in known.values():
                transaction.remove_file(upload.tenant, part.id)

        record = self._files.create_of(
            chunks(),
            upload.tenant,
            purpose=upload.purpose,
            filename=upload.filename,
            expires_after_s=upload.expires_after_s,
            also=also,
        )
        self._forget(known)
        return record

    def cancel(self, upload: UploadRecord) -> None:
        """Forget its parts; JobError if it is over."""
        _check_pending(upload, "it cannot be cancelled any more")
        with self._store.write() as transaction:
            parts = [part.id for part in transaction.parts(upload.id)]
            for part in parts:
                transaction.remove_file(upload.tenant, part)
            transaction.change_upload(upload.id, status="cancelled")
        self._forget(parts)

    def _forget(self, parts: Sequence[str] | dict[str, FileRecord]) -> None:
        for part in parts:
            self._files.remove_blob(part)


def status_of(upload: UploadRecord) -> str:
    """pending, completed, cancelled or expired."""
    is_late = upload.status == "pending" and upload.expires_at <= time.time()
    return "expired" if is_late else upload.status


def _check_pending(upload: UploadRecord, so: str = "it takes no parts any more") -> None:
    if (status := status_of(upload)) != "pending":
        raise JobError(f"Upload {upload.id} is {status}: {so}")
