"""Fields that clients of other servers send: each row of the table over HTTP, and unknown fields by
each policy."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from served import Served, serving

from coserve.server.anthropic.schemas import CountBody, MessagesBody
from coserve.server.bodies.client_fields import FIELDS, ClientField
from coserve.server.bodies.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RequestBody,
    SamplingBody,
    TokenizeBody,
)
from coserve.server.generation.embeddings import EmbeddingBody
from coserve.server.responses.schemas import ResponseBody

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
# A value with a counterpart here, for each field that has one.
MAPPED: dict[str, Any] = {
    "max_completion_tokens": 1,
    "max_output_tokens": 1,
    "stop": "x",
    "stop_strings": ["x"],
    "stopping_strings": ["x"],
    "custom_stopping_strings": ["x"],
    "stop_sequences": ["x"],
    "output_config": {"effort": "low"},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "think": "low",
    "reasoning": {"effort": "high", "exclude": True, "max_tokens": 100},
    "reasoning_format": "hidden",
    "guided_json_object": True,
    "json_schema": SCHEMA,
    "grammar": 'root ::= "a"',
    "grammar_string": 'root ::= "a"',
    "ebnf": 'root ::= "a"',
    "regex": "[a-c]",
    "n_predict": 1,
    "num_predict": 1,
    "max_new_tokens": 1,
    "min_new_tokens": 1,
    "repeat_penalty": 1.1,
    "rep_pen": 1.1,
    "random_seed": 3,
    "sampler_seed": -1,
    "sampling_seed": 3,
    "do_sample": False,
    "n_probs": 2,
    "usage": {"include": True},
    "no_stop_trim": True,
    "return_full_text": True,
    "truncate": 5,
    "prompt_truncate_len": 5,
    "ban_eos_token": True,
    "add_bos_token": False,
    "extra_key": "salt",
    "repeat_last_n": -1,
    "repetition_penalty_range": 0,
}
ROUTES: dict[str, tuple[type[SamplingBody], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"model": "small", "messages": MESSAGES}),
    "/v1/completions": (CompletionBody, {"model": "small", "prompt": "Hello"}),
}


def ask(served: Served, path: str = "/v1/chat/completions", /, **fields: Any) -> httpx.Response:
    return served.post(path, json={"max_tokens": 1, "temperature": 0, **ROUTES[path][1], **fields})


def ignored(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [name for name in answer.headers.get("x-coserve-ignored", "").split(", ") if name]


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def rows(path: str, action: str) -> list[ClientField]:
    known = ROUTES[path][0].model_fields
    return [row for row in FIELDS.values() if row.action == action and row.name not in known]


def test_the_docs_have_the_table():
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "fields_table.py"))
    assert script["PAGE"].read_text() == script["page"](), "run scripts/fields_table.py"


def test_every_mapped_field_is_tried():
    assert set(MAPPED) == {row.name for row in FIELDS.values() if row.action == "mapped"}
    assert len(FIELDS) > 200


@pytest.mark.parametrize("path", ROUTES)
def test_mapped_fields_are_answered(served: Served, path: str):
    for row in rows(path, "mapped"):
        answer = served.post(
            path, json={**ROUTES[path][1], "temperature": 0, row.name: MAPPED[row.name]}
        )
        assert answer.status_code == 200, (row.name, answer.text)


@pytest.mark.parametrize("path", ROUTES)
def test_fields_without_effect_are_passed_over_and_named(served: Served, path: str):
    plain = ask(served, path).json()["choices"]
    for row in rows(path, "ignored"):
        answer = ask(served, path, **{row.name: {"a": ["b"]}})
        assert (ignored(answer), answer.json()["choices"]) == ([row.name], plain), row.name


@pytest.mark.parametrize("path", ROUTES)
def test_fields_that_would_change_an_answer_are_refused_with_what_is_right(
    served: Served, path: str
):
    for row in rows(path, "refused"):
        answer = ask(served, path, **{row.name: {"a": ["b"]}})
        assert answer.status_code == 400, row.name
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (row.name, "unsupported_parameter")
        assert error["message"] == f"{row.name} is not supported here: {row.note}"
        for value in (None, *row.neutral):
            assert ignored(ask(served, path, **{row.name: value})) == [], (row.name, value)


def test_other_names_have_the_effect_of_ours(served: Served):
    def same(
        theirs: dict[str, Any], ours: dict[str, Any], path: str = "/v1/chat/completions"
    ) -> Any:
        settings: dict[str, Any] = {
            "max_tokens": 12,
            "temperature": 1,
            "seed": 5,
            "ignore_eos": True,
        }
        found, expected = (ask(served, path, **{**settings, **more}) for more in (theirs, ours))
        assert found.json()["choices"] == expected.json()["choices"], (theirs, found.text)
        return expected.json()["choices"]

    plain = same({}, {})
    for theirs, ours in (
        ({"repeat_penalty": 3.0}, {"repetition_penalty": 3.0}),
        ({"seed": None, "random_seed": 9}, {"seed": 9}),
        ({"temperature": None, "do_sample": False}, {"temperature": 0}),
        ({"max_tokens": None, "n_predict": 3}, {"max_tokens": 3}),
        ({"n_probs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"regex": "[a-c]{6}"}, {"structured_outputs": {"regex": "[a-c]{6}"}}),
        (
            {"grammar": {"type": "regex", "value": "[a-c]{6}"}},
            {"structured_outputs": {"regex": "[a-c]{6}"}},
        ),
        ({"ebnf": "root ::= [x-z]{4}"}, {"structured_outputs": {"grammar": "root ::= [x-z]{4}"}}),
        (
            {"max_tokens": 60, "response_format": {"type": "json_object", "schema": SCHEMA}},
            {"max_tokens": 60, "guided_json": SCHEMA},
        ),
        (
            {"max_tokens": 60, "response_format": {"type": "json", "value": SCHEMA}},
            {"max_tokens": 60, "json_schema": SCHEMA},
        ),
        (
            {"response_format": {"type": "regex", "pattern": "[a-c]{6}"}},
            {"guided_regex": "[a-c]{6}"},
        ),
        (
            {"response_format": {"type": "grammar", "grammar": 'root ::= "aa"'}},
            {"guided_grammar": 'root ::= "aa"'},
        ),
    ):
        assert same(theirs, ours) != plain, theirs
    same({"return_full_text": True}, {"echo": True}, "/v1/completions")
    same({"n_probs": 2}, {"logprobs": 2}, "/v1/completions")


_GENERATE: tuple[type[RequestBody], ...] = (ChatBody, CompletionBody, ResponseBody, MessagesBody)
_OTHERS: tuple[type[RequestBody], ...] = (EmbeddingBody, TokenizeBody, DetokenizeBody, CountBody)


@pytest.mark.parametrize("body", _GENERATE)
def test_no_field_of_another_route_is_unknown_where_text_is_generated(body: type[RequestBody]):
    own = {name for other in (*_GENERATE, *_OTHERS) for name in other.model_fields}
    assert own - body.model_fields.keys() - FIELDS.keys() == set()


def message(served: Served, **fields: Any) -> httpx.Response:
    body = {"model": "small", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    return served.post("/v1/messages", json={**body, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "YES"}},
        {"guided_regex": "YES"},
        {"guided_choice": ["YES"]},
        {"regex": "YES"},
        {"grammar": 'root ::= "YES"'},
        {"response_format": {"type": "regex", "pattern": "YES"}},
    ],
)
def test_messages_follow_a_grammar(served: Served, fields: dict[str, Any]):
    answer = message(served, **fields)
    assert (ignored(answer), answer.json()["content"][0]["text"]) == ([], "YES")


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"json_schema": SCHEMA},
    ],
)
def test_messages_follow_a_schema(served: Served, fields: dict[str, Any]):
    answer = message(served, **fields, max_tokens=60)
    assert ignored(answer) == []
    assert json.loads(answer.json()["content"][0]["text"]).keys() == {"a"}


def test_messages_take_the_fields_of_sampling(served: Served):
    plain = message(served).json()["content"][0]["text"]
    stop = next(each for each in plain if each.isalnum())
    for name, value in (("stop", stop), ("stop", [stop]), ("stop_strings", [stop])):
        found = message(served, **{name: value})
        assert (ignored(found), found.json()["stop_sequence"]) == ([], stop), name
    settings: dict[str, Any] = {"temperature": 1, "ignore_eos": True, "seed": 5}
    drawn = message(served, **settings).json()["content"]
    for more in (
        {"repetition_penalty": 3.0},
        {"min_p": 0.9},
        {"allowed_token_ids": [40, 41]},
        {"seed": 6},
    ):
        theirs = message(served, **{**settings, **more})
        expected = ask(served, **{**settings, **more, "max_tokens": 12})
        assert ignored(theirs) == []
        assert theirs.json()["content"][0]["text"] == text(expected), more
        assert theirs.json()["content"] != drawn, more


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, {"n": 2}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, {"logprobs": True}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, {"n_probs": 2}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, {"no_stop_trim": True}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, {"add_generation_prompt": False}),
        ("/v1/responses", {"input": "x"}, {"logprobs": True}),
        ("/v1/responses", {"input": "x"}, {"return_full_text": True}),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES},
            {"text": {"format": {"type": "json_schema"}}},
        ),
        ("/v1/chat/completions", {"messages": MESSAGES}, {"conversation": "conv_1"}),
        ("/v1/chat/completions", {"messages": MESSAGES}, {"guided_decoding": {"json": SCHEMA}}),
        ("/v1/chat/completions", {"messages": MESSAGES}, {"response_schema": SCHEMA}),
        ("/v1/chat/completions", {"messages": MESSAGES}, {"max_length": 9}),
        ("/v1/embeddings", {"input": "x"}, {"normalize": False}),
        ("/v1/embeddings", {"input": "x"}, {"output_dimension": 2}),
        ("/v1/embeddings", {"input": "x"}, {"output_dtype": "int8"}),
        ("/v1/embeddings", {"input": "x"}, {"embedding_type": "binary"}),
        ("/tokenize", {"prompt": "x"}, {"truncate": 1}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}, {"truncate_prompt_tokens": 1}),
    ],
)
def test_fields_that_a_route_cannot_follow_are_refused(
    served: Served, path: str, body: dict[str, Any], fields: dict[str, Any]
):
    answer = served.post(path, json={"model": "small", **body, **fields})
    (name,) = fields
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_routes_that_count_pass_over_what_chooses_tokens(served: Served):
    more = {"stop_sequences": ["x"], "n_predict": 3, "stop": "x", "min_p": 0.5, "regex": "a"}
    answer = served.post(
        "/v1/messages/count_tokens", json={"model": "small", "messages": MESSAGES, **more}
    )
    assert ignored(answer) == sorted(more)


def test_usage_of_openrouter_comes_at_the_end_of_a_stream(client: OpenAI):
    extra: Any = {"usage": {"include": True}}
    chunks = list(
        client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=2, stream=True, extra_body=extra
        )
    )
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking": {"type": "maybe"}}, "thinking must be true, false"),
        ({"think": "hard"}, "think must be true, false, low, medium or high"),
        ({"reasoning": {"effrot": "low"}}, "reasoning has 'effrot'; known: effort"),
        ({"reasoning": 3}, "reasoning must be an object"),
        (
            {"reasoning_format": "none"},
            "reasoning_format is 'none': reasoning is reasoning_content",
        ),
        ({"do_sample": False, "temperature": 0.5}, "do_sample is false, and temperature is 0.5"),
        (
            {"repeat_penalty": 1.1, "repeat_last_n": 64},
            "repeat_last_n is 64: repetition_penalty counts the whole",
        ),
        (
            {"repeat_penalty": 1.3, "repeat_last_n": 0},
            "repeat_last_n is 0, which turns repeat_penalty off",
        ),
        ({"grammar": {"type": "xml"}}, "grammar must be a string"),
        ({"grammar": {"type": [], "value": 1}}, "grammar must be a string"),
    ],
)
def test_values_without_a_counterpart_are_refused(
    served: Served, fields: dict[str, Any], words: str
):
    answer = ask(served, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(words), (
        answer.text
    )


def test_our_own_name_wins_and_the_other_is_named(served: Served):
    answer = ask(served, max_tokens=3, n_predict=5, ignore_eos=True)
    assert (ignored(answer), answer.json()["usage"]["completion_tokens"]) == (["n_predict"], 3)
    assert ignored(ask(served, max_tokens=3, n_predict=3)) == []


def test_a_schema_by_another_name_is_not_merged_with_our_own(served: Served):
    answer = ask(
        served,
        max_tokens=60,
        guided_json=SCHEMA,
        json_schema={"properties": {"b": {"type": "null"}}},
    )
    assert ignored(answer) == ["json_schema"]
    assert json.loads(text(answer)).keys() == {"a"}


def test_a_key_of_an_object_is_not_taken_for_a_misspelt_object(served: Served):
    answer = ask(served, structured_outputs={"regex": "a", "backend": "x"})
    assert answer.json()["error"]["message"] == "Unknown parameter: 'structured_outputs.backend'."


def test_an_unlimited_answer_by_other_names_ends_with_the_context(served: Served):
    answer = served.post(
        "/v1/chat/completions", json={**ROUTES["/v1/chat/completions"][1], "n_predict": -1}
    )
    assert answer.status_code == 200
    assert (
        served.post(
            "/v1/responses", json={"model": "small", "input": "x", "n_predict": -1}
        ).status_code
        == 200
    )
    answer = ask(served, "/v1/completions", max_tokens=None, n_predict=-1)
    assert (
        answer.status_code == 400
        and "needs a number of tokens" in answer.json()["error"]["message"]
    )


class TestUnknownFields:
    @pytest.mark.parametrize("stream", [False, True])
    def test_they_are_passed_over_and_named(self, served: Served, stream: bool):
        more: dict[str, Any] = {"stream_options": {"flush_now": 1}} if stream else {}
        answer = ask(served, stream=stream, galaxy=1, nothing=None, **more)
        assert ignored(answer) == ["galaxy", *(["stream_options.flush_now"] if stream else [])]

    def test_each_has_one_line_in_the_log(self, served: Served):
        for _ in range(3):
            ask(served, comet_field=1)
        assert served.log.read_text().count("comet_field") == 1

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/embeddings", {"input": "x"}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1, "text": {"galaxy": 1}}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
            ("/tokenize", {"prompt": "x"}),
        ],
    )
    def test_on_every_route_that_answers(self, served: Served, path: str, body: dict[str, Any]):
        names = ignored(
            served.post(path, json={"model": "small", **body, "galaxy": 1, "keep_alive": 1})
        )
        assert names == ["galaxy", "keep_alive", *(["text.galaxy"] if "text" in body else [])]

    @pytest.mark.parametrize(
        ("fields", "name", "meant"),
        [
            ({"temprature": 1}, "temprature", "temperature"),
            ({"max_tokns": 1}, "max_tokns", "max_tokens"),
            ({"maxTokens": 1}, "maxTokens", "max_tokens"),
            ({"tempreature": 1}, "tempreature", "temperature"),
            ({"enable_thinkng": True}, "enable_thinkng", "enable_thinking"),
            ({"repeat_penlaty": 2}, "repeat_penlaty", "repeat_penalty"),
            (
                {"stream": True, "stream_options": {"include_usge": True}},
                "stream_options.include_usge",
                "include_usage",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"shema": SCHEMA}}},
                "response_format.json_schema.shema",
                "schema",
            ),
        ],
    )
    def test_misspelt_names_are_refused(
        self, served: Served, fields: dict[str, Any], name: str, meant: str
    ):
        answer = ask(served, **fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (
            error["message"] == f"Unknown parameter: '{name}'. Did you mean '{meant}'?"
            and error["param"] == name
        )

    @pytest.mark.parametrize(
        "name", ["user_id", "prompt_id", "message_id", "conversation_id", "title", "n_ctx", "id"]
    )
    def test_names_that_only_resemble_others_are_not_typos(self, served: Served, name: str):
        assert ignored(ask(served, **{name: 1})) == [name]

    def test_names_of_an_attacker_stay_within_header_and_log(self, served: Served):
        names = {"a\r\nSet-Cookie: x": 1, "é😀": 2, "x" * 5000: 3, "b, c": 4}
        answer = ask(served, **names)
        shown = ignored(answer)
        assert len(shown) == 4 and "set-cookie" not in answer.headers and max(map(len, shown)) < 80
        assert "\nSet-Cookie" not in served.log.read_text()
        many = ignored(ask(served, **{f"zzzz{place}_galaxy": 1 for place in range(20_000)}))
        assert len(many) <= 32

    def test_jobs_stay_strict(self, served: Served):
        answer = served.post(
            "/v1/fine_tuning/jobs", json={"model": "small", "training_file": "x", "galaxy": 1}
        )
        assert answer.status_code == 400 and "Unknown parameter: 'galaxy'" in answer.text

    def test_a_batch_takes_them_too(self, served: Served, tmp_path: Path):
        client = served.client()
        body = {
            **ROUTES["/v1/chat/completions"][1],
            "max_tokens": 1,
            "galaxy": 1,
            "cache_prompt": True,
        }
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        file = client.files.create(file=("b.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        done = served.wait_until(
            lambda: (found := client.batches.retrieve(batch.id)).status == "completed" and found
        )
        assert done.request_counts.completed == 1


_SWITCH = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is defined %}{% if enable_thinking %}thinks a "
    "lot{% else %}<think></think>no{% endif %}"
    "{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def refusing() -> Iterator[Served]:
    with serving("--unknown-fields", "refuse", "--chat-template", _SWITCH) as running:
        yield running


@pytest.fixture(scope="module")
def silent() -> Iterator[Served]:
    with serving("--unknown-fields", "ignore") as running:
        yield running


def test_refuse_refuses_every_unknown_field(refusing: Served):
    for fields, name in (
        ({"galaxy": 1}, "galaxy"),
        ({"stream": True, "stream_options": {"galaxy": 1}}, "stream_options.galaxy"),
    ):
        answer = ask(refusing, **fields)
        assert (
            answer.status_code == 400
            and answer.json()["error"]["message"] == f"Unknown parameter: '{name}'."
        )
    assert ignored(ask(refusing, keep_alive=1, n_predict=1)) == ["keep_alive"]


def test_ignore_is_silent_and_still_refuses_what_would_change_an_answer(silent: Served):
    answer = ask(silent, galaxy=1, temprature=2, keep_alive=1, stream_options=None)
    assert ignored(answer) == [] and "galaxy" not in silent.log.read_text()
    assert ask(silent, typical_p=0.5).status_code == 400


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "auto"}}, None),
        ({"think": False}, False),
        ({"think": "high"}, True),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "low"}}, True),
        ({"reasoning": {"max_tokens": 2000}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}, False),
    ],
)
def test_every_spelling_of_thinking_reaches_the_template(
    refusing: Served, fields: Any, thinks: bool | None
):
    kwargs = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
    answer, expected = ask(refusing, **fields), ask(refusing, **kwargs)
    assert answer.json()["usage"]["prompt_tokens"] == expected.json()["usage"]["prompt_tokens"]
    named = [
        name for name in ignored(answer) if name != "reasoning_effort"
    ]  # which this template does not know
    budgets = {"thinking": ["thinking.budget_tokens"], "reasoning": ["reasoning.max_tokens"]}
    has_budget = "budget_tokens" in str(fields) or "max_tokens" in str(fields)
    assert named == (budgets[next(iter(fields))] if has_budget else [])


def test_messages_and_responses_know_the_spellings_of_thinking(refusing: Served):
    def num_tokens(path: str, **body: Any) -> int:
        answer = refusing.post(path, json={"model": "small", **body})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["input_tokens"])

    settings: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ]
    for fields, other in pairs:
        assert num_tokens("/v1/messages", **settings, **fields) == num_tokens(
            "/v1/messages", **settings, **other
        )
    settings = {"input": "Hello", "max_output_tokens": 1}
    pairs = [
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ]
    for fields, other in pairs:
        assert num_tokens("/v1/responses", **settings, **fields) == num_tokens(
            "/v1/responses", **settings, **other
        )


def test_a_switch_that_the_template_does_not_know_is_named(served: Served):
    assert ignored(ask(served, enable_thinking=False)) == ["enable_thinking"]
