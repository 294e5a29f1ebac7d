"""Whatever a client sends, the server answers, and never with an error of its own."""

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import Served

# The routes that need a body of their own kind are tested where they are written.
_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_EXAMPLES = 25
_SETTINGS = settings(
    max_examples=_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)


def test_bodies_by_the_schema_and_beside_it(served: Served):
    schema = schemathesis.openapi.from_dict(served.get("/openapi.json").json())
    connection = httpx.Client(base_url=served.url, timeout=60)
    for route in _ROUTES:
        operation = schema[route]["POST"]
        for mode in schemathesis.GenerationMode:
            strategy = operation.as_strategy(generation_mode=mode)

            @_SETTINGS
            @given(case=strategy)
            def never_fails(case: schemathesis.Case) -> None:
                body = case.body
                if isinstance(body, dict):
                    # Right ones would be answered at length.
                    body = {**body, "max_tokens": 2} if "prompt" in body or "messages" in body else body
                try:
                    answer = connection.post(case.path, json=body)
                except (UnicodeEncodeError, ValueError, TypeError):
                    return  # what no client could send
                assert answer.status_code < 500, (body, answer.text)
                if answer.status_code >= 400:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

            never_fails()
    connection.close()


def test_any_bytes(served: Served):
    connection = httpx.Client(base_url=served.url, timeout=60)

    @_SETTINGS
    @given(content=st.binary(), path=st.sampled_from(_ROUTES), kind=st.sampled_from(["application/json", "text/plain"]))
    def never_fails(content: bytes, path: str, kind: str) -> None:
        answer = connection.post(path, content=content, headers={"Content-Type": kind})
        assert 400 <= answer.status_code < 500

    never_fails()
    connection.close()


def test_addresses(served: Served):
    for path in ("/v1/models/%00", "/v1/models/" + "a" * 5000, "/v1/status/steps?after=-1", "/v1/status/steps?after=x"):
        assert 400 <= served.get(path).status_code < 500
    assert served.get(f"/v1/status/steps?after={10**30}").status_code == 200
