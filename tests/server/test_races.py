"""The same call many times at once over HTTP: one takes effect, and none is a fault of the
server."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from batches import COMPLETIONS, completion
from lengths import long_but
from served import Served, keys_file, serving

NUM_AT_ONCE = 12


@pytest.fixture(scope="module", params=long_but("sqlite", of=["sqlite", "postgresql"]))
def limited(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server whose tenant may have few bytes, jobs and batches."""
    directory: Path = tmp_path_factory.mktemp("races")
    limits = "[tenants.ann]\nmax_file_bytes = 40000\nmax_jobs = 2\nmax_batches = 2\n"
    options = ["--api-keys-file", str(keys_file(directory, limits, ann="key"))]
    if request.param == "postgresql":
        options += ["--database", request.getfixturevalue("postgres").new_database()]
    with serving(*options, home=directory / "home") as running:
        yield running


class Caller:
    """Calls of one tenant."""

    def __init__(self, served: Served) -> None:
        self._url, self._head = served.url, {"Authorization": "Bearer key"}

    def call(self, method: str, path: str, **settings: Any) -> httpx.Response:
        return httpx.request(
            method, f"{self._url}{path}", headers=self._head, timeout=60, **settings
        )

    def made(self, path: str, **settings: Any) -> str:
        """The id of what a POST makes."""
        answer = self.call("POST", path, **settings)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def file(self, content: bytes = b"{}", purpose: str = "fine-tune") -> str:
        return self.made(
            "/v1/files", files={"file": ("f.jsonl", content)}, data={"purpose": purpose}
        )

    def at_once(self, *calls: Callable[[], httpx.Response]) -> Counter[int]:
        """Statuses of calls that are made at the same moment."""
        barrier, found = threading.Barrier(len(calls)), list[int]()

        def act(call: Callable[[], httpx.Response]) -> None:
            barrier.wait()
            found.append(call().status_code)

        threads = [threading.Thread(target=act, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(found) < 500, Counter(found)
        return Counter(found)


@pytest.fixture
def caller(limited: Served) -> Iterator[Caller]:
    made = Caller(limited)
    yield made
    for file in made.call("GET", "/v1/files").json()["data"]:
        made.call("DELETE", f"/v1/files/{file['id']}")


def test_an_upload_is_completed_once_within_the_tenants_bytes(caller: Caller):
    for _ in range(3):
        given = {"filename": "f", "bytes": 9000, "purpose": "fine-tune", "mime_type": "text/plain"}
        upload = caller.made("/v1/uploads", json=given)
        part = caller.made(f"/v1/uploads/{upload}/parts", files={"data": b"x" * 9000})
        path = f"/v1/uploads/{upload}/complete"
        statuses = caller.at_once(
            *[
                lambda p=path, part=part: caller.call("POST", p, json={"part_ids": [part]})
                for _ in range(NUM_AT_ONCE)
            ]
        )
        assert statuses == {200: 1, 400: NUM_AT_ONCE - 1}
    files = caller.call("GET", "/v1/files").json()["data"]
    assert sum(file["bytes"] for file in files) == 27000 and len(files) == 3


def test_what_is_deleted_is_deleted_once(caller: Caller):
    given = {"model": "small", "input": "x", "max_output_tokens": 2}
    for path in (
        f"/v1/files/{caller.file()}",
        f"/v1/responses/{caller.made('/v1/responses', json=given)}",
        f"/v1/conversations/{caller.made('/v1/conversations', json={})}",
    ):
        statuses = caller.at_once(
            *[partial(caller.call, "DELETE", path) for _ in range(NUM_AT_ONCE)]
        )
        assert statuses == {200: 1, 404: NUM_AT_ONCE - 1}, path


def test_a_file_that_is_read_while_it_is_deleted_is_whole_or_not_there(caller: Caller):
    content = b"x" * 30000
    for _ in range(4):
        path = f"/v1/files/{caller.file(content)}"
        read = list[httpx.Response]()

        def get(path: str = path, read: list[httpx.Response] = read) -> httpx.Response:
            read.append(caller.call("GET", f"{path}/content"))
            return read[-1]

        caller.at_once(*[get] * NUM_AT_ONCE, partial(caller.call, "DELETE", path))
        assert all(each.status_code == 404 or each.content == content for each in read)


def test_a_conversation_that_is_deleted_takes_nothing_more(caller: Caller):
    item = {"type": "message", "role": "user", "content": "x"}
    for _ in range(4):
        path = f"/v1/conversations/{caller.made('/v1/conversations', json={})}"
        statuses = caller.at_once(
            *[
                partial(caller.call, "POST", f"{path}/items", json={"items": [item]})
                for _ in range(6)
            ],
            *[partial(caller.call, "POST", path, json={"metadata": {"k": "v"}}) for _ in range(6)],
            partial(caller.call, "DELETE", path),
        )
        assert statuses.keys() <= {200, 404}
        assert caller.call("GET", path).status_code == 404
        assert caller.call("GET", f"{path}/items").status_code == 404


@pytest.mark.long
def test_batches_and_jobs_that_come_at_once_stay_within_their_numbers(caller: Caller):
    line = completion("a", max_tokens=400, ignore_eos=True)
    lines = b"\n".join(
        httpx.Request("POST", "http://x", json={**line, "custom_id": str(n)}).content
        for n in range(90)
    )
    asked = {
        "input_file_id": caller.file(lines, "batch"),
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
    }
    statuses = caller.at_once(
        *[lambda: caller.call("POST", "/v1/batches", json=asked) for _ in range(NUM_AT_ONCE)]
    )
    assert statuses == {200: 2, 429: NUM_AT_ONCE - 2}
    batches = [each["id"] for each in caller.call("GET", "/v1/batches").json()["data"]]
    path = f"/v1/batches/{batches[0]}/cancel"
    assert caller.at_once(
        *[lambda: caller.call("POST", path) for _ in range(NUM_AT_ONCE)]
    ).keys() <= {200}
    caller.call("POST", f"/v1/batches/{batches[1]}/cancel")
    examples = b'{"prompt": "What is it? ", "completion": "It is this."}\n' * 30
    method = {
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": 50, "batch_size": 3}},
    }
    job = {"model": "small", "training_file": caller.file(examples), "method": method}
    jobs = "/v1/fine_tuning/jobs"
    statuses = caller.at_once(
        *[lambda: caller.call("POST", jobs, json=job) for _ in range(NUM_AT_ONCE)]
    )
    assert statuses == {200: 2, 429: NUM_AT_ONCE - 2}
    ids = [each["id"] for each in caller.call("GET", jobs).json()["data"]]
    verbs = ("pause", "resume", "cancel", "pause", "resume", "cancel")
    statuses = caller.at_once(
        *[lambda verb=verb: caller.call("POST", f"{jobs}/{ids[0]}/{verb}") for verb in verbs]
    )
    assert statuses.keys() <= {200, 400}
    assert caller.call("GET", f"{jobs}/{ids[0]}").json()["status"] == "cancelled"
    assert caller.call("POST", f"{jobs}/{ids[1]}/cancel").status_code == 200
