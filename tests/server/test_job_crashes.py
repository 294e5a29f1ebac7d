"""Engines and managers that end anywhere: every job finishes as if nothing had happened."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from job_data import DATA, QUICK, adapter_in, distance, steps_of
from job_engine import TENANT, World, world
from safetensors.torch import load_file

from coserve.jobs.deaths import MAX_DEATHS, Deaths
from coserve.jobs.records import EventRecord, job_event

pytestmark = pytest.mark.long

# Ten epochs of nine batches; a checkpoint now and then.
CRASHED: dict[str, Any] = {
    "hyperparameters": {"n_epochs": 10, "batch_size": 3},
    "extension": {**QUICK["extension"], "checkpoint_every_steps": 5, "evaluate_every_steps": 7},
    "seed": 11,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    async def story():
        async with world(tmp_path_factory.mktemp("undisturbed")) as w:
            job = await w.create(DATA, **CRASHED, validation_file=w.upload(DATA))
            job = await w.until_over(job.id)
            assert job.status == "succeeded"
            return job, w.events(job.id), adapter_in(w.checkpoints(job.id)[-1].directory)

    return asyncio.run(story())


def metrics(events: list[EventRecord], name: str) -> list[float]:
    return [event.data[name] for event in events if name in event.data]


def assert_as_if_nothing_had_happened(w, id, undisturbed):
    job, events, adapter = undisturbed
    mine, happened, checkpoints = w.job(id), w.events(id), w.checkpoints(id)
    assert mine.status == "succeeded", mine.error
    assert steps_of(happened) == steps_of(events) == list(range(1, job.num_steps + 1))
    assert steps_of(happened, "evaluation") == steps_of(events, "evaluation")
    for name in ("train_loss", "valid_loss", "num_tokens"):
        assert metrics(happened, name) == pytest.approx(metrics(events, name), rel=1e-4)
    assert [each.step for each in checkpoints] == [*range(5, job.num_steps, 5), job.num_steps]
    assert distance(adapter_in(checkpoints[-1].directory), adapter) < 1e-5
    listed = {Path(each.directory) for each in checkpoints}
    assert set((w.home / "jobs" / id / "checkpoints").iterdir()) == listed
    assert {path.name for path in (w.home / "files").iterdir()} == _file_ids(w)
    assert w.manager.adapters.find(TENANT, mine.name).directory == checkpoints[-1].directory


def _file_ids(w):
    with w.store.read() as transaction:
        return transaction.file_ids()


@pytest.mark.parametrize("seed", range(3))
def test_engines_that_die(seed, undisturbed, tmp_path):
    rng = Random(seed)

    async def story():
        async with world(tmp_path, seed=seed, most_steps=60) as w:
            job = await w.create(DATA, **CRASHED, validation_file=w.upload(DATA))
            num_lives = 1
            while not w.job(job.id).is_terminal:
                engine = w.link.engine
                await w.until(
                    lambda engine=engine: not engine.is_alive or w.job(job.id).is_terminal
                )
                num_lives += 1
                w.live(seed=rng.randrange(99), most_steps=rng.choice((15, 60, 150, 300)))
            assert num_lives > 3
            assert_as_if_nothing_had_happened(w, job.id, undisturbed)

    asyncio.run(story())


async def throw_away(w: World) -> None:
    """Drop everything, as if the process had ended: nothing more is reported or written."""
    if w.link.engine is not None:
        w.link.engine.kill(tell=False)
        await asyncio.to_thread(w.link.engine.join)
    await w.abandon()
    w.store.close()


@pytest.mark.parametrize("seed", range(3))
def test_servers_that_die(seed, undisturbed, tmp_path):
    rng = Random(seed)

    async def story():
        id, num_lives = None, 0
        while True:
            num_lives += 1
            w = World(tmp_path)
            await w.manager.start()
            w.live(seed=rng.randrange(99))
            if id is None:
                id = (await w.create(DATA, **CRASHED, validation_file=w.upload(DATA))).id
            until_step = w.job(id).num_steps_done + rng.choice((0, 1, 3, 4))
            await w.until_step(id, until_step)
            if num_lives > 8:
                await w.until_over(id)
            if w.job(id).is_terminal:
                assert_as_if_nothing_had_happened(w, id, undisturbed)
                await throw_away(w)
                return
            await throw_away(w)

    asyncio.run(story())


def test_what_a_process_left_half_done_is_cleared_away(tmp_path):
    """Blobs and checkpoints without records, and records of what is not there."""

    async def first():
        async with world(tmp_path) as w:
            job = await w.create(
                DATA, **{**CRASHED, "hyperparameters": {"n_epochs": 50, "batch_size": 1}}
            )
            await w.until(lambda: w.job(job.id).num_steps_done > 12)
        return job.id

    id = asyncio.run(first())
    checkpoints = tmp_path / "jobs" / id / "checkpoints"
    for name in (".part-0123", "step-999", "step-5-1"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "job.json").write_text("{}")
    (tmp_path / "jobs" / "ftjob-none").mkdir()
    for name in ("file-none", "file-other.part"):
        (tmp_path / "files" / name).write_text("x")

    async def second():
        async with world(tmp_path) as w:
            assert not (tmp_path / "jobs" / "ftjob-none").exists()
            assert {path.name for path in (tmp_path / "files").iterdir()} == _file_ids(w)
            await w.until(lambda: w.job(id).status == "running")
            with w.store.read() as transaction:
                known = {Path(each.directory).name for each in transaction.all_checkpoints(id)}
            names = {path.name for path in checkpoints.iterdir()}
            assert not names & {".part-0123", "step-999", "step-5-1"}
            assert known
            await w.manager.cancel(TENANT, id)

    asyncio.run(second())


def test_a_job_whose_checkpoint_is_gone_begins_anew(undisturbed, tmp_path):
    async def first():
        async with world(tmp_path) as w:
            job = await w.create(DATA, **CRASHED, validation_file=w.upload(DATA))
            await w.until(lambda: w.job(job.id).num_steps_done > 7)
        return job.id

    id = asyncio.run(first())
    for path in (tmp_path / "jobs" / id / "checkpoints").glob("*/optimizer.safetensors"):
        path.unlink()

    async def second():
        async with world(tmp_path) as w:
            await w.until_over(id)
            assert_as_if_nothing_had_happened(w, id, undisturbed)
            assert sum(event.message == "Fine-tuning job started" for event in w.events(id)) == 2

    asyncio.run(second())


def test_a_job_that_kills_every_engine_fails_at_last(tmp_path):
    async def story():
        async with world(tmp_path, alive=False) as w:
            job = await w.create(DATA, **CRASHED)
            await w.until(lambda: w.job(job.id).status == "queued")
            for _ in range(3):
                assert not w.job(job.id).is_terminal
                engine = w.live(most_steps=0)
                await w.until(lambda: w.job(job.id).status == "running")
                engine.kill(under_way=(job.id,))
                await w.until(lambda: w.job(job.id).status != "running")
            await w.until_over(job.id)
            return w.job(job.id)

    job = asyncio.run(story())
    assert (job.status, job.error["code"]) == ("failed", "engine_died")


def test_what_a_job_does_to_engines_counts_across_servers(tmp_path):
    async def one_death(ids):
        w = World(tmp_path)
        await w.manager.start()
        bad, other = ids or [(await w.create(DATA, **CRASHED)).id for _ in range(2)]
        await w.until(lambda: w.job(bad).status == w.job(other).status == "queued")
        engine = w.live(most_steps=0)
        await w.until(lambda: w.job(bad).status == w.job(other).status == "running")
        engine.kill(under_way=(bad,))
        await w.until(lambda: w.job(bad).status != "running")
        found = w.job(bad), w.job(other)
        await throw_away(w)
        return found

    ids = None
    for _ in range(3):
        bad, other = asyncio.run(one_death(ids))
        ids = bad.id, other.id
        assert other.status == "queued"

    async def after():
        async with world(tmp_path) as w:
            await w.until(lambda: w.job(bad.id).status != "queued")
            return w.job(bad.id)

    failed = asyncio.run(after())
    assert (failed.status, (failed.error or {}).get("code")) == ("failed", "engine_died")


def test_a_job_that_was_to_fail_when_the_server_died_is_not_started_again(tmp_path):
    async def first():
        async with world(tmp_path, alive=False) as w:
            job = await w.create(DATA, **CRASHED)
            await w.until(lambda: w.job(job.id).status == "queued")
            with w.store.write() as transaction:
                transaction.put_deaths({job.id: Deaths(num=MAX_DEATHS, step=0)})
        return job.id

    async def second(id):
        async with world(tmp_path) as w:
            await w.until_over(id)
            with w.store.read() as transaction:
                assert transaction.deaths() == {}, "of jobs that have ended"
            return w.job(id), [event.message for event in w.events(id)]

    job, messages = asyncio.run(second(asyncio.run(first())))
    assert (job.status, job.error["code"]) == ("failed", "engine_died")
    assert "Fine-tuning job started" not in messages


def test_a_job_that_was_done_when_the_server_died_is_done(undisturbed, tmp_path):
    """The last checkpoint was written down, the news that the job has succeeded was not."""

    async def first():
        async with world(tmp_path) as w:
            mine = await w.create(DATA, **CRASHED, validation_file=w.upload(DATA))
            await w.until_over(mine.id)
            with w.store.write() as transaction:
                transaction.change_job(
                    mine.id, status="running", finished_at=None, result_file=None
                )
                transaction.remove_adapter(TENANT, mine.name)
                transaction.add_event(job_event(mine, "as if it had not been told"))
        return mine.id

    async def second(id):
        async with world(tmp_path) as w:
            await w.until_over(id)
            assert_as_if_nothing_had_happened(w, id, undisturbed)
            last = w.checkpoints(id)[-1]
            assert load_file(Path(last.directory) / "adapter_model.safetensors")

    asyncio.run(second(asyncio.run(first())))
