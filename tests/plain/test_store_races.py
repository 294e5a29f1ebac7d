"""Races of several callers of the store: each limit holds, and each change happens once."""

import io
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from homes import TENANT, HandMade

from coserve.engine.commands import AdapterRef
from coserve.errors import CoserveError, JobError, LimitError
from coserve.jobs.files.uploads import Uploads, status_of
from coserve.jobs.records import FileRecord, UploadRecord, adapter_of


class Home(HandMade):
    """A home with uploads."""

    def __init__(self, path: Path, database: str) -> None:
        super().__init__(path, database)
        self.uploads = Uploads(self.store, self.files)

    def begin(self, num_bytes: int) -> UploadRecord:
        """An upload of a file of these bytes."""
        given: dict[str, Any] = {"purpose": "fine-tune", "filename": "f", "mime_type": ""}
        return self.uploads.create(TENANT, num_bytes=num_bytes, expires_after_s=None, **given)

    def part(self, upload: UploadRecord, content: bytes = b"x" * 1000) -> str:
        return self.uploads.add_part(upload, io.BytesIO(content), max_total_bytes=None).id

    def num_bytes(self) -> int:
        """Return the size of all files on record, parts included."""
        with self.store.read() as transaction:
            return transaction.file_bytes(TENANT)

    def files_of(self) -> tuple[FileRecord, ...]:
        with self.store.read() as transaction:
            return transaction.files(
                TENANT, purpose=None, after=None, limit=1000, newest_first=True
            ).items

    def blobs(self) -> set[str]:
        return {path.name for path in (self.path / "files").iterdir()}

    def now(self, upload: UploadRecord) -> UploadRecord:
        found = self.uploads.find(TENANT, upload.id)
        assert found is not None
        return found


@pytest.fixture
def home(tmp_path: Path, database: str) -> Iterator[Home]:
    made = Home(tmp_path / "home", database)
    yield made
    made.close()


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """Do all at the same moment, each on a thread; what they return, or the errors that coserve
    raises on purpose."""
    barrier, found = threading.Barrier(len(actions)), list[Any](actions)

    def act(number: int) -> None:
        barrier.wait()
        try:
            found[number] = actions[number]()
        except CoserveError as error:
            found[number] = error
        except BaseException as error:  # a 500
            found[number] = AssertionError(repr(error))

    threads = [threading.Thread(target=act, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [each for each in found if isinstance(each, AssertionError)]
    assert not broken, broken
    return found


def errors(found: Sequence[Any]) -> list[CoserveError]:
    return [each for each in found if isinstance(each, CoserveError)]


def test_an_upload_that_is_completed_several_times_at_once_becomes_one_file(home: Home):
    for _ in range(5):
        upload = home.begin(3000)
        parts = [home.part(upload) for _ in range(3)]
        found = at_once(
            *[lambda u=upload, p=parts: home.uploads.complete(u, p, md5=None) for _ in range(10)]
        )
        assert [isinstance(each, JobError) for each in found].count(False) == 1
        assert home.now(upload).status == "completed"
    assert len(home.files_of()) == len(home.blobs()) == 5
    assert home.num_bytes() == 5 * 3000


def test_uploads_that_are_completed_at_once_stay_within_the_tenants_bytes(home: Home):
    uploads = [home.begin(1000) for _ in range(8)]
    parts = [home.part(upload) for upload in uploads]

    def complete(number: int) -> Any:
        upload, part = uploads[number], parts[number]
        return home.uploads.complete(upload, [part], md5=None, max_total_bytes=8000)

    assert not errors(at_once(*[lambda n=n: complete(n) for n in range(8)])), (
        "parts make room for their file"
    )
    assert home.num_bytes() == 8000
    late = home.begin(1000)
    part = home.part(late)
    with pytest.raises(LimitError):
        home.uploads.complete(late, [part], md5=None, max_total_bytes=8000)
    assert home.now(late).status == "pending"


def test_an_upload_is_completed_or_cancelled_and_not_both(home: Home):
    ends: Counter[str] = Counter()
    for _ in range(12):
        upload = home.begin(1000)
        part = home.part(upload)
        found = at_once(
            partial(home.uploads.complete, upload, [part], md5=None),
            partial(home.uploads.cancel, upload),
        )
        assert len(errors(found)) == 1
        ends[status_of(home.now(upload))] += 1
    assert ends["completed"] + ends["cancelled"] == 12
    assert len(home.files_of()) == len(home.blobs()) == ends["completed"]
    assert home.num_bytes() == 1000 * ends["completed"]


def test_parts_that_come_while_an_upload_ends_do_not_outlive_it(home: Home):
    for end in ("complete", "cancel") * 6:
        upload = home.begin(1000)
        part = home.part(upload)

        def finish(end: str = end, upload: UploadRecord = upload, part: str = part) -> Any:
            return (
                home.uploads.complete(upload, [part], md5=None)
                if end == "complete"
                else home.uploads.cancel(upload)
            )

        found = at_once(finish, *[lambda u=upload: home.part(u) for _ in range(5)])
        assert not isinstance(found[0], CoserveError)
        with home.store.read() as transaction:
            assert transaction.parts(upload.id) == ()
    assert len(home.files_of()) == len(home.blobs()) == 6


def test_files_that_come_at_once_stay_within_the_tenants_bytes(home: Home):
    def create() -> FileRecord:
        given: dict[str, Any] = {"purpose": "fine-tune", "filename": "f", "max_total_bytes": 5000}
        return home.files.create(TENANT, source=io.BytesIO(b"x" * 1000), **given)

    found = at_once(*[create] * 12)
    assert len(errors(found)) == 7 and home.num_bytes() == 5000
    assert len(home.blobs()) == 5


def test_a_file_is_deleted_once(home: Home):
    file = home.upload()
    assert at_once(*[lambda: home.files.delete(TENANT, file.id)] * 8).count(True) == 1


def test_jobs_that_come_at_once_stay_within_the_tenants_number(home: Home):
    file = home.upload()
    records = [home.job(status="cancelled", finished_at=1, training_file=file.id) for _ in range(8)]
    fresh = [_again(record) for record in records]
    found = at_once(*[lambda r=record: home.writer.add(r, 3) for record in fresh])
    assert len(errors(found)) == 5
    with home.store.read() as transaction:
        assert transaction.num_unfinished_jobs(TENANT) == 3


def test_a_job_does_not_begin_with_an_adapter_that_is_deleted_at_this_moment(home: Home):
    for _ in range(6):
        made = home.job(status="succeeded", finished_at=5)
        directory = home.checkpoint(made, 10)
        with home.store.write() as transaction:
            transaction.put_adapter(adapter_of(made, made.name, str(directory)))
        start = AdapterRef(name=made.name, directory=str(directory))
        follower = _again(made, start={"name": start.name, "directory": start.directory})
        found = at_once(
            partial(home.writer.add, follower),
            partial(home.adapters.delete, TENANT, made.name),
        )
        assert len(errors(found)) == 1, "either the job needs it, or it is gone"
        assert (home.writer.find(TENANT, follower.id) is not None) == directory.exists()


def test_a_file_is_gone_or_whole_for_a_job_that_is_created_as_it_is_deleted(home: Home):
    for _ in range(6):
        file = home.upload()
        record = _again(home.job(status="cancelled", finished_at=1), training_file=file.id)
        added, deleted = at_once(
            partial(home.writer.add, record), partial(home.files.delete, TENANT, file.id)
        )
        assert deleted is True and (added is None or isinstance(added, JobError))


def test_results_of_a_job_whose_end_cannot_be_recorded_leave_no_blob(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    job = home.job()
    home.checkpoint(job, 10)
    before = home.blobs()

    def fail(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("coserve.jobs.lifecycle.outcome.adapter_of", fail)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                home.writer.end(job.id, "succeeded")
    assert home.blobs() == before
    assert home.writer.end(job.id, "succeeded").result_file in home.blobs()


def _again(record: Any, **more: Any) -> Any:
    """A new job like one that is over."""
    from dataclasses import replace

    from coserve.jobs.records import new_id

    id = new_id("ftjob-")
    given = {
        "id": id,
        "name": f"ft:{id}",
        "status": "validating_files",
        "finished_at": None,
        "num_steps": 0,
        **more,
    }
    return replace(record, created_at=int(time.time()), **given)
