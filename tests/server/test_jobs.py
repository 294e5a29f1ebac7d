"""The lifecycle of jobs, with a real engine in a thread."""

import asyncio
import csv
import io
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import word_tokenizer
from job_data import DATA, LONG, QUICK, adapter_in, distance, steps_of
from job_engine import LIMIT_S, TENANT, base_model, world
from peft import PeftModel
from support import make_model

from coserve.engine.commands import AdapterRef
from coserve.engine.jobs.checkpoint import JOB_FILES, Checkpoint
from coserve.errors import DeviceMemoryError, EngineGoneError, JobError
from coserve.jobs.datasets import validation
from coserve.jobs.datasets.examples import read_training_file
from coserve.jobs.lifecycle.job_writer import JobWriter
from coserve.jobs.models import JobModels
from coserve.jobs.settings import job_settings


def run(coroutine):
    return asyncio.run(coroutine)


def test_what_is_not_learned_of_the_files_is_an_event(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    models = JobModels(replace(base_model(), tokenizer=tokenizer))
    asked = {"role": "user", "content": "a"}
    chats = [
        {"messages": [asked, {"role": "assistant", "content": "b", "reasoning_content": "c"}]},
        {"messages": [asked, {"role": "assistant", "content": "b", "weight": 0}]},
        {"text": "fine"},
    ]
    content = "\n".join(json.dumps(each) for each in [*chats, chats[0], *chats[:2]])

    async def story():
        async with world(tmp_path, manager={"models": models}) as w:
            job = await w.until_over((await w.create(content.encode(), **QUICK)).id)
            strict = await w.create(content.encode(), extension={"strict": True})
            strict = await w.until_over(strict.id)
            return w.job(job.id), w.events(job.id), strict

    job, events, strict = run(story())
    warnings = [event.message for event in events if event.level == "warn"]
    file = f"training_file {job.training_file}"
    assert warnings[0] == (
        f"{file}: lines 1, 4 and 5: reasoning_content is not learned: the chat template does not "
        f"write it (model small)"
    )
    left_out = "has no turn to train on: each message of the assistant has weight 0"
    assert warnings[1] == f"{file}: 2 examples were left out: lines 2 and 6: {left_out}"
    assert job.num_examples == 4 and len(warnings) == 2
    assert strict.status == "failed" and strict.error["message"].endswith(
        f"lines 2 and 6: {left_out}"
    )


def test_a_job_from_its_files_to_its_model(tmp_path):
    async def story():
        async with world(tmp_path) as w:
            validation = w.upload(DATA)
            job = await w.create(
                DATA, **QUICK, validation_file=validation, suffix="mine", metadata={"k": "v"}
            )
            assert (job.status, job.name.split(":")[:4]) == (
                "validating_files",
                ["ft", "small", "coserve", "mine"],
            )
            job = await w.until_over(job.id)
            events, checkpoints = w.events(job.id), w.checkpoints(job.id)
            known = w.manager.adapters.list(TENANT)
            with w.store.read() as transaction:
                results = transaction.file(TENANT, job.result_file)
            content = w.files.path(results).read_text()
        return job, events, checkpoints, known, results, content

    job, events, checkpoints, known, results, content = run(story())
    assert (job.status, job.num_steps, job.num_steps_done, job.error) == ("succeeded", 9, 9, None)
    assert job.trained_tokens == 3 * job.num_tokens > 0
    assert steps_of(events) == list(range(1, 10))
    assert steps_of(events, "evaluation") == [4, 8, 9]
    messages = [event.message for event in events if not event.kind]
    assert messages[:4] == [
        f"Created fine-tuning job: {job.id}",
        f"Validating training file: {job.training_file}",
        "Files validated, moving job to queued state",
        "Fine-tuning job started",
    ]
    assert messages[-2:] == [
        f"New fine-tuned model created: {job.name}",
        "The job has successfully completed",
    ]
    first = next(event.data for event in events if event.kind == "step")
    assert first["total_steps"] == 9
    assert first["train_loss"] > 0
    assert 0 <= first["train_mean_token_accuracy"] <= 1
    assert (
        sum(event.data["num_tokens"] for event in events if event.kind == "step")
        == job.trained_tokens
    )
    assert [each.step for each in checkpoints] == [4, 8, 9]
    names = [f"{job.name}:ckpt-step-{step}" for step in (4, 8, 9)]
    assert [each.name for each in checkpoints] == names
    assert [each.name for each in known] == [*names, job.name]
    assert known[-1].directory == checkpoints[-1].directory
    for each in checkpoints:
        assert sorted(path.name for path in Path(each.directory).iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        PeftModel.from_pretrained(make_model(), each.directory)
    assert (
        distance(adapter_in(checkpoints[0].directory), adapter_in(checkpoints[-1].directory)) > 1e-3
    )
    assert not list((tmp_path / "jobs" / job.id).glob("*.msgpack"))
    rows = list(csv.DictReader(io.StringIO(content)))
    assert (results.filename, results.purpose) == ("step_metrics.csv", "fine-tune-results")
    assert results.num_bytes == len(content.encode())
    assert (
        content.splitlines()[0]
        == "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    )
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 10)]
    assert [bool(row["valid_loss"]) for row in rows] == [step in (4, 8, 9) for step in range(1, 10)]


def test_files_that_cannot_be_used_fail_the_job(tmp_path):
    async def story():
        async with world(tmp_path) as w:
            bad = await w.create(b'{"text": "fine"}\n' + b"nonsense\n" * 12)
            bad = await w.until_over(bad.id)
            text = await w.create(b"\xff\xfe\n")
            text = await w.until_over(text.id)
            empty = await w.until_over((await w.create(b"\n\n")).id)
            endless = await w.until_over(
                (await w.create(DATA + b'{"text": "' + b"x" * (2 << 20) + b'"}')).id
            )
            validation = w.upload(b'{"text": 7}')
            late = await w.until_over((await w.create(DATA, validation_file=validation)).id)
            for name, file in (
                ("training_file", w.upload(DATA, "other")),
                ("validation_file", "file-none"),
            ):
                files = {"training_file": w.upload(DATA), "validation_file": None} | {name: file}
                named = {
                    "model": "small",
                    "base": "small",
                    "suffix": None,
                    "metadata": None,
                    "start": None,
                }
                with pytest.raises(JobError, match=f"{name} '{file}' does not exist") as caught:
                    await w.manager.create(TENANT, **files, **named, settings=_settings())
                assert caught.value.param == name
            with pytest.raises(JobError, match="was uploaded for 'batch', not for 'fine-tune'"):
                await w.create(DATA, validation_file=w.upload(DATA, purpose="batch"))
            events = w.events(bad.id)
            assert w.checkpoints(bad.id) == []
        return bad, text, empty, endless, late, events

    bad, text, empty, endless, late, events = run(story())
    assert (bad.status, bad.error["code"], bad.error["param"]) == (
        "failed",
        "invalid_training_file",
        "training_file",
    )
    assert "lines 2, 3, 4 and 9 more: not valid JSON" in bad.error["message"]
    assert events[-1].level == "error"
    assert "is UTF-16; save it as UTF-8" in text.error["message"]
    assert "there is no line with an example" in empty.error["message"]
    assert "line 8: is longer than 1048576 bytes" in endless.error["message"]
    assert late.error["param"] == "validation_file"
    assert "line 1: text must be a string" in late.error["message"]


def _settings():
    return job_settings(
        hyperparameters={},
        extension={},
        seed=0,
        architecture=base_model().architecture,
        is_fresh=True,
    )


def test_pause_resume_and_cancel(tmp_path):
    async def story():
        async with world(tmp_path) as w:
            job = await w.create(DATA, **LONG)
            await w.until(lambda: w.manager.estimated_finish(w.job(job.id)) is not None)
            assert w.job(job.id).num_steps_done > 0
            paused = await w.manager.pause(TENANT, job.id)
            assert (paused.status, w.manager.estimated_finish(paused)) == ("paused", None)
            with pytest.raises(JobError, match="is paused already"):
                await w.manager.pause(TENANT, job.id)
            await asyncio.sleep(0.1)
            done = w.job(job.id).num_steps_done
            await asyncio.sleep(0.1)
            assert w.job(job.id).num_steps_done == done
            with w.store.read() as transaction:
                assert [each.step for each in transaction.all_checkpoints(job.id)][-1] == done
            resumed = await w.manager.resume(TENANT, job.id)
            assert resumed.status == "running"
            with pytest.raises(JobError, match="is not paused: it is running"):
                await w.manager.resume(TENANT, job.id)
            await w.until(lambda: w.job(job.id).num_steps_done > done)
            ended = await w.manager.cancel(TENANT, job.id)
            assert (ended.status, w.manager.estimated_finish(ended)) == ("cancelled", None)
            for verb in (w.manager.cancel, w.manager.pause, w.manager.resume):
                with pytest.raises(
                    JobError, match="has already completed: its status is cancelled"
                ):
                    await verb(TENANT, job.id)
            for verb in (w.manager.cancel, w.manager.pause, w.manager.resume):
                with pytest.raises(JobError, match="There is no fine-tuning job"):
                    await verb("somebody else", job.id)
            await w.until(lambda: w.job(job.id).finished_at)
            events, checkpoints = w.events(job.id), w.checkpoints(job.id)
            assert steps_of(events) == list(range(1, len(steps_of(events)) + 1))
            assert not any(
                (Path(each.directory) / name).exists() for each in checkpoints for name in JOB_FILES
            )
            listed = {Path(each.directory) for each in checkpoints}
            assert set((tmp_path / "jobs" / job.id / "checkpoints").iterdir()) == listed
            # The engine has room for the next one.
            assert (await w.until_over((await w.create(DATA, **QUICK)).id)).status == "succeeded"

    run(story())


def test_without_an_engine_jobs_wait_and_obey(tmp_path):
    async def story():
        async with world(tmp_path, alive=False) as w:
            job = await w.create(DATA, **QUICK)
            await w.until(lambda: w.job(job.id).status == "queued")
            assert (await w.manager.pause(TENANT, job.id)).status == "paused"
            other = await w.create(DATA, **QUICK)
            await w.until(lambda: w.job(other.id).status == "queued")
            assert (await w.manager.cancel(TENANT, other.id)).status == "cancelled"
            w.live()
            await asyncio.sleep(0.1)
            assert w.job(job.id).status == "paused"
            assert (await w.manager.resume(TENANT, job.id)).status == "running"
            assert (await w.until_over(job.id)).status == "succeeded"

    run(story())


@pytest.mark.long
def test_what_a_job_cannot_be_told_twice_is_known_after_a_restart(tmp_path):
    """A paused job stays paused, a job that was running resumes, one being validated is validated
    again."""

    async def first():
        async with world(tmp_path) as w:
            paused = await w.create(DATA, **LONG)
            await w.until(lambda: w.job(paused.id).num_steps_done > 2)
            await w.manager.pause(TENANT, paused.id)
            running = await w.create(
                DATA, **{**LONG, "hyperparameters": {"n_epochs": 20, "batch_size": 1}}
            )
            await w.until(lambda: w.job(running.id).num_steps_done > 5)
            fresh = await w.create(DATA, **QUICK)
        return paused.id, running.id, fresh.id

    async def second(paused, running, fresh):
        async with world(tmp_path) as w:
            assert (await w.until_over(running)).status == "succeeded"
            assert (await w.until_over(fresh)).status == "succeeded"
            assert w.job(paused).status == "paused"
            done = w.job(paused).num_steps_done
            assert (await w.manager.resume(TENANT, paused)).status == "running"
            await w.until(lambda: w.job(paused).num_steps_done > done)
            await w.manager.cancel(TENANT, paused)
            return w.events(running), w.job(running)

    events, job = run(second(*run(first())))
    assert steps_of(events) == list(range(1, job.num_steps + 1))


def test_training_continues_from_a_model(tmp_path):
    async def story():
        async with world(tmp_path) as w:
            first = await w.until_over((await w.create(DATA, **QUICK)).id)
            known = w.manager.adapters.find(TENANT, first.name)
            ref = AdapterRef(name=known.name, directory=known.directory)
            extension = {"optimizer": {"learning_rate": 1e-9}, "checkpoint_every_steps": 0}
            named = {
                "hyperparameters": QUICK["hyperparameters"],
                "extension": extension,
                "model": first.name,
            }
            second = await w.create(DATA, **named, start=ref)
            with pytest.raises(JobError, match=f"job {second.id} needs {first.name}"):
                await w.manager.delete_adapter(TENANT, first.name)
            second = await w.until_over(second.id)
            assert second.status == "succeeded", second.error
            theirs = w.manager.adapters.find(TENANT, second.name)
            assert 0 < distance(adapter_in(theirs.directory), adapter_in(known.directory)) < 1e-6
            assert w.manager.adapters.find("other", first.name) is None
            assert not await w.manager.delete_adapter("other", first.name)
            last = f"{first.name}:ckpt-step-9"
            assert await w.manager.delete_adapter(TENANT, last) == (last,)
            assert Path(known.directory).is_dir(), "the model is the same adapter"
            assert [each.step for each in w.checkpoints(first.id)] == [4, 8]
            gone = await w.manager.delete_adapter(TENANT, first.name)
            assert sorted(gone) == sorted(
                (first.name, *(f"{first.name}:ckpt-step-{step}" for step in (4, 8)))
            )
            assert w.manager.adapters.find(TENANT, first.name) is None
            assert not w.checkpoints(first.id)
            assert not Path(known.directory).parents[1].exists()

    run(story())


def test_a_live_job_is_listed_while_it_runs(tmp_path, monkeypatch):
    write_deaths = JobWriter.lose_engine

    def lose_engine(
        *args, **kwargs
    ):  # who reads the store in between must not find a live job that waits
        fatal = write_deaths(*args, **kwargs)
        time.sleep(0.1)
        return fatal

    monkeypatch.setattr(JobWriter, "lose_engine", lose_engine)

    async def story():
        async with world(tmp_path) as w:
            live = {**LONG, "extension": {**LONG["extension"], "live": True}}
            job = await w.create(DATA, **live)
            await w.until(lambda: w.manager.adapters.find(TENANT, job.name))
            assert w.manager.adapters.find(TENANT, job.name).directory is None
            assert w.manager.adapters.find("other", job.name) is None
            with pytest.raises(JobError, match="is being trained"):
                await w.manager.delete_adapter(TENANT, job.name)
            with pytest.raises(JobError, match="still being trained"):
                await w.create(DATA, start=AdapterRef(name=job.name))
            w.link.engine.kill()
            await w.until(lambda: w.job(job.id).status == "queued")
            assert w.manager.adapters.find(TENANT, job.name) is None
            w.live()
            await w.until(lambda: w.manager.adapters.find(TENANT, job.name))
            await w.manager.cancel(TENANT, job.id)
            assert w.manager.adapters.find(TENANT, job.name) is None

    run(story())


def test_jobs_run_beside_each_other(tmp_path):
    async def story():
        async with world(tmp_path) as w:
            jobs = [await w.create(DATA, **QUICK, seed=seed) for seed in range(4)]
            for job in jobs:
                assert (await w.until_over(job.id)).status == "succeeded"
                assert steps_of(w.events(job.id)) == list(range(1, 10))

    run(story())


def test_a_job_that_the_engine_refuses_fails_with_its_words(tmp_path):
    start = AdapterRef(name="gone", directory=str(tmp_path / "nowhere"))

    async def story():
        async with world(tmp_path) as w:
            with pytest.raises(
                JobError, match=r"coserve\.adapter must not be given where the model is an adapter"
            ):
                await w.create(DATA, **QUICK, start=start)
            return await w.until_over((await w.create(DATA, start=start)).id)

    job = run(story())
    assert (job.status, job.error["code"]) == ("failed", "job_refused")
    assert "nowhere has no adapter_config.json" in job.error["message"]


def test_a_job_says_how_far_its_files_are_read(tmp_path, monkeypatch):
    made, shares = threading.Event(), []

    async def story():
        async with world(tmp_path) as w:

            def noted(path, tokenizer, *, is_wanted, **rest):
                def is_still_wanted(num_bytes):
                    made.wait(LIMIT_S)
                    answer = is_wanted(num_bytes)
                    shares.append(w.manager.share_validated(job))
                    return answer

                return read_training_file(path, tokenizer, is_wanted=is_still_wanted, **rest)

            monkeypatch.setattr(validation, "read_training_file", noted)
            job = await w.create(DATA, **QUICK, validation_file=w.upload(DATA))
            made.set()
            await w.until_over(job.id)
            return w.manager.share_validated(job)

    assert run(story()) is None
    ends = [len(b"".join(DATA.splitlines(keepends=True)[:number])) for number in range(7)]
    assert shares == [(before + end) / (2 * len(DATA)) for before in (0, len(DATA)) for end in ends]


@pytest.mark.parametrize("status", ["queued", "validating_files"])
def test_jobs_of_another_model_wait_for_it(tmp_path, status):
    async def first():
        async with world(tmp_path, alive=False) as w:
            job = await w.create(DATA, **QUICK)
            await w.until(lambda: w.job(job.id).status == "queued")
            with w.store.write() as transaction:
                transaction.change_job(
                    job.id, base="another", status=status, num_steps=job.num_steps
                )
        return job.id

    async def second(id):
        async with world(tmp_path) as w:
            assert (await w.until_over((await w.create(DATA, **QUICK)).id)).status == "succeeded"
            assert w.job(id).status == status
            if status == "validating_files":  # it would be read with this model's tokenizer
                await w.manager.pause(TENANT, id)
                with pytest.raises(JobError, match="is of the model another"):
                    await w.manager.resume(TENANT, id)
            assert (await w.manager.cancel(TENANT, id)).status == "cancelled"

    run(second(run(first())))


def test_a_job_that_no_engine_survives_the_start_of_fails(tmp_path):
    class Poisoned:
        def __init__(self, world):
            self.world = world

        async def start_job(self, job):
            self.world.manager.engine_gone()
            asyncio.get_running_loop().call_soon(self.world.manager.engine_ready)
            raise EngineGoneError("the engine has died")

    async def story():
        async with world(tmp_path, alive=False) as w:
            w.link.engine = Poisoned(w)
            w.manager.engine_ready()
            job = await w.until_over((await w.create(DATA, **QUICK)).id)
            w.link.engine = None
            return job

    job = run(story())
    assert (job.status, job.error["code"]) == ("failed", "engine_died")


def test_who_resumes_a_job_just_when_its_files_are_read_does_not_read_them_again(
    tmp_path, monkeypatch
):
    may_validate, num_validated = threading.Event(), []

    def validate(*arguments):
        may_validate.wait(30)
        num_validated.append(1)
        return read(*arguments)

    read = validation.validate
    monkeypatch.setattr(validation, "validate", validate)

    async def story():
        async with world(tmp_path) as w:
            busy = asyncio.Event()
            job = await w.create(DATA, **QUICK)
            await w.manager.pause(TENANT, job.id)
            waiting = asyncio.create_task(w.manager.mailbox.call(busy.wait))
            await asyncio.sleep(0)
            resuming = asyncio.create_task(w.manager.resume(TENANT, job.id))
            await asyncio.sleep(0)
            may_validate.set()
            await w.until(lambda: w.manager.mailbox.num_waiting == 2)
            busy.set()
            await asyncio.gather(waiting, resuming)
            return await w.until_over(job.id), [event.message for event in w.events(job.id)]

    job, messages = run(story())
    assert job.status == "succeeded"
    assert num_validated == [1]
    assert sum(message.startswith("Files validated") for message in messages) == 1


def test_a_job_that_cannot_be_started_holds_up_no_other(tmp_path):
    class Refusing:
        def __init__(self, engine, id):
            self._engine, self._id = engine, id

        async def start_job(self, job):
            if job.id == self._id:
                raise OverflowError("can't serialize ints >= 2**64 or < -2**63")
            await self._engine.start_job(job)

    async def story():
        async with world(tmp_path, alive=False) as w:
            ids = [(await w.create(DATA, **QUICK)).id for _ in range(2)]
            await w.until(lambda: all(w.job(id).status == "queued" for id in ids))
            engine = w.live()
            w.link.engine = Refusing(engine, ids[0])
            jobs = [await w.until_over(id) for id in ids]
            w.link.engine = engine
        return jobs

    first, second = run(story())
    assert (first.status, first.error["code"]) == ("failed", "job_refused")
    assert "could not be started" in first.error["message"]
    assert second.status == "succeeded"


class Slow:
    """An engine that answers late about one job."""

    def __init__(self, engine, id):
        self._engine, self._id, self.may_answer = engine, id, asyncio.Event()

    def __getattr__(self, verb):
        async def call(argument):
            await getattr(self._engine, verb)(argument)
            if getattr(argument, "id", argument) == self._id:
                await self.may_answer.wait()

        return call


async def use_another_job(w):
    """All that can be asked of one, from its creation to its end."""
    async with asyncio.timeout(LIMIT_S):
        other = await w.create(DATA, **LONG)
        await w.until(lambda: w.job(other.id).num_steps_done > 1)
        assert (await w.manager.pause(TENANT, other.id)).status == "paused"
        assert (await w.manager.resume(TENANT, other.id)).status == "running"
        assert (await w.manager.cancel(TENANT, other.id)).status == "cancelled"


def test_no_job_waits_for_what_the_engine_answers_about_another(tmp_path):
    async def story():
        async with world(tmp_path) as w:
            job, engine = await w.create(DATA, **LONG), w.link.engine
            await w.until(lambda: w.job(job.id).num_steps_done > 1)
            w.link.engine = slow = Slow(engine, job.id)
            pausing = asyncio.create_task(w.manager.pause(TENANT, job.id))
            resuming = asyncio.create_task(w.manager.resume(TENANT, job.id))
            await use_another_job(w)
            assert not pausing.done() and not resuming.done() and w.job(job.id).status == "running"
            slow.may_answer.set()
            assert ((await pausing).status, (await resuming).status) == ("paused", "running")
            late = Slow(engine, None)
            w.link.engine = late
            job = await w.create(DATA, **LONG)
            late._id = job.id
            await use_another_job(w)
            cancelling = asyncio.create_task(w.manager.cancel(TENANT, job.id))
            await use_another_job(w)
            late.may_answer.set()
            assert (await cancelling).status == "cancelled"
            w.link.engine = engine

    run(story())


def test_a_pause_that_the_engine_does_not_live_to_answer_holds(tmp_path, monkeypatch):
    write, may_write, begun = Checkpoint.write, threading.Event(), threading.Event()

    def slow_write(self, parent):
        begun.set()
        assert may_write.wait(LIMIT_S)
        return write(self, parent)

    async def story():
        async with world(tmp_path) as w:
            extension = {**LONG["extension"], "checkpoint_every_steps": 0}
            job = await w.create(DATA, **{**LONG, "extension": extension})
            await w.until(lambda: w.job(job.id).num_steps_done > 1)
            monkeypatch.setattr(Checkpoint, "write", slow_write)
            pausing = asyncio.create_task(w.manager.pause(TENANT, job.id))
            await asyncio.to_thread(begun.wait, LIMIT_S)
            w.link.engine.kill()
            assert (await pausing).status == "paused"
            may_write.set()
            w.link.engine.join()
            w.live()
            await w.manager.settled()
            assert w.job(job.id).status == "paused"
            assert (await w.manager.resume(TENANT, job.id)).status == "running"
            await w.manager.cancel(TENANT, job.id)

    run(story())


def test_a_pause_that_the_engine_cannot_do_is_refused_and_the_job_stays_as_it_is(tmp_path):
    class Failing(Slow):
        async def pause_job(self, id):
            raise DeviceMemoryError("no room for the copy")

    async def story():
        async with world(tmp_path) as w:
            job, engine = await w.create(DATA, **LONG), w.link.engine
            await w.until(lambda: w.job(job.id).num_steps_done > 1)
            w.link.engine = Failing(engine, None)
            with pytest.raises(
                JobError, match=r"could not do this with job .*: no room for the copy"
            ):
                await w.manager.pause(TENANT, job.id)
            w.link.engine = engine
            done = w.job(job.id).num_steps_done
            await w.until(lambda: w.job(job.id).num_steps_done > done)
            assert w.job(job.id).status == "running"
            assert (await w.manager.pause(TENANT, job.id)).status == "paused"
            assert (await w.manager.cancel(TENANT, job.id)).status == "cancelled"

    run(story())


def test_what_cannot_be_removed_is_left_to_the_next_start(tmp_path, monkeypatch, caplog):
    def refuse(path, *arguments, **named):
        raise PermissionError(13, "Permission denied")

    async def first():
        async with world(tmp_path) as w:
            monkeypatch.setattr(
                "coserve.jobs.files.shared_files.shutil", SimpleNamespace(rmtree=refuse)
            )
            async with asyncio.timeout(LIMIT_S):
                extension = {**LONG["extension"], "checkpoint_every_steps": 0}
                job = await w.create(DATA, **{**LONG, "extension": extension})
                await w.until(lambda: w.job(job.id).num_steps_done > 1)
                for _ in range(2):
                    done = w.job(job.id).num_steps_done
                    await w.manager.pause(TENANT, job.id)
                    await w.manager.resume(TENANT, job.id)
                    await w.until(lambda done=done: w.job(job.id).num_steps_done > done + 1)
                await w.manager.cancel(TENANT, job.id)
                await use_another_job(w)
            return job.id

    checkpoints = tmp_path / "jobs" / run(first()) / "checkpoints"
    assert list(checkpoints.iterdir())
    assert (
        "is not needed any more, and cannot be removed: [Errno 13] Permission denied" in caplog.text
    )
    monkeypatch.undo()

    async def second():
        async with world(tmp_path, alive=False):
            assert list(checkpoints.iterdir()) == []

    run(second())


def test_a_model_that_is_deleted_while_it_is_looked_up_is_not_known_later(tmp_path):
    async def story():
        async with world(tmp_path) as w:
            job = await w.until_over((await w.create(DATA, **QUICK)).id)
            read, asked, may_continue = w.store.read, threading.Event(), threading.Event()
            lookup = threading.local()

            @contextmanager
            def slow_read():
                with read() as transaction:
                    if getattr(lookup, "is_here", False):  # others read the store, too
                        transaction.adapter(TENANT, job.name)  # the moment that it sees
                        asked.set()
                        assert may_continue.wait(30)
                    yield transaction

            def look_up():
                lookup.is_here = True
                return w.manager.adapters.find(TENANT, job.name)

            w.store.read = slow_read
            looking = asyncio.create_task(asyncio.to_thread(look_up))
            await asyncio.to_thread(asked.wait, 30)
            w.store.read = read
            assert await w.manager.delete_adapter(TENANT, job.name)
            may_continue.set()
            return await looking, w.manager.adapters.find(TENANT, job.name)

    before, after = run(story())
    assert before is not None
    assert after is None
