"""Grammars that would crash their compiler: each is answered, and the server's and the engine's
processes stay."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from hostile_grammars import HOSTILE, OVERFLOWS_SANDBOX
from lengths import long_but
from processes import is_alive
from served import Served, serving

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
# By route: what a request has beside the grammar.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
}


@pytest.fixture
def pids(served: Served) -> Iterator[None]:
    """The server's and the engine's processes are the same after a test, and answer."""
    before = served.process.pid, served.engine_pid()
    yield
    assert served.process.poll() is None
    assert (served.process.pid, served.engine_pid()) == before
    assert ordinary(served).status_code == 200


def ordinary(served: Served) -> httpx.Response:
    return served.post(
        "/v1/completions", json={"model": "small", "prompt": "Hello", "max_tokens": 1}
    )


def body_of(route: str, hostile: dict[str, Any], **more: Any) -> dict[str, Any]:
    if route == "/v1/responses" and "response_format" in hostile:
        asked = hostile["response_format"]
        if asked["type"] != "json_schema":
            pytest.skip("OpenAI's responses have no structural tags")
        hostile = {"text": {"format": {"type": "json_schema", **asked["json_schema"]}}}
    return {"model": "small", **ROUTES[route], **hostile, **more}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("pids")
def test_a_hostile_grammar_costs_its_request_alone(served: Served, route: str, name: str):
    answer = served.post(route, json=body_of(route, HOSTILE[name]))
    for _ in range(5):
        if answer.status_code != 503:  # as a machine says that is busy: try again
            break
        time.sleep(2.0)
        answer = served.post(route, json=body_of(route, HOSTILE[name]))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "grammar" in error["message"] and error["param"] is not None, error


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("pids")
def test_a_hostile_grammar_in_the_background_costs_its_response_alone(served: Served, name: str):
    made = served.post(
        "/v1/responses", json=body_of("/v1/responses", HOSTILE[name], background=True)
    )
    if made.status_code == 400:
        return
    assert made.status_code == 200, made.text
    found = served.wait_until(
        lambda: next(
            (
                each
                for each in [served.get(f"/v1/responses/{made.json()['id']}").json()]
                if each["status"] == "failed"
            ),
            None,
        )
    )
    assert "grammar" in found["error"]["message"]


@pytest.mark.usefixtures("pids")
def test_the_schemas_of_tools_are_tried_as_well(served: Served):
    function = {"name": "f", "parameters": HOSTILE["objects"]["guided_json"]}
    body = {
        "model": "small",
        **CHAT,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    answer = served.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text


@pytest.mark.usefixtures("pids")
def test_many_crashes_at_once_leave_ordinary_grammars_their_turn(served: Served):
    def ask(number: int) -> int:
        grammar = OVERFLOWS_SANDBOX["guided_grammar"] + f"\n// {number}"
        return served.post(
            "/v1/completions", json=body_of("/v1/completions", {"guided_grammar": grammar})
        ).status_code

    with ThreadPoolExecutor(8) as threads:
        crashes = [threads.submit(ask, number) for number in range(8)]
        answer = served.post(
            "/v1/completions", json=body_of("/v1/completions", {"guided_regex": "[a-f]{2,7}"})
        )
        assert answer.status_code == 200, answer.text
        assert [each.result() for each in crashes] == [400] * 8


@pytest.mark.usefixtures("pids")
def test_a_sandbox_that_was_killed_is_replaced(served: Served):
    for number in range(2):
        asked = {"guided_regex": f"[a-f]{{1,{number + 20}}}"}
        answer = served.post("/v1/completions", json=body_of("/v1/completions", asked))
        assert answer.status_code == 200, answer.text
        sandbox = served.sandbox_pid()
        assert sandbox is not None
        os.kill(sandbox, signal.SIGKILL)
        served.wait_until(lambda pid=sandbox: not is_alive(pid))


@pytest.mark.parametrize(
    "name", long_but("references", of=["references", "rules", "references in a rule"])
)
def test_a_front_of_a_cluster_stays_as_well(front_server: Served, name: str):
    answer = front_server.post("/v1/completions", json=body_of("/v1/completions", HOSTILE[name]))
    assert answer.status_code == 400, answer.text
    assert front_server.process.poll() is None and ordinary(front_server).status_code == 200


def test_a_server_takes_its_sandbox_along_when_it_is_killed():
    with serving() as own:
        assert (
            own.post(
                "/v1/completions", json=body_of("/v1/completions", {"guided_regex": "a+"})
            ).status_code
            == 200
        )
        sandbox = own.sandbox_pid()
        assert sandbox is not None
        os.kill(own.process.pid, signal.SIGKILL)
        own.process.wait(30)
        own.wait_until(lambda: not is_alive(sandbox))


@pytest.mark.long
def test_a_tenant_with_heavy_patterns_denies_structured_output_to_nobody_else():
    """All of another tenant's are answered while eight clients of one keep the places of grammars
    busy."""
    keys = {
        "ann": {"Authorization": "Bearer secret-1"},
        "ben": {"Authorization": "Bearer secret-2"},
    }
    stopping = Event()
    with serving("--api-key", "ann=secret-1", "--api-key", "ben=secret-2") as own:

        def ask(name: str, pattern: str) -> int:
            body = body_of("/v1/completions", {"guided_regex": pattern}, max_tokens=1)
            return own.post("/v1/completions", json=body, headers=keys[name]).status_code

        def flood(client: int) -> list[int]:
            statuses, number = [], 0
            while not stopping.is_set():
                statuses.append(ask("ann", heavy_pattern(client, number)))
                number += 1
            return statuses

        assert ask("ben", "[a-f]") == 200
        with ThreadPoolExecutor(8) as threads:
            floods = [threads.submit(flood, client) for client in range(8)]
            try:
                answers = [ask("ben", f"[a-f]{{1,{number + 2}}}") for number in range(6)]
            finally:
                stopping.set()
            assert answers == [200] * 6
            assert {status for each in floods for status in each.result()} <= {200, 400, 503}


def heavy_pattern(client: int, number: int) -> str:
    """Return a pattern of a hundred thousand characters that is like no other, so that it is
    compiled anew."""
    words = "|".join(
        f"{client}{number}{chr(97 + place % 26) * (place % 40 + 1)}" for place in range(5000)
    )
    return f"({words}){{1,400}}"
