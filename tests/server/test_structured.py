"""Structured output over HTTP with the real client: random weights, and answers that follow what
was asked."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema_rs
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel
from served import Served

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRICT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}
GRAMMAR = 'root ::= "(" [a-c]* ")"'


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    is_old: bool
    legs: int | None


def is_person(text: str) -> bool:
    return jsonschema_rs.is_valid(SCHEMA, json.loads(text))


ASKED: list[tuple[dict[str, Any], Any]] = [
    ({"structured_outputs": {"json": SCHEMA}}, is_person),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_person),
    ({"structured_outputs": {"regex": "[a-f]{2,5}"}}, re.compile("[a-f]{2,5}").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}.__contains__),
    ({"structured_outputs": {"grammar": GRAMMAR}}, re.compile(r"\([a-c]*\)?").fullmatch),
    ({"guided_json": SCHEMA}, is_person),
    ({"guided_regex": "[a-f]{2,5}"}, re.compile("[a-f]{2,5}").fullmatch),
    ({"guided_choice": ["yes", "no"]}, {"yes", "no"}.__contains__),
    ({"guided_grammar": GRAMMAR}, re.compile(r"\([a-c]*\)?").fullmatch),
    ({"response_format": STRICT}, is_person),
]


@pytest.mark.parametrize(("more", "is_valid"), ASKED)
def test_answers_of_both_kinds_follow_what_was_asked(client: OpenAI, more, is_valid):
    chat = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=250, n=2, seed=1, extra_body=more
    )
    completion = client.completions.create(
        model="small", prompt="Hello", max_tokens=250, n=2, seed=1, extra_body=more
    )
    for text in [
        *(choice.message.content for choice in chat.choices),
        *(c.text for c in completion.choices),
    ]:
        assert is_valid(text), text


def test_a_json_object_is_one_unless_it_is_cut(client: OpenAI):
    asked: Any = {"type": "json_object"}
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=200, n=4, seed=2, response_format=asked
    )
    for choice in answer.choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    [cut] = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=2, response_format=asked, seed=2
    ).choices
    assert cut.finish_reason == "length" and cut.message.content.startswith("{")


def test_a_stream_gives_the_same_text(client: OpenAI):
    settings: dict[str, Any] = {
        "model": "small",
        "messages": MESSAGES,
        "max_tokens": 250,
        "seed": 5,
        "logprobs": True,
        "response_format": STRICT,
    }
    whole = client.chat.completions.create(**settings).choices[0]
    events = list(client.chat.completions.create(**settings, stream=True))
    assert (
        "".join(event.choices[0].delta.content or "" for event in events) == whole.message.content
    )
    assert is_person(whole.message.content)
    assert events[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert (
        b"".join(bytes(each.bytes) for each in whole.logprobs.content).decode()
        == whole.message.content
    )


def test_pydantic_models_are_parsed(client: OpenAI):
    answer = client.beta.chat.completions.parse(
        model="small", messages=MESSAGES, max_tokens=250, seed=3, response_format=Pet
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)
    with client.beta.chat.completions.stream(
        model="small", messages=MESSAGES, max_tokens=250, seed=3, response_format=Pet
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)


def test_a_schema_that_is_not_strict_is_followed_as_far_as_it_can_be(client: OpenAI):
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "uniqueItems": True}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    [choice] = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=250, response_format=asked
    ).choices
    assert all(isinstance(each, bool) for each in json.loads(choice.message.content))
    asked["json_schema"]["strict"] = True
    with pytest.raises(BadRequestError, match="uniqueItems"):
        client.chat.completions.create(model="small", messages=MESSAGES, response_format=asked)


def test_one_of_is_followed_where_branches_cannot_overlap(client: OpenAI):
    bounds = {"type": "integer", "minimum": 0, "maximum": 9}
    branches = [bounds, {"$ref": "#/$defs/L"}]
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["P"],
        "properties": {"P": {"oneOf": branches}},
        "$defs": {"L": {"type": "array", "items": bounds, "minItems": 2, "maxItems": 2}},
    }
    answer = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=250,
        n=4,
        seed=1,
        extra_body={"guided_json": schema},
    )
    assert all(
        jsonschema_rs.is_valid(schema, json.loads(choice.message.content))
        for choice in answer.choices
    )
    branches[1] = {"type": "number"}
    with pytest.raises(
        BadRequestError, match="oneOf at #/properties/P whose branches 0 and 1 may both match"
    ):
        client.chat.completions.create(
            model="small", messages=MESSAGES, extra_body={"guided_json": schema}
        )


def test_status_counts_the_bytes_of_grammars_until_the_engine_is_at_rest(served: Served):
    def bytes_of_grammars() -> int:
        return int(served.get("/v1/status").json()["memory"]["grammars"]["bytes"])

    body = {"model": "small", "prompt": "x", "max_tokens": 3, "guided_regex": "[a-f]{2,50}"}
    assert served.post("/v1/completions", json=body).status_code == 200
    served.wait_until(lambda: bytes_of_grammars() > 0)
    assert 'coserve_grammar_bytes{tenant="' in served.get("/metrics").text
    served.wait_until(lambda: bytes_of_grammars() == 0)


def test_tags_come_where_their_triggers_do(client: OpenAI):
    tag = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
    asked: Any = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    [choice] = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=40, response_format=asked
    ).choices
    assert "<f" not in choice.message.content or "<f>{" in choice.message.content


@pytest.mark.parametrize(
    ("more", "param", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": STRICT, "guided_regex": "a"}, "guided_regex", "only one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not valid JSON"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}},
            "structured_outputs",
            "unclosed group",
        ),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "an object"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "GBNF"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text"),
        ({"structured_outputs": {"json": SCHEMA, "regexp": "a"}}, None, "regexp"),
    ],
)
def test_what_cannot_be_followed_is_refused(client: OpenAI, more, param, reason):
    with pytest.raises(BadRequestError, match=reason) as error:
        client.chat.completions.create(model="small", messages=MESSAGES, extra_body=more)
    assert param is None or error.value.param == param


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {
            "structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]{0}"},
            "guided_whitespace_pattern": " ",
        },
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]{0}"},
        {"response_format": STRICT, "guided_whitespace_pattern": "[ ]{0}"},
        {"response_format": STRICT, "guided_whitespace_pattern": r"\t{0,2}"},
    ],
)
def test_white_space_is_what_was_asked_for(client: OpenAI, more: dict[str, Any]):
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=250, n=4, seed=1, extra_body=more
    )
    allowed = "\t" if r"\t" in str(more.get("guided_whitespace_pattern")) else ""
    for choice in answer.choices:
        between = re.sub(r'"(\\.|[^"])*"', "", choice.message.content)  # without the texts
        assert is_person(choice.message.content) and set(re.findall(r"\s", between)) <= set(allowed)


def test_objects_can_be_closed(client: OpenAI):
    inner = {
        "type": "object",
        "properties": {"properties": {"type": "boolean"}},
        "required": ["properties"],
    }
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    asked = {"structured_outputs": {"json": schema, "disable_additional_properties": True}}
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=250, n=4, seed=1, extra_body=asked
    )
    for choice in answer.choices:
        assert list(json.loads(choice.message.content)) == ["a"]
        assert list(json.loads(choice.message.content)["a"]) == ["properties"]


def test_the_newer_name_of_a_grammar_wins_and_the_older_is_named(client: OpenAI):
    def ask(**more: Any) -> tuple[str, str]:
        raw = client.chat.completions.with_raw_response.create(
            model="small", messages=MESSAGES, max_tokens=20, extra_body=more
        )
        return raw.parse().choices[0].message.content, raw.headers.get("x-coserve-ignored", "")

    newer = {"structured_outputs": {"regex": "[a-c]{3}"}}
    text, named = ask(
        **newer, guided_regex="[x-z]{3}", guided_grammar="", guided_decoding_backend="guidance"
    )
    assert (
        set(text) <= set("abc") and named == "guided_decoding_backend, guided_grammar, guided_regex"
    )
    for older in ({"guided_json": SCHEMA}, {"guided_choice": ["x"]}, {"json_schema": SCHEMA}):
        text, named = ask(**newer, **older)
        assert set(text) <= set("abc") and named in ("guided_json", "guided_choice")


def test_the_same_grammar_twice_is_one(client: OpenAI):
    strict = {"structured_outputs": {"json": SCHEMA}, "response_format": STRICT}
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=250, extra_body=strict
    )
    assert is_person(answer.choices[0].message.content)


GUIDANCE_JSON = json.dumps(
    {
        **SCHEMA,
        "x-guidance": {
            "whitespace_flexible": False,
            "whitespace_pattern": None,
            "item_separator": ", ",
            "key_separator": ": ",
            "coerce_one_of": True,
            "lenient": False,
        },
    },
    indent=2,
)


@pytest.mark.parametrize(
    ("grammar", "is_valid"),
    [
        (
            "%llguidance {}\n\nstart: x\nx[capture, max_tokens=5]: X\nX: /[0-9]+/\n",
            re.compile("[0-9]+").fullmatch,
        ),
        (
            '%llguidance {}\n\nstart: y\ny[capture]: Y\n\nY: "a"\n     | "b"\n\n',
            {"a", "b"}.__contains__,
        ),
        (f"%llguidance {{}}\n\nstart: z\n\nz[capture]: %json {GUIDANCE_JSON}\n\n", is_person),
    ],
)
def test_the_body_of_guidances_client_for_vllm(client: OpenAI, grammar: str, is_valid: Any):
    """The bodies are those that guidance 0.3.1 sends for `gen(regex=)`, `select` and `json`."""
    chunks = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        logprobs=True,
        top_logprobs=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={
            "guided_decoding_backend": "guidance",
            "guided_grammar": grammar,
            "structured_outputs": {"grammar": grammar},
        },
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert is_valid(text), text


def test_hostile_grammars_hold_up_nobody(served: Served):
    """Others are answered meanwhile, and these get their answer."""
    hostile: list[dict[str, Any]] = [
        {"guided_json": {"enum": [f"{n:x}" for n in range(15_000)]}},
        {"guided_json": {"properties": {f"p{n}": {"type": "string"} for n in range(3000)}}},
        {"guided_regex": "a{100000000}"},
        {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
        {"guided_grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    ]
    client = served.client()

    def ask(more: dict[str, Any]) -> str:
        try:
            client.chat.completions.create(
                model="small", messages=MESSAGES, max_tokens=3, extra_body=more
            )
        except BadRequestError as error:
            return error.message
        return ""

    with ThreadPoolExecutor(len(hostile)) as threads:
        asked = [threads.submit(ask, more) for more in hostile]
        while not all(each.done() for each in asked):
            assert ask({}) == ""
        answers = [each.result() for each in asked]
    assert all(answers[2:]), "the others are within the limits"
