"""Bad requests get OpenAI's error bodies, with the field's name and what would be right."""

import gzip
import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from served import Served


@pytest.fixture
def served(either_server: Served) -> Served:
    return either_server


def refusal(
    served: Served, path: str = "/v1/completions", status: int = 400, **settings: Any
) -> dict[str, Any]:
    answer = served.post(path, **settings)
    assert answer.status_code == status, answer.text
    [(name, error)] = answer.json().items()
    assert name == "error"
    assert sorted(error) == ["code", "message", "param", "type"]
    assert "\n" not in error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"top_p": -1}, "top_p", "above 0"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 1000}, "n", "from 1 to 128"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": 10**30}, "prompt", "maximum context length is 512"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logit_bias": [1]}, "logit_bias", "valid object"),
        ({"logit_bias": {"x": 1, "y": 2}}, "logit_bias", "token ids to numbers, not 'x', 'y'"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "the model has"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        ({"stop": ["a"] * 1025}, "stop", "at most 1024"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "not available in a stream"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs"),
        ({"logprobs": 1, "logprob_token_ids": [400]}, "logprob_token_ids", "the model has"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        ({"allowed_token_ids": [400]}, "allowed_token_ids", "the model has"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than"),
        ({"cache_salt": ""}, "cache_salt", "at least 1"),
        ({"bad_words": [""]}, "bad_words[0]", "at least 1"),
        ({"stop": 3}, "stop", "valid string or a valid list"),
        ({"stop": ["a", 3]}, "stop[1]", "valid string"),
        ({"stop": ""}, "stop", "not empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "the model has"),
        ({"min_tokens": 99}, "min_tokens", "from 0 to 16"),
        ({"seed": 2**64}, "seed", "whole number"),
        ({"best_of": 4}, "best_of", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        (
            {"temprature": 1},
            "temprature",
            "Unknown parameter: 'temprature'. Did you mean 'temperature'?",
        ),
        ({"slo": {"ttft": 1}}, "slo.ttft", "Unknown parameter"),
        ({"slo": {"tpot_ms": -1}}, "slo.tpot_ms", "greater than"),
        ({"slo": {"ttft_ms": 1e-323}}, "slo.ttft_ms", "greater than"),
        ({"prompt": ["x"] * 2048, "n": 128}, "n", "more than 2048 choices"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": [320]}, "prompt", "320 tokens"),
        ({"prompt": [-1]}, "prompt", "320 tokens"),
        ({"prompt": [2**70]}, "prompt", "320 tokens"),
        ({"prompt": [1] * 510}, "prompt", "maximum context length is 512"),
        ({"prompt": {"text": "x"}}, "prompt", "valid string or a valid list"),
        ({"prompt": [1, "a"]}, "prompt[1]", "valid integer"),
        ({"prompt": None}, "prompt", ""),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_that_are_wrong(served: Served, more: dict[str, Any], param: str, words: str):
    body = {"model": "small", "prompt": "x", **more}
    error = refusal(served, json=body)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


def test_a_model_that_is_not_there(client: OpenAI):
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt-17", prompt="x")
    assert raised.value.code == "model_not_found"
    assert "`gpt-17` does not exist" in str(raised.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


def test_a_field_that_is_missing(served: Served):
    error = refusal(served, json={"model": "small"})
    assert (error["message"], error["code"]) == (
        "Missing required parameter: 'prompt'.",
        "missing_required_parameter",
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'"x"', b"\xff", b"null"])
def test_bodies_that_are_no_object(served: Served, content: bytes):
    error = refusal(served, content=content, headers={"Content-Type": "application/json"})
    assert "JSON" in error["message"] and error["param"] is None


def test_a_body_that_does_not_say_it_is_json(served: Served):
    error = refusal(
        served, content=b'{"model": "small", "prompt": "x"}', headers={"Content-Type": "text/plain"}
    )
    assert "Content-Type application/json" in error["message"]


def test_half_characters_are_refused_where_they_would_be_used(served: Served):
    for field in ("prompt", "stop", "model"):
        body = json.dumps({"model": "small", "prompt": "x", field: "a\ud800"})
        error = refusal(served, content=body, headers={"Content-Type": "application/json"})
        assert "surrogate" in error["message"] and error["param"] == field
    for path, more in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/embeddings", {"input": "\ud800"}),
        ("/tokenize", {"prompt": "\ud800"}),
    ):
        body = json.dumps({"model": "small", **more})
        error = refusal(served, path, content=body, headers={"Content-Type": "application/json"})
        assert error["param"] == next(iter(more))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({}, "tool_calls[0].function must be an object with a name and arguments"),
        (
            {"function": {"name": "f"}},
            "tool_calls[0].function must be an object with a name and arguments",
        ),
    ],
)
def test_calls_of_earlier_turns_that_are_wrong(served: Served, call: dict[str, Any], words: str):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    error = refusal(served, "/v1/chat/completions", json={"model": "small", "messages": messages})
    assert error["message"].startswith(words) and error["param"] == "messages"


CUT = '{"text": "It begins'


@pytest.mark.parametrize("arguments", [CUT, "5", "[1]", "nonsense", "{} {}"])
def test_a_call_that_was_cut_is_history_like_any_other(served: Served, arguments: str):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "write_note", "arguments": arguments},
    }
    messages = [
        {"role": "user", "content": "Write the note."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "error: arguments are not JSON"},
        {"role": "user", "content": "Try again."},
    ]
    items = [
        {"type": "message", "role": "user", "content": "Write the note."},
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "write_note",
            "arguments": arguments,
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": "error: arguments are not JSON",
        },
        {"type": "message", "role": "user", "content": "Try again."},
    ]
    use = {
        "type": "tool_use",
        "id": "call_1",
        "name": "write_note",
        "input": {"INVALID_JSON": arguments},
    }
    result = {
        "type": "tool_result",
        "tool_use_id": "call_1",
        "content": "error: arguments are not JSON",
    }
    blocks = [
        {"role": "user", "content": "Write the note."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Try again."}]},
    ]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 4}),
        ("/tokenize", {"messages": messages}),
        ("/v1/responses", {"input": items, "max_output_tokens": 16}),
        ("/v1/messages", {"messages": blocks, "max_tokens": 4}),
    ):
        found = served.post(path, json={"model": "small", **body})
        assert found.status_code == 200, found.text


def test_a_refusal_of_an_earlier_answer_is_its_text(served: Served):
    def tokens(answer: dict[str, Any]) -> list[int]:
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", **answer},
            {"role": "user", "content": "y"},
        ]
        found = served.post("/tokenize", json={"model": "small", "messages": messages})
        assert found.status_code == 200, found.text
        return list(found.json()["tokens"])

    expected = tokens({"content": "I cannot."})
    assert tokens({"content": None, "refusal": "I cannot."}) == expected
    assert tokens({"content": [{"type": "refusal", "refusal": "I cannot."}]}) == expected
    assert tokens({"content": "I cannot.", "refusal": None}) == expected


def test_addresses_and_methods_that_are_not_there(served: Served):
    assert (
        "Invalid URL (POST /v1/compleshuns)" in refusal(served, "/v1/compleshuns", 404)["message"]
    )
    assert "Not allowed to POST" in refusal(served, "/v1/models", 405)["message"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/models", "GET, HEAD"),
        ("/v1/models/small", "GET, DELETE, HEAD"),
        ("/v1/files", "GET, POST, HEAD"),
        ("/v1/completions", "POST"),
    ],
)
def test_a_method_that_is_not_there_is_told_all_that_are(served: Served, path: str, methods: str):
    answer = httpx.put(f"{served.url}{path}", timeout=60)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_a_body_that_is_compressed(served: Served):
    content = gzip.compress(json.dumps({"model": "small", "prompt": "x", "max_tokens": 1}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (
        "Content-Encoding is 'gzip'"
        in refusal(served, status=415, content=content, headers=headers)["message"]
    )
    headers |= {"Content-Encoding": "identity"}
    url, plain = f"{served.url}/v1/completions", gzip.decompress(content)
    assert httpx.post(url, content=plain, headers=headers, timeout=60).status_code == 200


def test_bodies_that_are_too_long(served: Served):
    body = json.dumps({"model": "small", "prompt": "x" * 32_000_000}).encode()

    def in_pieces() -> Any:
        for start in range(0, len(body), 1_000_000):
            yield body[start : start + 1_000_000]

    for content in (body, in_pieces()):
        headers = {"Content-Type": "application/json"}
        assert (
            "8000000 bytes"
            in refusal(served, status=413, content=content, headers=headers)["message"]
        )
    assert served.client().completions.create(model="small", prompt="x", max_tokens=1)
