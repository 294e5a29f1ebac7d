"""/v1/chat/completions with the real client."""

from typing import Any, get_type_hints

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from served import Served, chat_tokens, expected, tokenizer

MESSAGES: Any = [{"role": "user", "content": "Hello 😀"}]


@pytest.fixture
def served(either_server: Served) -> Served:
    return either_server


def test_greedy_answers_are_those_of_transformers(client: OpenAI):
    prompt = chat_tokens("Hello 😀")
    tokens, logprobs = expected(prompt, 12)
    answer = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer().decode(tokens, skip_special_tokens=True)
    found = choice.logprobs.content
    assert [each.logprob for each in found] == pytest.approx(logprobs, abs=1e-4)
    assert all(len(each.top_logprobs) == 2 for each in found)
    raw = b"".join(bytes(each.bytes) for each in found)
    assert raw.decode("utf-8", "replace") == tokenizer().decode(tokens, skip_special_tokens=False)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.object == "chat.completion"


def test_a_stream_begins_with_the_role_and_ends_with_a_reason(client: OpenAI):
    settings: dict[str, Any] = {
        "model": "small",
        "messages": MESSAGES,
        "max_completion_tokens": 12,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**settings, logprobs=True)
    events = list(
        client.chat.completions.create(
            **settings, logprobs=True, stream=True, stream_options={"include_usage": True}
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events[:-1])
    assert text == whole.choices[0].message.content
    logprobs = [
        each.logprob
        for e in events[:-1]
        if e.choices[0].logprobs
        for each in e.choices[0].logprobs.content
    ]
    assert logprobs == pytest.approx(
        [each.logprob for each in whole.choices[0].logprobs.content], abs=1e-5
    )
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert events[-2].choices[0].delta.content, "with the last of the text"
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {event.id for event in events} == {events[0].id}


def test_several_answers_at_once(client: OpenAI):
    settings: dict[str, Any] = {
        "model": "small",
        "messages": MESSAGES,
        "max_tokens": 8,
        "seed": 3,
        "n": 3,
    }
    whole = [
        choice.message.content for choice in client.chat.completions.create(**settings).choices
    ]
    streamed = ["", "", ""]
    for event in client.chat.completions.create(**settings, stream=True):
        streamed[event.choices[0].index] += event.choices[0].delta.content or ""
    assert streamed == whole
    assert len(set(whole)) == 3


def test_without_a_limit_an_answer_may_fill_the_context(client: OpenAI):
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_content_may_come_in_parts_and_developers_are_the_system(client: OpenAI):
    settings: dict[str, Any] = {"model": "small", "max_tokens": 6, "temperature": 0}
    parts: Any = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    one = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **settings)
    other = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hello"}], **settings
    )
    assert one.choices[0].message.content == other.choices[0].message.content
    orders: list[Any] = [{"role": role, "content": "Be"} for role in ("system", "developer")]
    roles = [
        client.chat.completions.create(messages=[order, *MESSAGES], **settings).usage
        for order in orders
    ]
    assert roles[0].prompt_tokens == roles[1].prompt_tokens


def test_harmless_fields_are_taken(client: OpenAI):
    client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        tools=[],
        tool_choice="auto",
        top_p=0,
        extra_body={"slo": {"ttft_ms": 100, "tpot_ms": 10}, "min_tokens": 1},
    )


def test_nulls_are_as_good_as_nothing(client: OpenAI):
    fields = [*get_type_hints(CompletionCreateParamsBase), "stream"]
    nulls = {name: None for name in fields if name not in ("model", "messages")}
    client.post(
        "/chat/completions", body={"model": "small", "messages": MESSAGES, **nulls}, cast_to=object
    )


def test_an_answer_can_be_said_again_with_its_nulls(client: OpenAI):
    settings: dict[str, Any] = {"model": "small", "max_tokens": 2}
    said = (
        client.chat.completions.create(messages=MESSAGES, **settings)
        .choices[0]
        .message.model_dump()
    )
    assert {"annotations", "audio", "function_call"} <= set(said)
    client.chat.completions.create(messages=[*MESSAGES, said, *MESSAGES], **settings)


def test_answers_of_other_servers_can_be_said_again(client: OpenAI):
    """With keys of their own, and roles that the template takes."""
    said: Any = {
        "role": "assistant",
        "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}],
        "provider_specific_fields": {"refusal": None},
        "reasoning_content": "Hm",
        "thinking_blocks": [],
        "refusal": None,
        "tool_calls": None,
    }
    settings: dict[str, Any] = {"model": "small", "max_tokens": 4, "temperature": 0}
    plain: Any = {"role": "assistant", "content": "Hi"}
    texts = {
        client.chat.completions.create(messages=[*MESSAGES, one, *MESSAGES], **settings)
        .choices[0]
        .message.content
        for one in (said, plain)
    }
    assert len(texts) == 1
    king: Any = [{"role": "king", "content": "x"}]
    client.chat.completions.create(messages=king, **settings)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_change_the_answer_is_passed_over_and_named(client: OpenAI, stream: bool):
    settings: dict[str, Any] = {"model": "small", "max_tokens": 1, "stream": stream}
    extra = {
        "keep_alive": "5m",
        "num_retries": 3,
        "request_id": "a",
        "tags": None,
        "use_beam_search": False,
    }
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, user="me", reasoning_effort="low", extra_body=extra, **settings
    )
    assert (
        raw.headers["x-coserve-ignored"]
        == "keep_alive, num_retries, request_id, user, reasoning_effort"
    )
    raw.parse()
    other = client.completions.with_raw_response.create(
        prompt="a", **settings, extra_body={"request_id": "a"}
    )
    assert other.headers["x-coserve-ignored"] == "request_id"
    other.parse()
    none = client.completions.with_raw_response.create(prompt="a", **settings)
    assert "x-coserve-ignored" not in none.headers
    none.parse()


def test_no_share_of_the_probability_is_the_likeliest_token(client: OpenAI):
    settings: dict[str, Any] = {"model": "small", "messages": MESSAGES, "max_tokens": 8}
    one = client.chat.completions.create(top_p=0, temperature=2, **settings)
    other = client.chat.completions.create(temperature=0, **settings)
    assert one.choices[0].message.content == other.choices[0].message.content


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
        ),  # its template takes none
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"options": {"num_ctx": 8}}, "options"),
        ({"guardrails": ["x"]}, "guardrails"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "x"}, "chat_template"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_there_is_refused(client: OpenAI, more: dict[str, Any], param: str | None):
    body = {"model": "small", "messages": MESSAGES, **more}
    with pytest.raises(BadRequestError) as raised:
        client.post("/chat/completions", body=body, cast_to=object)
    assert raised.value.type == "invalid_request_error"
    if param is not None:
        assert raised.value.param == param
