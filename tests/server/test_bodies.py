"""Bodies: the first fault is enough, a long one holds up nobody, and what is read of it has
limits."""

import asyncio
import json
import socket
import threading
from typing import Any

import pytest
from served import Served, serving

from coserve.server.bodies import faults
from coserve.server.bodies import reader as bodies
from coserve.server.bodies.other_fields import FieldPolicy
from coserve.server.bodies.reader import BodyReader, read_body
from coserve.server.bodies.schemas import ChatBody, CompletionBody
from coserve.server.errors import ApiError
from coserve.server.fine_tuning.schemas import CreateJobBody
from coserve.server.http.body_limit import BodyLimitMiddleware

NUM = 3000
COMPLETION = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
JOB = {"model": "m", "training_file": "f"}
PROMPTS: list[Any] = [[None] * NUM, [[None]] * NUM, [[None] * NUM], {}]
WRONG: list[tuple[Any, dict[str, Any]]] = [
    *((CompletionBody, COMPLETION | {"prompt": wrong}) for wrong in PROMPTS),
    (CompletionBody, COMPLETION | {"stop": [None] * NUM}),
    (CompletionBody, COMPLETION | {"stop_token_ids": ["x"] * NUM}),
    (CompletionBody, COMPLETION | {"logit_bias": {str(token): "x" for token in range(NUM)}}),
    (CompletionBody, COMPLETION | {f"unknown{number}": 1 for number in range(NUM)}),
    (CompletionBody, COMPLETION | {"slo": {f"unknown{number}": 1 for number in range(NUM)}}),
    (ChatBody, CHAT | {"messages": [{}] * NUM}),
    (ChatBody, CHAT | {"messages": [{"role": "user", "content": [{}] * NUM}]}),
    (
        ChatBody,
        CHAT
        | {"messages": [{"role": "user", "tool_calls": [None] * NUM, "annotations": [None] * NUM}]},
    ),
    (
        ChatBody,
        CHAT | {"tools": [None] * NUM, "functions": [None] * NUM, "modalities": [None] * NUM},
    ),
    (CreateJobBody, JOB | {"metadata": {str(number): None for number in range(NUM)}}),
    (CreateJobBody, JOB | {"integrations": [None] * NUM}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG, ids=lambda value: str(value)[:40])
def test_thousands_of_wrong_values_are_a_few_faults(
    kind: Any, body: Any, monkeypatch: pytest.MonkeyPatch
):
    counts: list[int] = []
    make = faults.validation_error
    monkeypatch.setattr(
        bodies,
        "validation_error",
        lambda found, known: [counts.append(len(found)), make(found, known)][1],
    )
    with pytest.raises(ApiError) as raised:
        read_body(kind, json.dumps(body).encode())
    assert all(count <= 20 for count in counts)
    assert len(raised.value.message) < 300 and raised.value.param


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model": "m", "model": "m", "prompt": "x"}', "names 'model' twice"),
        (
            b'{"model": "m", "prompt": "x", "slo": {"ttft_ms": 1, "ttft_ms": 1}}',
            "names 'ttft_ms' twice",
        ),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (
            b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
            "not valid JSON: a number has more than 4300 digits.",
        ),
        (b'{"model": "m\xff"}', "not valid JSON: it is not UTF-8 (invalid start byte at byte 12)."),
        (b'{"model": "m", "prompt": "\xed\xa0\x80"}', "not valid JSON: it is not UTF-8"),
        ('{"model": "m", "prompt": "x"}'.encode("utf-16"), "not valid JSON: it is not UTF-8"),
        (b'{"model": "m"', "not valid JSON"),
        (b'{"' + b"a" * 100_000 + b'": 1, "model": "m", "prompt": "x"}', "Unknown parameter"),
        (b'{"model": "' + b"a" * 100_000 + b'", "prompt": "x"}', "at most 4096 characters"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bodies_that_mean_nothing_or_too_much(body: bytes, words: str):
    with pytest.raises(ApiError) as raised:
        read_body(CompletionBody, body)
    assert words in raised.value.message and raised.value.status == 400
    assert len(raised.value.message) <= 1001


def test_a_long_body_is_read_beside_everything_else(monkeypatch: pytest.MonkeyPatch):
    resume, threads = threading.Event(), list[str]()
    read = bodies.read_body

    def slow(kind: Any, body: bytes, fields: FieldPolicy) -> Any:
        threads.append(threading.current_thread().name)
        assert len(body) < 100_000 or resume.wait(60)
        return read(kind, body, fields)

    monkeypatch.setattr(bodies, "read_body", slow)

    async def ask() -> Any:
        reader = BodyReader(FieldPolicy())
        long = json.dumps(COMPLETION | {"prompt": "x" * 100_000}).encode()
        waiting = [asyncio.create_task(reader.read(CompletionBody, long)) for _ in range(3)]
        await asyncio.sleep(0)
        short = await reader.read(CompletionBody, json.dumps(COMPLETION).encode())
        resume.set()
        found = [await each for each in waiting]
        reader.close()
        return short, found

    short, found = asyncio.run(ask())
    assert short.prompt == "x" and [len(each.prompt) for each in found] == [100_000] * 3
    assert len(set(threads)) == 2 and threading.current_thread().name in threads


# -- how much is read ------------------------------------------------------------------------


class Client:
    """Sends pieces of bodies to an application that reads them and then waits to be allowed to
    answer."""

    def __init__(self, **limits: Any) -> None:
        self.may_answer = asyncio.Event()
        self.middleware = BodyLimitMiddleware(
            self._app,
            **({"max_body_bytes": 200_000, "max_upload_bytes": 10**9, "timeout_s": 60.0} | limits),
        )

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def post(self, *pieces: bytes, path: str = "/v1/completions") -> int:
        """The status of the answer. After the pieces, nothing comes any more."""
        messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        if b"" in pieces:
            messages[-1]["more_body"] = False
        statuses = []

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        await self.middleware({"type": "http", "path": path, "headers": []}, receive, send)
        [status] = statuses
        return int(status)


def test_each_route_has_its_own_limit():
    async def ask() -> list[int]:
        client = Client(max_body_bytes=2_000_000, max_upload_bytes=5_000_000)
        client.may_answer.set()
        return [
            await client.post(b"x" * num_bytes, b"", path=path)
            for path, num_bytes in (
                *(("/v1/completions", 2_000_000), ("/v1/chat/completions", 2_000_001)),
                *(("/v1/fine_tuning/jobs", 1_000_000), ("/v1/fine_tuning/jobs", 1_000_001)),
                *(
                    ("/v1/files", 5_000_000),
                    ("/v1/files", 7_000_000),
                    ("/v1/load_lora_adapter", 1_000_001),
                ),
            )
        ]

    assert asyncio.run(ask()) == [200, 413, 200, 413, 200, 413, 413]


def test_bodies_that_are_being_read_have_one_limit_together():
    async def ask() -> tuple[int, int, list[int]]:
        client = Client()
        long = b"x" * 200_000
        waiting = [asyncio.create_task(client.post(long, b"")) for _ in range(8)]
        await asyncio.sleep(0)
        refused = await client.post(long, b"")
        small = asyncio.create_task(client.post(b"x" * 1000, b""))
        upload = asyncio.create_task(client.post(long, b"", path="/v1/files"))
        await asyncio.sleep(0)
        client.may_answer.set()
        answered = [await each for each in (*waiting, small, upload)]
        return refused, await client.post(long, b""), answered

    refused, later, answered = asyncio.run(ask())
    assert (refused, later) == (503, 200) and answered == [200] * 10


def test_a_body_that_does_not_come_is_not_waited_for():
    async def ask() -> int:
        return await Client(timeout_s=0.05).post(b"x")

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == 408


def test_what_is_wrong_with_a_long_body_is_said_while_others_are_served(served: Served):
    content = json.dumps({"model": "small", "prompt": [None] * 300_000}).encode()
    answer = served.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and len(answer.content) < 1000
    assert answer.json()["error"]["param"].startswith("prompt")


def test_a_client_that_sends_a_body_slowly_is_told_so():
    with serving("--timeout-body", "300ms") as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
            said = b""
            while more := connection.recv(65536):
                said += more
            assert b" 408 " in said.split(b"\r\n")[0] and b"too slowly" in said
        assert served.get("/health").status_code == 200


def test_a_client_that_goes_away_while_it_sends_a_body_is_no_fault_of_the_servers():
    form = "multipart/form-data; boundary=x"
    with serving("--log-format", "json", "--log-level", "info") as served:
        upload = served.client().uploads.create(
            bytes=1000, filename="f", mime_type="", purpose="batch"
        )
        begun = {
            "/v1/files": (form, '--x\r\nContent-Disposition: form-data; name="file"'),
            f"/v1/uploads/{upload.id}/parts": (form, "--x\r\n"),
            "/v1/completions": ("application/json", '{"model": '),
        }
        host, port = served.url.removeprefix("http://").split(":")
        for path, (kind, body) in begun.items():
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 1000\r\n"
                connection.sendall(f"{head}\r\n{body}".encode())

        def told() -> dict[str, Any] | None:
            lines = [
                line
                for line in map(json.loads, served.log.read_text().splitlines())
                if line.get("path") in begun
            ]
            found = {line["path"]: (line["status"], line["level"]) for line in lines}
            return found if len(found) == len(begun) else None

        assert served.wait_until(told) == dict.fromkeys(begun, (0, "info"))
        assert served.stop() == 0
        assert "Traceback" not in served.log.read_text()
