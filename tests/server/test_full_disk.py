"""A disk that is full refuses what does not fit, and holds up nothing else; with room again, all is
there, once."""

import asyncio
import json
import signal
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest
from job_data import DATA, LONG, QUICK, steps_of
from job_engine import TENANT, World, world
from served import Served, serving
from small_disk import SmallDisk, small_disk

from coserve.errors import DiskFullError
from coserve.jobs.lifecycle import driver

pytestmark = pytest.mark.long

LINES = [
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n * n}."}) for n in range(30)
]
BIG = b"x" * (3 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


def settings(num_epochs: int, every: int = 4) -> dict[str, Any]:
    extension = {**QUICK["extension"], "checkpoint_every_steps": every}
    return {
        "hyperparameters": {"n_epochs": num_epochs, "batch_size": 3},
        "extension": extension,
        "seed": 7,
    }


def whole_steps(w: World, id: str) -> None:
    """Each step has been told once."""
    assert steps_of(w.events(id)) == list(range(1, w.job(id).num_steps + 1))


async def until_blocked(w: World, id: str) -> None:
    """Wait until the engine has made steps that the store refuses, and the manager has noticed."""

    async def is_refused() -> bool:
        try:
            await w.manager.pause(TENANT, id)
        except DiskFullError:
            return True
        await w.manager.resume(TENANT, id)
        return False

    async with asyncio.timeout(60):
        while not await is_refused():
            await asyncio.sleep(0.01)


def test_files_and_jobs_are_refused_and_nothing_is_left_of_them(disk: SmallDisk) -> None:
    async def story() -> None:
        async with world(disk.path, alive=False) as w:
            job = await w.create(DATA, **QUICK)
            await w.until(lambda: w.job(job.id).status == "queued")
            before = {path.name for path in (disk.path / "files").iterdir()}
            disk.fill()
            for content in (DATA, BIG):
                with pytest.raises(DiskFullError, match="the file was not kept"):
                    w.files.create(
                        TENANT, purpose="fine-tune", filename="x", source=BytesIO(content)
                    )
            assert {path.name for path in (disk.path / "files").iterdir()} == before
            await until_blocked(w, job.id)
            with pytest.raises(DiskFullError, match="nothing was changed"):
                await w.manager.cancel(TENANT, job.id)
            assert w.job(job.id).status == "queued"
            disk.empty()
            assert (await w.manager.cancel(TENANT, job.id)).status == "cancelled"

    asyncio.run(story())


def test_jobs_wait_for_room_and_end_as_if_nothing_had_happened(disk: SmallDisk) -> None:
    async def story() -> None:
        async with world(disk.path) as w:
            rests = await w.create(DATA, **LONG)
            await w.until_step(rests.id, 1)
            await w.manager.pause(TENANT, rests.id)
            ends = await w.create(DATA, **settings(6))
            await w.until_step(ends.id, 2)
            disk.fill()
            await until_blocked(w, ends.id)
            for refused in (
                w.manager.cancel(TENANT, ends.id),
                w.manager.resume(TENANT, rests.id),
                w.create_from(ends.training_file, **QUICK),
            ):
                with pytest.raises(DiskFullError):
                    await refused
            assert (w.job(ends.id).status, w.job(rests.id).status) == ("running", "paused")
            disk.empty()
            job = await w.until_over(ends.id)
            assert job.status == "succeeded", job.error
            whole_steps(w, ends.id)
            assert (await w.manager.resume(TENANT, rests.id)).status == "running"
            assert (await w.manager.cancel(TENANT, rests.id)).status == "cancelled"

    asyncio.run(story())


def test_what_jobs_write_beside_the_store_waits_for_room_alone(
    disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """The store is on another disk. One job comes to its end, one is being read, and one is paused
    meanwhile."""

    async def story() -> None:
        async with world(disk.path, database=f"sqlite:///{disk.path.parent}/store.db") as w:
            rests = await w.create(DATA, **settings(8, every=0))
            ends = await w.create_from(rests.training_file, **settings(2, every=0))
            await w.until(
                lambda: w.job(ends.id).num_steps_done > 0 and w.job(rests.id).num_steps_done > 0
            )
            disk.fill()
            fresh = await w.create_from(rests.training_file, **QUICK)
            dropped = await w.create_from(rests.training_file, **QUICK)
            assert (await w.manager.pause(TENANT, rests.id)).status == "paused"
            assert not (await w.manager.resume(TENANT, rests.id)).is_terminal
            await w.until_step(ends.id, w.job(ends.id).num_steps)
            assert (await w.manager.cancel(TENANT, dropped.id)).status == "cancelled"
            assert [w.job(each.id).status for each in (ends, fresh)] == [
                "running",
                "validating_files",
            ]
            disk.empty()
            for each in (ends, fresh, rests):
                job = await w.until_over(each.id)
                assert job.status == "succeeded", job.error
                whole_steps(w, each.id)

    asyncio.run(story())
    for words in (
        "wait, and are read again in 1 s",
        "cannot write a checkpoint",
        "trying again until there is room",
    ):
        assert words in caplog.text


def test_jobs_that_report_too_much_rest_and_engines_may_die(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_MAX_WAITING_EVENTS", 5)

    async def story() -> None:
        async with world(disk.path) as w:
            job = await w.create(DATA, **settings(12))
            await w.until_step(job.id, 5)
            engine = w.link.engine.engine
            disk.fill()
            await w.until(lambda: engine.jobs[job.id].state == "paused")
            disk.empty()
            done = w.job(job.id).num_steps_done
            await w.until_step(job.id, done + 3)
            disk.fill()
            await until_blocked(w, job.id)
            w.link.engine.kill()
            w.live()
            with pytest.raises(DiskFullError):
                await w.manager.cancel(TENANT, job.id)
            disk.empty()
            assert (await w.until_over(job.id)).status == "succeeded"
            whole_steps(w, job.id)

    asyncio.run(story())


def create(served: Served, num_epochs: int) -> str:
    client = served.client()
    file = client.files.create(file=("data.jsonl", "\n".join(LINES).encode()), purpose="fine-tune")
    made = client.fine_tuning.jobs.create(
        model="small",
        training_file=file.id,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": num_epochs, "batch_size": 3}},
        },
        extra_body={"coserve": {"checkpoint_every_steps": 15}},
    )
    return made.id


def test_a_server_whose_disk_is_full_says_so_and_continues_when_there_is_room(
    disk: SmallDisk,
) -> None:
    with serving(home=disk.path) as served:
        client = served.client()
        jobs = client.fine_tuning.jobs
        ids = [create(served, 12) for _ in range(2)]
        done = [lambda id=id: jobs.retrieve(id).model_extra["coserve"]["step"] for id in ids]
        served.wait_until(lambda: all(each() > 2 for each in done))
        disk.fill()
        for content in (b'{"text": "x"}', BIG):
            with pytest.raises(openai.InternalServerError, match="the disk is full") as refused:
                client.files.create(file=("x.jsonl", content), purpose="fine-tune")
            assert refused.value.status_code == 507
            assert refused.value.response.json()["error"]["code"] == "disk_full"

        def use_again_and_again(verb: Any, id: str) -> None:
            for _ in range(1000):  # what the store has in its log may give it room for a while
                verb(id)
                jobs.resume(id)

        for verb in (jobs.pause, jobs.cancel):
            with pytest.raises(openai.InternalServerError, match="is full") as refused:
                use_again_and_again(verb, ids[0])
            assert refused.value.status_code == 507
        assert client.completions.create(model="small", prompt="x", max_tokens=2).usage is not None
        disk.empty()
        for id in ids:
            served.wait_until(
                lambda id=id: jobs.retrieve(id).status not in ("queued", "running"), limit_s=120
            )
            assert jobs.retrieve(id).status == "succeeded"
            events = list(jobs.list_events(id, limit=1000))
            metrics: list[Any] = [each.data for each in events if each.type == "metrics"]
            steps = [each["step"] for each in metrics if "train_loss" in each]
            assert sorted(steps) == list(range(1, 121))
        assert "Traceback" not in served.log.read_text()


def test_a_server_that_was_killed_on_a_full_disk_starts_and_reads_and_says_what_it_cannot(
    disk: SmallDisk,
) -> None:
    with serving(home=disk.path) as first:
        client = first.client()
        file = client.files.create(file=("x.jsonl", b'{"text": "x"}'), purpose="fine-tune")
        job = create(first, 50)
        first.wait_until(
            lambda: client.fine_tuning.jobs.retrieve(job).model_extra["coserve"]["step"] > 2
        )
        asked = client.responses.create(
            model="small", input="x", background=True, max_output_tokens=300
        )
        disk.fill()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
    with serving(home=disk.path) as second:
        client = second.client()
        assert client.completions.create(model="small", prompt="x", max_tokens=2).usage is not None
        chat = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "x"}], max_tokens=2
        )
        assert chat.usage is not None
        assert client.files.content(file.id).content == b'{"text": "x"}'
        assert client.fine_tuning.jobs.retrieve(job).status == "running", "as it is on record"
        assert second.get("/ready").status_code == 200
        storage = second.get("/v1/status").json()["storage"]
        assert (storage["writable"], storage["free_bytes"]) == (False, 0)
        assert "disk is full" in storage["problem"]
        with pytest.raises(openai.InternalServerError, match="is full") as refused:
            client.files.create(file=("x.jsonl", BIG), purpose="fine-tune")
        assert refused.value.status_code == 507
        with pytest.raises(openai.InternalServerError, match="is full") as refused:
            client.fine_tuning.jobs.cancel(job)
        assert refused.value.status_code == 507
        disk.empty()
        second.wait_until(lambda: second.get("/v1/status").json()["storage"]["writable"])
        second.wait_until(lambda: client.responses.retrieve(asked.id).status == "failed")
        second.wait_until(lambda: client.fine_tuning.jobs.retrieve(job).status == "running")
        before = client.fine_tuning.jobs.retrieve(job).model_extra["coserve"]["step"]
        second.wait_until(
            lambda: client.fine_tuning.jobs.retrieve(job).model_extra["coserve"]["step"] > before
        )
        assert client.fine_tuning.jobs.cancel(job).status == "cancelled"
        assert client.files.create(file=("x.jsonl", b"{}"), purpose="fine-tune").bytes == 2
        assert "Traceback" not in second.log.read_text()
