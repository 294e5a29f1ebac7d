"""/v1/uploads and /v1/batches with the real client."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from batches import CHAT, batch_file, begin, line, results, wait_for
from openai import APIStatusError, BadRequestError, NotFoundError, RateLimitError
from served import Served, keys_file, serving


@pytest.fixture
def client(served: Served) -> Any:
    return served.client()


def test_requests_are_answered_as_their_route_would(client: Any):
    wrong = [
        line("wrong", temperature=9),
        line("stream", stream=True),
        line("no model", model="none"),
    ]
    batch = begin(client, [*map(line, ("a", "b", "c")), *wrong], metadata={"k": "v"})
    assert batch.status == "validating"
    done = wait_for(client, batch)
    assert done.status == "completed"
    assert (
        done.request_counts.total,
        done.request_counts.completed,
        done.request_counts.failed,
    ) == (6, 3, 3)
    assert done.metadata == {"k": "v"}
    assert done.created_at <= done.in_progress_at <= done.completed_at < done.expires_at
    found = results(client, done.output_file_id)
    assert found.keys() == {"a", "b", "c"}
    for id, each in found.items():
        body = each["response"]["body"]
        alone = client.chat.completions.create(**line(id)["body"])
        assert each["response"]["status_code"] == 200 and each["error"] is None
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    errors = results(client, done.error_file_id)
    assert [errors[id]["response"]["status_code"] for id in ("wrong", "stream", "no model")] == [
        400,
        400,
        404,
    ]
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert batch.id in [each.id for each in client.batches.list(limit=1).data]
    with pytest.raises(APIStatusError, match="completed"):
        client.batches.cancel(batch.id)


def test_other_routes(client: Any):
    completions = begin(
        client, [line("x", url="/v1/completions", prompt="hello")], endpoint="/v1/completions"
    )
    asked = {"model": "small", "input": "hello", "max_output_tokens": 5}
    item = {"custom_id": "y", "method": "POST", "url": "/v1/responses", "body": asked}
    responses = begin(client, [item], endpoint="/v1/responses")
    [one] = results(client, wait_for(client, completions).output_file_id).values()
    assert one["response"]["body"]["object"] == "text_completion"
    [one] = results(client, wait_for(client, responses).output_file_id).values()
    assert client.responses.retrieve(one["response"]["body"]["id"]).output_text


def test_a_batch_that_is_cancelled_keeps_what_was_answered(client: Any):
    batch = begin(client, [line(f"{n}", max_tokens=400, ignore_eos=True) for n in range(60)])
    while not client.batches.retrieve(batch.id).request_counts.total:
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = wait_for(client, batch)
    assert done.status == "cancelled" and done.cancelled_at and done.cancelling_at
    assert len(results(client, done.output_file_id)) == done.request_counts.completed < 60


def test_what_is_not_done_when_the_window_ends_has_expired(client: Any):
    batch = begin(
        client, [line(f"{n}", max_tokens=400, ignore_eos=True) for n in range(200)], window="1s"
    )
    done = wait_for(client, batch)
    assert done.status == "expired"
    errors = results(client, done.error_file_id)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    assert len(errors) + len(results(client, done.output_file_id)) == 200
    assert (done.request_counts.total, done.request_counts.failed) == (200, len(errors))
    assert done.request_counts.completed == 200 - len(errors)


@pytest.mark.long
def test_requests_beside_a_batch_are_answered(client: Any, served: Served):
    short, long = (
        line("short"),
        [line(f"{n}", max_tokens=400, ignore_eos=True) for n in range(1000)],
    )
    batch = begin(client, [short, *long])
    served.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
    client.chat.completions.create(**line("now")["body"])
    assert 'coserve_batch_requests{state="running"}' in served.get("/metrics").text
    assert client.batches.retrieve(batch.id).status == "in_progress", "the batch was not waited for"
    client.batches.cancel(batch.id)
    assert wait_for(client, batch).request_counts.completed < 1001


@pytest.mark.parametrize(
    ("lines", "code", "at"),
    [
        (["{"], "invalid_json_line", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a", url="/v1/completions")], "mismatched_endpoint", 1),
        ([{**line("a"), "method": "GET"}], "invalid_method", 1),
        ([{**line("a"), "body": 1}], "missing_required_parameter", 1),
        ([{**line("a"), "x": 1}], "unknown_parameter", 1),
        (["[]"], "invalid_json_line", 1),
        ([""], "empty_file", None),
    ],
    ids=ascii,
)
def test_a_file_that_is_wrong_fails(client: Any, lines: list[Any], code: str, at: int | None):
    done = wait_for(client, begin(client, lines))
    assert done.status == "failed" and done.failed_at
    [error] = done.errors.data
    assert (error.code, error.line) == (code, at)


def test_what_is_wrong_with_a_batch_is_named(client: Any):
    file = batch_file(client, [line("a")])
    other = client.files.create(file=("x.jsonl", b"{}"), purpose="fine-tune")
    for param, more in (
        ("endpoint", {"endpoint": "/v1/models"}),
        ("completion_window", {"completion_window": "soon"}),
        ("input_file_id", {"input_file_id": "file-none"}),
        ("input_file_id", {"input_file_id": other.id}),
        ("metadata", {"metadata": {"k": 1}}),
    ):
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **more}
        with pytest.raises(APIStatusError) as raised:
            client.post("/batches", body=body, cast_to=object)
        assert raised.value.param == param
    for ask in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(NotFoundError):
            ask("batch_none")


def test_a_file_in_parts(client: Any, tmp_path: Path):
    upload = client.uploads.create(
        filename="f.jsonl", bytes=10, purpose="batch", mime_type="text/plain"
    )
    parts = [client.uploads.parts.create(upload.id, data=data) for data in (b"56789", b"01234")]
    with pytest.raises(BadRequestError, match="MD5"):
        client.uploads.complete(upload.id, part_ids=[part.id for part in parts], md5="0" * 32)
    with pytest.raises(BadRequestError, match="5 bytes"):
        client.uploads.complete(upload.id, part_ids=[parts[0].id])
    with pytest.raises(BadRequestError, match="not a part"):
        client.uploads.complete(upload.id, part_ids=["part_none"])
    done = client.uploads.complete(upload.id, part_ids=[parts[1].id, parts[0].id])
    assert done.status == "completed"
    assert client.files.content(done.file.id).text == "0123456789"
    assert (done.file.filename, done.file.purpose) == ("f.jsonl", "batch")
    for ask in (
        lambda: client.uploads.cancel(upload.id),
        lambda: client.uploads.parts.create(upload.id, data=b"x"),
    ):
        with pytest.raises(BadRequestError, match="completed"):
            ask()
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"x" * 3000)
    whole = client.uploads.upload_file_chunked(
        file=path, mime_type="text/plain", purpose="batch", part_size=1000
    )
    assert client.files.retrieve(whole.file.id).bytes == 3000


def test_parts_are_no_files_and_go_with_their_upload(client: Any):
    upload = client.uploads.create(filename="f", bytes=1, purpose="batch", mime_type="text/plain")
    part = client.uploads.parts.create(upload.id, data=b"x")
    assert part.id not in [file.id for file in client.files.list()]
    with pytest.raises(NotFoundError):
        client.files.content(part.id)
    assert client.uploads.cancel(upload.id).status == "cancelled"
    with pytest.raises(NotFoundError):
        client.uploads.cancel("upload_none")


@pytest.mark.long
def test_a_batch_survives_its_engine_and_its_server(tmp_path: Path):
    keys = keys_file(
        tmp_path,
        "[tenants.ann]\nmax_batches = 1\nmax_requests = 1\n",
        ann="key-of-ann",
        bob="key-of-bob",
    )
    options = ("--api-keys-file", str(keys))
    lines = [line(f"{n}", max_tokens=200, ignore_eos=True) for n in range(80)]
    with serving(*options, home=tmp_path / "home") as first:
        client: Any = first.client("key-of-ann")
        batch = begin(client, lines)
        with pytest.raises(RateLimitError, match="batches"):
            begin(client, lines)
        with pytest.raises(NotFoundError):
            first.client("key-of-bob").batches.retrieve(batch.id)
        first.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
        os.kill(first.engine_pid(), signal.SIGKILL)
        first.wait_until(lambda: first.get("/ready").status_code == 503)
        first.wait_until(lambda: first.get("/ready").status_code == 200)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
    with serving(*options, home=tmp_path / "home") as second:
        client = second.client("key-of-ann")
        done = wait_for(client, batch)
        assert done.status == "completed"
        assert len(results(client, done.output_file_id)) == done.request_counts.completed == 80
        assert not list((tmp_path / "home" / "batches").iterdir())
