"""How many jobs train at once, and for how long."""

import asyncio
from pathlib import Path

from job_data import DATA, LONG
from job_engine import TENANT, world


def test_jobs_wait_for_a_place_and_a_paused_one_gives_its_up(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, manager={"max_running": 1}) as w:
            first = await w.create(DATA, **LONG)
            await w.until(lambda: w.job(first.id).status == "running")
            second = await w.create(DATA, **LONG)
            third = await w.create(DATA, **LONG, tenant="other")
            jobs = (first, second, third)

            def statuses() -> list[str]:
                return [w.job(each.id, each.tenant).status for each in jobs]

            def positions() -> list[int | None]:
                return [w.manager.queue_position(each) for each in jobs]

            await w.until(lambda: positions() == [None, 2, 1])
            assert statuses() == ["running", "queued", "queued"]
            assert (await w.manager.pause(TENANT, first.id)).status == "paused"
            await w.until(lambda: statuses() == ["paused", "queued", "running"])
            assert (await w.manager.resume(TENANT, first.id)).status == "queued"
            assert positions() == [2, 1, None]
            w.link.engine.kill()
            w.live()
            await w.until(lambda: statuses() == ["queued", "queued", "running"])
            await w.manager.cancel("other", third.id)
            await w.until(lambda: statuses() == ["queued", "running", "cancelled"])
            await w.manager.cancel(TENANT, second.id)
            await w.until(lambda: statuses() == ["running", "cancelled", "cancelled"])
            assert positions() == [None, None, None]
            await w.manager.cancel(TENANT, first.id)

    asyncio.run(story())


def test_a_job_that_is_resumed_and_waits_for_a_place_is_told_so_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, manager={"max_running": 1}) as w:
            first = await w.create(DATA, **LONG)
            await w.until_step(first.id, 2)
            await w.manager.pause(TENANT, first.id)
            second = await w.create(DATA, **LONG)
            await w.until(lambda: w.job(second.id).status == "running")
            assert (await w.manager.resume(TENANT, first.id)).status == "queued"
            step = w.job(first.id).num_steps_done
            await w.manager.cancel(TENANT, second.id)
            await w.until_step(first.id, step + 1)
            words = [event.message for event in w.events(first.id)]
            assert [each for each in words if each.startswith("Fine-tuning")] == [
                "Fine-tuning job started",
                "Fine-tuning job paused",
                "Fine-tuning job resumed",
                f"Fine-tuning resumes from step {step}",
            ]
            await w.manager.cancel(TENANT, first.id)

    asyncio.run(story())


def test_a_job_that_runs_for_too_long_fails_and_its_newest_checkpoint_is_kept(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with world(tmp_path, manager={"timeout_s": 0.5}) as w:
            extension = {**LONG["extension"], "checkpoint_every_steps": 0}
            job = await w.until_over(
                (await w.create(20 * DATA, **{**LONG, "extension": extension})).id
            )
            assert (job.status, job.error["code"]) == ("failed", "job_timeout")
            assert "0.5 s" in job.error["message"]
            [kept] = w.checkpoints(job.id)
            assert kept.step == job.num_steps_done
            assert w.manager.adapters.find(TENANT, kept.name).directory == kept.directory
            assert Path(kept.directory, "adapter_model.safetensors").is_file()
            await w.until(lambda: not w.link.engine.engine.jobs)

    asyncio.run(story())
