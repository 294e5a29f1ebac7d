"""Whatever a client sends, the server answers, and never with an error of its own."""

import json
from collections.abc import Iterator
from contextlib import suppress

import fuzzing
import h11
import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from served import Served

pytestmark = pytest.mark.long

# `make fuzz` makes more calls, each time others. Nine tenths of all are of the 85 kinds here
# (routes, with right and with wrong values, and what lies beside the schema); the rest are those of
# `test_grammar_fuzz.py`.
_NUM_EXAMPLES = fuzzing.NUM_CALLS * 9 // 10 // fuzzing.NUM_ROUNDS // 85
_SETTINGS = settings(
    max_examples=max(12, _NUM_EXAMPLES),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=not fuzzing.NUM_CALLS,
)
_QUERY = ["%ff", "%00", "after", "limit", "=", "&", "9999999999", "[", "]", "metadata", "a"]
# How many tokens an answer may have.
_LIMITS = {
    **dict.fromkeys(
        ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"), "max_tokens"
    ),
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
_ROUTES = (
    "/v1/batches",
    "/v1/messages",
    "/v1/uploads",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/load_lora_adapter",
    "/v1/fine_tuning/jobs",
    "/v1/files",
)


@pytest.fixture(autouse=True)
def survives(served: Served) -> Iterator[None]:
    with fuzzing.surviving(served):
        yield


def test_every_route_by_the_schema_and_beside_it(served: Served):
    schema = schemathesis.openapi.from_dict(served.get("/openapi.json").json())
    routes = []
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()  # type: ignore[union-attr]  # or it raises, which says what is wrong
            routes.append(operation.label)
            for mode in schemathesis.GenerationMode:
                _check(operation, mode, served.url, session)
    assert len(routes) > 20


def _check(
    operation: schemathesis.APIOperation,
    mode: schemathesis.GenerationMode,
    url: str,
    session: requests.Session,
) -> None:
    @_SETTINGS
    @given(case=operation.as_strategy(generation_mode=mode))
    def never_fails(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and case.path in _LIMITS:
            case.body[_LIMITS[case.path]] = 2  # right ones would be answered at length
        answer = case.call(base_url=url, session=session, timeout=60)
        fuzzing.note(answer.status_code)
        assert answer.status_code < 500 or case.path == "/ready", (case.body, answer.text)
        if answer.status_code >= 400 and case.method != "HEAD":
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    with suppress(Unsatisfiable):  # there is nothing that could be wrong with it
        fuzzing.in_rounds(never_fails)


def test_any_bytes(served: Served):
    with httpx.Client(base_url=served.url, timeout=60) as connection:

        @_SETTINGS
        @given(
            content=st.binary(),
            path=st.sampled_from(_ROUTES),
            kind=st.sampled_from(
                ["application/json", "text/plain", "multipart/form-data; boundary=x"]
            ),
        )
        def never_fails(content: bytes, path: str, kind: str) -> None:
            answer = connection.post(path, content=content, headers={"Content-Type": kind})
            fuzzing.note(answer.status_code)
            assert 400 <= answer.status_code < 500

        fuzzing.in_rounds(never_fails)


def test_values_that_are_right_by_type_alone(served: Served):
    numbers = st.one_of(
        st.integers(), st.floats(), st.just(2**63), st.just(-(2**63) - 1), st.just(1e308)
    )
    fields = (
        "temperature",
        "top_p",
        "n",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "max_tokens",
        "top_k",
    )
    more = ("min_p", "repetition_penalty", "min_tokens", "logprobs", "best_of")
    bodies = st.fixed_dictionaries(
        {"model": st.just("small"), "prompt": st.one_of(st.text(), st.lists(numbers, max_size=5))},
        optional=dict.fromkeys(fields + more, numbers)
        | {"stop": st.text(), "logit_bias": st.dictionaries(st.text(), numbers, max_size=2)}
        | {"slo": st.fixed_dictionaries({}, optional={"ttft_ms": numbers, "tpot_ms": numbers})},
    )
    with httpx.Client(base_url=served.url, timeout=60) as connection:

        @settings(_SETTINGS, max_examples=max(150, _NUM_EXAMPLES))
        @given(body=bodies)
        def never_fails(body: dict[str, object]) -> None:
            content = json.dumps({"max_tokens": 2, **body}).encode()
            answer = connection.post(
                "/v1/completions", content=content, headers={"Content-Type": "application/json"}
            )
            fuzzing.note(answer.status_code)
            assert answer.status_code < 500, (body, answer.text)

        fuzzing.in_rounds(never_fails)
    assert served.get("/ready").status_code == 200


def test_headers_and_queries_of_any_bytes(served: Served):
    """h11 refuses what is no header; the rest comes to the routes as it is."""
    names = st.sampled_from(
        [
            "authorization",
            "content-type",
            "content-length",
            "x-request-id",
            "host",
            "accept",
            "range",
        ]
    )
    values = st.binary(max_size=50).filter(
        lambda value: value.strip() == value and not set(value) & set(b"\0\r\n")
    )
    paths = st.sampled_from(
        [*_ROUTES, "/v1/models", "/v1/status/steps", "/v1/fine_tuning/jobs?limit=1", "/health"]
    )
    with httpx.Client(base_url=served.url, timeout=60) as connection:

        @_SETTINGS
        @given(
            headers=st.dictionaries(names, values, max_size=3),
            path=paths,
            query=st.lists(st.sampled_from(_QUERY)).map("".join),
            method=st.sampled_from(["GET", "POST", "DELETE"]),
        )
        def never_fails(headers: dict[str, bytes], path: str, query: str, method: str) -> None:
            with suppress(
                httpx.LocalProtocolError, h11.LocalProtocolError
            ):  # the client's own refusal
                answer = connection.request(
                    method,
                    f"{path}?{query}",
                    headers=[(name.encode(), value) for name, value in headers.items()],
                )
                fuzzing.note(answer.status_code)
                assert answer.status_code < 500, answer.text

        fuzzing.in_rounds(never_fails)
    assert served.get("/health").status_code == 200


def test_json_that_is_hardly_any(served: Served):
    """Duplicated names, deep nesting, huge numbers, NULs and half characters, at any place of a
    body."""
    odd = st.sampled_from(
        [
            *(
                '{"a": 1, "a": 2}',
                "[" * 3000,
                '{"a":' * 3000,
                "1" * 5000,
                "1e999",
                "-1e999",
                "NaN",
                "-Infinity",
                "-0",
            ),
            *(
                '"\\ud800"',
                '"\\u0000"',
                '"' + "a" * 5000 + '"',
                "[]",
                "{}",
                "null",
                "[[[[[]]]]]",
                "true",
                '"\\',
            ),
        ]
    )
    names = st.sampled_from(
        [
            "model",
            "prompt",
            "messages",
            "stop",
            "seed",
            "n",
            "logit_bias",
            "metadata",
            "slo",
            "lora_name",
        ]
    )
    with httpx.Client(base_url=served.url, timeout=60) as connection:

        @_SETTINGS
        @given(
            pairs=st.lists(st.tuples(names, odd), max_size=5), path=st.sampled_from(_ROUTES[:-1])
        )
        def never_fails(pairs: list[tuple[str, str]], path: str) -> None:
            content = "{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"
            answer = connection.post(
                path, content=content, headers={"Content-Type": "application/json"}
            )
            fuzzing.note(answer.status_code)
            assert answer.status_code < 500, (content, answer.text)  # some are right after all

        fuzzing.in_rounds(never_fails)


def test_addresses(served: Served):
    for path in (
        "/v1/models/%00",
        "/v1/models/" + "a" * 5000,
        "/v1/status/steps?after=-1",
        "/v1/status/steps?after=x",
    ):
        assert 400 <= served.get(path).status_code < 500
    assert served.get(f"/v1/status/steps?after={10**30}").status_code == 200
