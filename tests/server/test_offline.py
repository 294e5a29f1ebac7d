"""`coserve jobs cancel --offline`: on record, without a server, as if a server had done it."""

import asyncio
from pathlib import Path

import pytest
from job_data import DATA, LONG
from job_engine import TENANT, World, world
from typer.testing import CliRunner

from coserve.cli.main import app
from coserve.errors import CoserveError
from coserve.jobs.maintenance.doctor import examine
from coserve.server.lifecycle.home_lock import lock_home


def cancel(home: Path, job: str) -> str:
    result = CliRunner().invoke(app, ["jobs", "cancel", job, "--offline", "--home", str(home)])
    if result.exception is not None:
        raise result.exception
    return result.stdout.strip()


def left_of(w: World, id: str) -> tuple:
    """What is to be the same, however it was cancelled."""
    job = w.job(id)
    messages = [
        event.message
        for event in w.events(id)
        if not event.kind and not event.message.startswith("Check")
    ]
    kept = sorted(
        str(path.relative_to(w.home / "jobs" / id)) for path in (w.home / "jobs" / id).rglob("*.*")
    )
    num_listed = len(w.checkpoints(id))
    shown = (job.status, job.error, job.result_file, job.trained_tokens, job.finished_at is None)
    # Both have checkpoints; how many depends on when they were met.
    return shown, messages[-1], {name.split("/")[-1] for name in kept}, len(kept) == 2 * num_listed


@pytest.mark.long
def test_a_job_is_cancelled_as_a_server_would(tmp_path: Path):
    async def begun(w: World) -> str:
        job = await w.create(DATA, **LONG)
        await w.until(lambda: len(w.checkpoints(job.id)) >= 2)
        return job.id

    async def first() -> tuple[str, str, tuple]:
        async with world(tmp_path) as w:
            online = await begun(w)
            await w.manager.cancel(TENANT, online)
            offline = await begun(w)
            return online, offline, left_of(w, online)

    async def second() -> tuple:
        async with world(tmp_path) as w:
            await w.manager.settled()
            assert examine(tmp_path, w.store) == []
            with pytest.raises(CoserveError, match="has already completed"):
                await w.manager.resume(TENANT, offline)
            return left_of(w, offline)

    online, offline, expected = asyncio.run(first())
    assert expected[0][0] == "cancelled"
    assert cancel(tmp_path, "last") == f"{offline}: cancelled"
    unopened = World(tmp_path)  # nothing is tidied by a start
    assert left_of(unopened, offline) == expected
    unopened.store.close()
    assert asyncio.run(second()) == expected
    for id in (online, offline):
        with pytest.raises(CoserveError, match="has already completed: its status is cancelled"):
            cancel(tmp_path, id)
    with pytest.raises(CoserveError, match="There is no fine-tuning job 'ftjob-none'"):
        cancel(tmp_path, "ftjob-none")
    with lock_home(tmp_path), pytest.raises(CoserveError, match="a server uses"):
        cancel(tmp_path, "last")


def test_where_no_jobs_are(tmp_path: Path):
    World(tmp_path).store.close()
    with pytest.raises(CoserveError, match="There are no fine-tuning jobs"):
        cancel(tmp_path, "last")
    with pytest.raises(CoserveError, match="there is no home at"):
        cancel(tmp_path / "none", "last")
    assert not (tmp_path / "none").exists()
