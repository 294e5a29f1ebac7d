"""Files and fine-tuning through the real client, over a socket, on a real engine."""

import csv
import io
import json
from typing import Any

import httpx
import openai
import pyarrow
import pytest
from front_server import AS_FRONT
from lengths import long_but
from pyarrow import parquet
from served import serving

LINES = [{"prompt": f"What is {n}? ", "completion": f"It is {n}."} for n in range(12)]
DATA = "".join(json.dumps(line) + "\n" for line in LINES).encode()
ADAPTER = {"type": "lora", "r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"], "dropout": 0}
QUICK = {"adapter": ADAPTER, "optimizer": {"learning_rate": 1e-2}, "checkpoint_every_steps": 4}


@pytest.fixture(scope="module", params=long_but("", of=["", AS_FRONT]), ids=["device", "front"])
def served(request):
    options = "--api-key", "one=key-1", "--api-key", "two=key-2", "--max-upload", "1MB"
    with serving(*options, before=request.param) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client("key-1")


def upload(client, content=DATA, **named):
    return client.files.create(file=("data.jsonl", content), purpose="fine-tune", **named)


def create(client, model="small", *, n_epochs=2, batch_size=3, coserve=None, **named):
    return client.fine_tuning.jobs.create(
        model=model,
        training_file=named.pop("training_file", None) or upload(client).id,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": n_epochs, "batch_size": batch_size}},
        },
        extra_body={"coserve": QUICK if coserve is None else coserve},
        **named,
    )


def finished(served, client, job):
    def over():
        found = client.fine_tuning.jobs.retrieve(job.id)
        return found if found.status in ("succeeded", "failed", "cancelled") else None

    return served.wait_until(over, limit_s=120)


def test_tables_are_trained_on_too(served, client, tmp_path):
    """One as training file, one as validation file; a chat of CSV is JSON in its cell."""
    messages = json.dumps(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    )
    rows = io.StringIO(newline="")
    csv.writer(rows).writerows([["messages"], *[[messages]] * 4])
    parquet.write_table(pyarrow.Table.from_pylist(LINES), tmp_path / "data")
    table = client.files.create(file=("chats.CSV", rows.getvalue().encode()), purpose="fine-tune")
    packed = client.files.create(
        file=("data", (tmp_path / "data").read_bytes()), purpose="fine-tune"
    )
    job = create(client, n_epochs=1, training_file=table.id, validation_file=packed.id)
    assert finished(served, client, job).status == "succeeded"


def all_events(client, job):
    """The oldest first, by pages."""
    return list(reversed(list(client.fine_tuning.jobs.list_events(job.id, limit=7))))


def train_steps(client, job):
    return [
        event.data["step"]
        for event in all_events(client, job)
        if "train_loss" in (event.data or {})
    ]


# -- files ---------------------------------------------------------------------------------


def test_files(client):
    before = {each.id for each in client.files.list()}
    made = [upload(client, b"%d\n" % n) for n in range(5)]
    other = client.files.create(file=("b.bin", b"\x00\xff"), purpose="user_data")
    first = made[0]
    assert (first.object, first.bytes, first.filename, first.purpose) == (
        "file",
        2,
        "data.jsonl",
        "fine-tune",
    )
    assert first.expires_at is None
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).read() == b"0\n"
    assert client.files.content(other.id).read() == b"\x00\xff"
    ids = [
        each.id
        for each in client.files.list(limit=2, order="asc", purpose="fine-tune")
        if each.id not in before
    ]
    assert ids == [each.id for each in made]
    newest = client.files.list(limit=1)
    assert [each.id for each in newest.data] == [other.id]
    assert newest.has_more
    assert client.files.delete(first.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            call(first.id)
    kept = upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert kept.expires_at == kept.created_at + 3600


def test_an_upload_is_cancelled_once(client):
    begun = client.uploads.create(bytes=2, filename="f", mime_type="", purpose="batch")
    assert client.uploads.cancel(begun.id).status == "cancelled"
    with pytest.raises(
        openai.BadRequestError, match="is cancelled: it cannot be cancelled any more"
    ):
        client.uploads.cancel(begun.id)


def test_uploads_that_are_refused(served, client):
    key = {"Authorization": "Bearer key-1"}
    file = {"file": ("a.jsonl", b"{}")}
    for form, param in (
        ({"files": file}, "purpose"),
        ({"files": {"purpose": (None, "fine-tune")}}, "file"),
        ({"files": file, "data": {"purpose": "nonsense"}}, "purpose"),
        ({"files": file, "data": {"purpose": "batch", "colour": "red"}}, "colour"),
        (
            {"files": file, "data": {"purpose": "batch", "expires_after[seconds]": "3600"}},
            "expires_after[anchor]",
        ),
        (
            {
                "files": file,
                "data": {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "9",
                },
            },
            "expires_after[seconds]",
        ),
        ({"json": {"file": "x", "purpose": "batch"}}, "file"),
        ({"content": b"--x"}, "file"),
        (
            {
                "content": b"--x\r\nno",
                "headers": {**key, "Content-Type": "multipart/form-data; boundary=x"},
            },
            "file",
        ),
    ):
        request: dict[str, Any] = {"headers": key, "timeout": 60, **form}
        answer = httpx.post(f"{served.url}/v1/files", **request)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, b"x" * 1_000_001)
    assert caught.value.status_code in (400, 413)
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, b"x" * 3_000_000)
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="after names"):
        client.files.list(after="file-none")
    with pytest.raises(openai.BadRequestError):
        client.files.list(limit=0)


# -- jobs ----------------------------------------------------------------------------------


def test_a_job_from_upload_to_answers(served, client):
    job = create(
        client,
        suffix="my  model",
        seed=7,
        metadata={"team": "a", "kind": "b"},
        validation_file=upload(client).id,
    )
    assert (job.object, job.status, job.model, job.seed) == (
        "fine_tuning.job",
        "validating_files",
        "small",
        7,
    )
    assert (job.fine_tuned_model, job.finished_at, job.estimated_finish) == (None, None, None)
    assert (job.organization_id, job.result_files, job.metadata) == (
        "org-one",
        [],
        {"team": "a", "kind": "b"},
    )
    assert (job.method.type, job.method.supervised.hyperparameters.n_epochs) == ("supervised", 2)
    assert job.hyperparameters.learning_rate_multiplier == "auto"
    job = finished(served, client, job)
    assert (job.status, job.error) == ("succeeded", None)
    assert job.finished_at >= job.created_at
    assert job.hyperparameters.learning_rate_multiplier == 1
    assert job.trained_tokens > 0
    base, org, suffix, id = job.fine_tuned_model.removeprefix("ft:").split(":")
    assert (base, org, suffix, len(id)) == ("small", "one", "my-model", 8)
    assert train_steps(client, job) == list(range(1, 9))
    events = all_events(client, job)
    assert len({event.id for event in events}) == len(events)
    assert {event.type for event in events} == {"message", "metrics"}
    valid = [event.data for event in events if "valid_loss" in (event.data or {})]
    assert [each["step"] for each in valid] == [4, 8]
    losses = [event.data["train_loss"] for event in events if "train_loss" in (event.data or {})]
    assert losses[-1] < losses[0]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert [each.step_number for each in checkpoints] == [8, 4]
    assert checkpoints[0].metrics.train_loss == losses[-1]
    assert checkpoints[0].metrics.full_valid_loss == valid[-1]["valid_loss"]
    assert [each.fine_tuned_model_checkpoint for each in checkpoints] == [
        f"{job.fine_tuned_model}:ckpt-step-{step}" for step in (8, 4)
    ]
    (results,) = job.result_files
    assert client.files.retrieve(results).purpose == "fine-tune-results"
    rows = list(csv.DictReader(io.StringIO(client.files.content(results).read().decode())))
    assert [float(row["train_loss"]) for row in rows] == losses
    names = [job.fine_tuned_model, *(each.fine_tuned_model_checkpoint for each in checkpoints)]
    listed = {each.id for each in client.models.list()}
    assert {"small", job.fine_tuned_model} <= listed and not listed & set(names[1:]), (
        "checkpoints are listed if asked"
    )
    with_checkpoints = client.models.list(extra_query={"checkpoints": True})
    assert {each.id for each in with_checkpoints} >= {"small", *names}
    assert client.models.retrieve(names[-1]).id == names[-1]
    answers = {
        name: client.completions.create(
            model=name, prompt="What is 3? ", max_tokens=8, temperature=0, logprobs=1
        )
        for name in ("small", *names)
    }
    scores = {name: answer.choices[0].logprobs.token_logprobs for name, answer in answers.items()}
    assert scores[names[0]] == pytest.approx(scores[names[1]], abs=1e-5), (
        "the last checkpoint is the model"
    )
    assert scores[names[0]] != scores[names[2]]
    assert scores[names[0]] != scores["small"]
    assert client.models.retrieve(names[0]).id == names[0]


def test_lists_of_jobs(served, client):
    jobs = [create(client, metadata={"round": "r", "n": str(n)}) for n in range(3)]
    for job in jobs:
        finished(served, client, job)
    ids = [job.id for job in jobs]
    asked = client.fine_tuning.jobs.list(limit=2, metadata={"round": "r"})
    assert [job.id for job in asked] == ids[::-1]
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"round": "r", "n": "1"})] == [
        ids[1]
    ]
    bare = served.get(
        "/v1/fine_tuning/jobs?metadata=null", headers={"Authorization": "Bearer key-1"}
    ).json()
    assert not {job["id"] for job in bare["data"]} & set(ids)
    everything = [job.id for job in client.fine_tuning.jobs.list(limit=1)]
    assert len(everything) == len(set(everything)) >= 3


def test_pause_resume_cancel(served, client):
    long = {**QUICK, "checkpoint_every_steps": 0}
    job = create(client, n_epochs=50, batch_size=1, coserve=long)
    served.wait_until(lambda: len(train_steps(client, job)) > 2)
    assert client.fine_tuning.jobs.retrieve(job.id).estimated_finish is not None
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    with pytest.raises(openai.BadRequestError, match="paused already"):
        client.fine_tuning.jobs.pause(job.id)
    assert client.fine_tuning.jobs.resume(job.id).status in ("running", "queued")
    with pytest.raises(openai.BadRequestError, match="is not paused"):
        client.fine_tuning.jobs.resume(job.id)
    cancelled = client.fine_tuning.jobs.cancel(job.id)
    assert (cancelled.status, cancelled.fine_tuned_model) == ("cancelled", None)
    for verb in (
        client.fine_tuning.jobs.cancel,
        client.fine_tuning.jobs.pause,
        client.fine_tuning.jobs.resume,
    ):
        with pytest.raises(openai.BadRequestError, match="has already completed"):
            verb(job.id)


def test_bad_data_fails_with_line_and_reason(served, client):
    file = upload(client, b'{"messages": []}\n{"prompt": "a"}\n')
    job = finished(served, client, create(client, training_file=file.id))
    assert (job.status, job.error.code, job.error.param) == (
        "failed",
        "invalid_training_file",
        "training_file",
    )
    assert "line 1: messages must be a list that is not empty" in job.error.message
    assert "line 2: completion must be a string; it is missing" in job.error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "none"}, "model"),
        ({"training_file": "file-none"}, "training_file"),
        ({"training_file": None}, "training_file"),
        ({"validation_file": "file-none"}, "validation_file"),
        ({"suffix": ""}, "suffix"),
        ({"suffix": " "}, "suffix"),
        ({"suffix": "x" * 65}, "suffix"),
        ({"suffix": "a:b"}, "suffix"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**31}, "seed"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": "\ud800"}}, "metadata"),
        ({"colour": "red"}, "colour"),
        ({"coserve": {"data_parallel": 0}}, "coserve.data_parallel"),
        ({"coserve": {"data_parallel": 3}}, "coserve.data_parallel"),  # more than there are devices
        (
            {"integrations": [{"type": "wandb", "wandb": {"name": "p"}}]},
            "integrations[0].wandb.project",
        ),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0}}}}, "method"),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"gamma": 1}}}}, "method"),
        ({"method": {"type": "dpo", "supervised": {}}}, "method.supervised"),
        ({"method": {"type": "reinforcement"}}, "method.type"),
        ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo"),
        ({"method": {"type": "supervised", "colour": 1}}, "method.colour"),
        ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}}, None),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"n_epochs": 51}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"n_epochs": "many"}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"batch_size": 257}}, "hyperparameters.batch_size"),
        (
            {"hyperparameters": {"learning_rate_multiplier": 0}},
            "hyperparameters.learning_rate_multiplier",
        ),
        ({"coserve": {"colour": 1}}, "coserve.colour"),
        ({"coserve": {"live": 1}}, "coserve.live"),
        ({"coserve": {"evaluation": {"metric": "bleu"}}}, "coserve.evaluation"),
        ({"coserve": {"evaluation": {"metric": "exact_match"}}}, "coserve.evaluation.metric"),
        ({"coserve": {"evaluation": {"max_tokens": 0}}}, "coserve.evaluation"),
        ({"coserve": {"evaluation": {"colour": 0}}}, "coserve.evaluation.colour"),
        ({"coserve": {"evaluation": []}}, "coserve.evaluation"),
        ({"coserve": {"max_sequence_length": 513}}, "coserve.max_sequence_length"),
        ({"coserve": {"max_sequence_length": 1}}, "coserve.max_sequence_length"),
        ({"coserve": {"checkpoint_every_steps": -1}}, "coserve.checkpoint_every_steps"),
        ({"coserve": {"adapter": {"type": "loha"}}}, "coserve.adapter.type"),
        ({"coserve": {"adapter": {"rank": 4}}}, "coserve.adapter.rank"),
        ({"coserve": {"adapter": {"r": 33}}}, "coserve.adapter.r"),
        (
            {"coserve": {"adapter": {"target_modules": ["nothing"]}}},
            "coserve.adapter.target_modules",
        ),
        ({"coserve": {"adapter": []}}, "coserve.adapter"),
        ({"coserve": {"optimizer": {"learning_rate": "high"}}}, "coserve.optimizer"),
        ({"coserve": {"optimizer": {"lr": 1}}}, "coserve.optimizer.lr"),
        ({"coserve": {"optimizer": {"betas": [1, 2, 3]}}}, "coserve.optimizer"),
        ({"coserve": {"optimizer": {"warmup_steps": 2**70}}}, "coserve.optimizer"),
        ({"coserve": {"optimizer": {"eps": float("nan")}}}, "coserve.optimizer"),
        ({"coserve": {"checkpoint_every_steps": None}}, "coserve.checkpoint_every_steps"),
        ({"coserve": {"evaluate_every_steps": 2**70}}, "coserve.evaluate_every_steps"),
        ({"seed": 10**4000}, "seed"),
        ({"model": "x" * 5000}, "model"),
        ({"training_file": "file-" + "x" * 5000}, "training_file"),
        ({"validation_file": "file-" + "x" * 5000}, "validation_file"),
    ],
)
def test_jobs_that_are_refused(body, param, served, client):
    file = upload(client).id
    full = {"model": "small", "training_file": file} | body
    answer = served.post(
        "/v1/fine_tuning/jobs",
        content=json.dumps({name: value for name, value in full.items() if value is not None}),
        headers={"Authorization": "Bearer key-1", "Content-Type": "application/json"},
    )
    error = answer.json()["error"]
    assert answer.status_code == (404 if body.get("model") == "none" else 400), answer.text
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    assert client.files.delete(file).deleted


def test_what_is_null_is_as_if_it_were_not_said(served, client):
    """Clients that write all fields of OpenAI's API write those that have no value as null."""
    null = dict.fromkeys(
        (
            "suffix",
            "seed",
            "validation_file",
            "hyperparameters",
            "method",
            "metadata",
            "integrations",
        )
    )
    answer = served.post(
        "/v1/fine_tuning/jobs",
        content=json.dumps({"model": "small", "training_file": upload(client).id, **null}),
        headers={"Authorization": "Bearer key-1", "Content-Type": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    job = answer.json()["id"]
    served.wait_until(
        lambda: client.fine_tuning.jobs.retrieve(job).status == "succeeded", limit_s=60
    )


def test_what_is_not_there(client):
    jobs = client.fine_tuning.jobs
    for call in (
        jobs.retrieve,
        jobs.cancel,
        jobs.pause,
        jobs.resume,
        jobs.list_events,
        jobs.checkpoints.list,
    ):
        with pytest.raises(openai.NotFoundError, match="Could not find fine tune: ftjob-none"):
            call("ftjob-none")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.delete("ft:small:one::none")
    with pytest.raises(openai.BadRequestError, match="cannot be deleted"):
        client.models.delete("small")


def test_a_tenant_sees_only_its_own(served, client):
    other = served.client("key-2")
    file = upload(client)
    job = finished(served, client, create(client, training_file=file.id))
    assert file.id not in [each.id for each in other.files.list()]
    assert job.id not in [each.id for each in other.fine_tuning.jobs.list()]
    for call, id in (
        (other.files.retrieve, file.id),
        (other.files.content, file.id),
        (other.files.delete, file.id),
        (other.fine_tuning.jobs.retrieve, job.id),
        (other.fine_tuning.jobs.cancel, job.id),
        (other.fine_tuning.jobs.list_events, job.id),
        (other.fine_tuning.jobs.checkpoints.list, job.id),
        (other.models.retrieve, job.fine_tuned_model),
        (other.models.delete, job.fine_tuned_model),
    ):
        with pytest.raises(openai.NotFoundError):
            call(id)
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        create(other, training_file=file.id)
    with pytest.raises(openai.NotFoundError):
        create(other, model=job.fine_tuned_model)
    with pytest.raises(openai.NotFoundError):
        other.completions.create(model=job.fine_tuned_model, prompt="a", max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="after names"):
        other.files.list(after=file.id)


def test_models_are_trained_further_and_are_deleted(served, client):
    first = finished(served, client, create(client))
    same = {key: value for key, value in QUICK.items() if key != "adapter"}
    second = create(client, model=first.fine_tuned_model, coserve=same)
    assert second.model == first.fine_tuned_model
    second = finished(served, client, second)
    assert second.status == "succeeded"
    answer = client.completions.create(model=first.fine_tuned_model, prompt="a", max_tokens=1)
    assert answer.model == first.fine_tuned_model
    assert client.models.delete(first.fine_tuned_model).deleted
    for call in (client.models.retrieve, client.models.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.fine_tuned_model)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=first.fine_tuned_model, prompt="a", max_tokens=1)
    assert list(client.fine_tuning.jobs.checkpoints.list(first.id)) == []
    assert client.completions.create(model=second.fine_tuned_model, prompt="a", max_tokens=1)


def test_examples_are_cut_where_virtual_tokens_leave_no_room_for_all_of_them(served, client):
    long = json.dumps({"text": "How are you today? " * 200}).encode()
    model, settings = "small", {"adapter": {"type": "prompt_tuning", "num_virtual_tokens": 12}}
    for _ in range(2):
        file = upload(client, DATA + long).id
        job = create(client, model, training_file=file, n_epochs=1, batch_size=13, coserve=settings)
        done = finished(served, client, job)
        assert done.status == "succeeded", done.error
        model, settings = done.fine_tuned_model, {}
        longest = {"max_sequence_length": 512}
        with pytest.raises(
            openai.BadRequestError, match="512; the model has 512 positions, 12 of them for virtual"
        ):
            create(client, model, training_file=file, coserve=longest)


def test_the_pages_of_a_job_are_seen_while_it_runs(served, client):
    """Just after an optimizer step a job holds none, and that is when most reports come."""
    key = {"headers": {"authorization": f"Bearer {client.api_key}"}}
    cursor = served.get("/v1/status/steps", **key).json()["cursor"]
    job = finished(
        served, client, create(client, n_epochs=20, coserve={**QUICK, "checkpoint_every_steps": 0})
    )
    assert job.status == "succeeded"
    found = served.get(f"/v1/status/steps?after={cursor}", **key).json()
    held = [pages.get("activations", 0) for _, pages in found["memory"]]
    num_busy = sum(map(bool, held))
    assert num_busy > 5 and num_busy > 0.8 * (len(held) - 1)
    assert held[-1] == 0, "and none when it is over"
    assert all(
        sum(pages.values()) == sum(found["memory"][0][1].values()) for _, pages in found["memory"]
    )


def test_preferences_are_learned_and_margins_shown(served, client):
    records = [
        {"prompt": f"What is {n}? ", "chosen": f"It is {n}.", "rejected": "I do not know."}
        for n in range(6)
    ]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    hyperparameters = {"n_epochs": 4, "batch_size": 3, "beta": 0.5}
    job = client.fine_tuning.jobs.create(
        model="small",
        training_file=upload(client, content).id,
        method={"type": "dpo", "dpo": {"hyperparameters": hyperparameters}},
        extra_body={"coserve": QUICK},
    )
    done = finished(served, client, job)
    assert done.status == "succeeded", done.error
    assert done.method.type == "dpo"
    assert done.method.dpo.hyperparameters.beta == 0.5
    margins = [
        event.data["train_reward_margin"]
        for event in all_events(client, job)
        if "train_loss" in (event.data or {})
    ]
    assert len(margins) == 8
    assert margins[0] == pytest.approx(0, abs=1e-3)
    assert margins[-1] > 0.5, "what is preferred has become likelier"


@pytest.mark.parametrize("metric", long_but("exact_match", of=["exact_match", "json_match"]))
def test_answers_to_the_validation_file_are_judged(metric, served, client):
    """By what a client gets of the same checkpoints; the figures are in events, checkpoints and the
    result file."""
    answers = (("Hello", "1"), ("quick", "[2]"), ("weights", '"x"'), ("learns", "null"))
    lines = [{"prompt": f"{word}? ", "completion": answer} for word, answer in answers]
    never = {"prompt": "Who? ", "completion": "nobody"}
    settings = {
        "adapter": {**ADAPTER, "r": 16, "alpha": 16, "target_modules": "all-linear"},
        "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"},
        "checkpoint_every_steps": 5,
        "evaluation": {"metric": metric, "max_tokens": 16},
    }
    content = [
        "".join(json.dumps(line) + "\n" for line in each).encode()
        for each in (lines, [*lines, never])
    ]
    training, validation = (upload(client, each).id for each in content)
    job = create(
        client,
        n_epochs=30,
        batch_size=4,
        coserve=settings,
        training_file=training,
        validation_file=validation,
    )
    job = finished(served, client, job)
    assert job.status == "succeeded", job.error
    name = f"valid_{metric}"
    found = {
        e.data["step"]: e.data[name] for e in all_events(client, job) if name in (e.data or {})
    }
    assert list(found) == [5, 10, 15, 20, 25, 30]
    assert found[30] == 0.8
    assert any(f", {metric}=0.8" in event.message for event in all_events(client, job))
    for checkpoint in client.fine_tuning.jobs.checkpoints.list(job.id):
        assert getattr(checkpoint.metrics, name) == found[checkpoint.step_number]
        given = [
            client.completions.create(
                model=checkpoint.fine_tuned_model_checkpoint,
                prompt=line["prompt"],
                max_tokens=16,
                temperature=0,
            )
            for line in lines
        ]
        num_right = sum(
            each.choices[0].text == line["completion"]
            for each, line in zip(given, lines, strict=True)
        )
        assert found[checkpoint.step_number] == num_right / 5
    rows = list(
        csv.DictReader(io.StringIO(client.files.content(job.result_files[0]).read().decode()))
    )
    assert [float(row[name]) for row in rows if row[name]] == list(found.values())
    assert "answers" not in served.get("/v1/models", headers={"Authorization": "Bearer key-1"}).text


def test_a_validation_file_without_questions_is_refused_for_answers(served, client):
    settings = {**QUICK, "evaluation": {"metric": "json_valid"}}
    texts = upload(client, b'{"text": "all of it is learned"}\n').id
    job = finished(served, client, create(client, validation_file=texts, coserve=settings))
    assert (job.status, job.error.param) == ("failed", "validation_file")
    assert (
        "json_valid needs examples with a prompt and a whole answer; none of these 1 has both"
        in job.error.message
    )
