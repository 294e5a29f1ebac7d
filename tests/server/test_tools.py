"""Calls of tools over HTTP with the real client, from a model that has learned to make them."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from openai import BadRequestError, OpenAI, omit
from served import Served, serving
from tool_model import (
    AFTER_TOOL,
    ANSWERS,
    BROKEN,
    CALLED,
    CLOCK,
    TOOLS,
    WEATHER,
    question,
    tool_model,
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    with serving(model=str(tool_model())) as running:
        yield running


@pytest.fixture
def client(caller: Served) -> OpenAI:
    return caller.client()


def function(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SETTINGS: dict[str, Any] = {"model": "caller", "temperature": 0, "max_tokens": 100}


def chat(client: OpenAI, text: str, **more: Any) -> Any:
    """The one choice."""
    [choice] = client.chat.completions.create(
        **{**SETTINGS, "messages": question(text), "tools": TOOLS, **more}
    ).choices
    return choice


def stream(client: OpenAI, text: str, **more: Any) -> Any:
    """What the real client makes of a stream."""
    settings = {**SETTINGS, "messages": question(text), "tools": TOOLS, **more}
    with client.chat.completions.stream(**settings) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()
    ]


@pytest.mark.parametrize("ask", [chat, stream])
def test_a_call_after_text(client: OpenAI, ask: Any):
    choice = ask(client, "weather")
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    assert calls_of(choice) == [("weather", WEATHER)]
    assert choice.message.tool_calls[0].type == "function"


@pytest.mark.parametrize("ask", [chat, stream])
def test_parallel_calls(client: OpenAI, ask: Any):
    choice = ask(client, "both")
    assert calls_of(choice) == [("weather", WEATHER), ("clock", CLOCK)]
    assert not choice.message.content
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)
    assert calls_of(ask(client, "both", parallel_tool_calls=False)) == [("weather", WEATHER)]


# Short, whatever the model would rather say.
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SHORT = [function("weather", CITY | {"additionalProperties": False}), function("clock", ZONE)]
# Of the answers that the model knows by heart, one alone has a reasoning; elsewhere it would begin
# one, and not end it.
AT_ONCE: Any = {"chat_template_kwargs": {"enable_thinking": False}}
POSSIBLE = {"weather": [{"city": "Rome"}, {"city": "Oslo"}], "clock": [{"zone": "UTC"}]}
FORCED: dict[str, Any] = {
    "tools": SHORT,
    "tool_choice": {"type": "function", "function": {"name": "clock"}},
}


@pytest.mark.parametrize("ask", [chat, stream])
@pytest.mark.parametrize("text", ["hello", "weather"])
def test_a_call_that_is_asked_for_by_its_name(client: OpenAI, ask: Any, text: str):
    choice = ask(client, text, **FORCED, extra_body=AT_ONCE)
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(choice)] == [
        ("clock", {"zone": "UTC"})
    ]
    assert not choice.message.content
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("ask", [chat, stream])
@pytest.mark.parametrize("seed", range(3))
def test_some_call_is_made_where_one_is_required(client: OpenAI, ask: Any, seed: int):
    more: dict[str, Any] = {"tools": SHORT, "temperature": 1.5, "seed": seed, "extra_body": AT_ONCE}
    choice = ask(client, "hello", tool_choice="required", parallel_tool_calls=False, **more)
    [(name, arguments)] = calls_of(choice)
    assert json.loads(arguments) in POSSIBLE[name]
    several = ask(client, "hello", tool_choice="required", **more)
    assert several.message.tool_calls and not several.message.content
    whole = several.message.tool_calls[: -1 if several.finish_reason == "length" else None]
    for called in whole:
        assert json.loads(called.function.arguments) in POSSIBLE[called.function.name]


def test_a_stream_is_as_openai_has_it(client: OpenAI):
    events = list(
        client.chat.completions.create(
            **SETTINGS, messages=question("both"), tools=TOOLS, stream=True, logprobs=True
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    found = [call for event in events for call in event.choices[0].delta.tool_calls or ()]
    begins = [call for call in found if call.id is not None]
    assert [(call.index, call.type, call.function.name) for call in begins] == [
        (0, "function", "weather"),
        (1, "function", "clock"),
    ]
    more = [call for call in found if call.id is None]
    assert all(call.type is None and call.function.name is None for call in more)
    pieces = [
        call.function.arguments for call in found if call.index == 0 and call.function.arguments
    ]
    assert "".join(pieces) == WEATHER
    assert len(pieces) > 3, "they come as they are written"
    assert [event.choices[0].finish_reason for event in events].count("tool_calls") == 1


def test_a_malformed_call_is_text(client: OpenAI):
    choice = chat(client, "broken")
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert choice.message.content == BROKEN
    assert stream(client, "broken").finish_reason == "stop", "it had begun, and is none"


def test_a_call_that_is_cut_off(client: OpenAI):
    whole = chat(client, "both", max_tokens=12)
    assert whole.finish_reason == "length"
    assert whole.message.tool_calls is None
    assert whole.message.content.startswith('<tool_call>\n{"name": "weather"')


def test_an_answer_is_said_again_with_what_the_tool_said(client: OpenAI):
    said = chat(client, "weather").message
    assert said.tool_calls is not None
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"}
    messages: list[Any] = [*question("weather"), {**said.model_dump(), "content": None}, result]
    again = chat(client, "", messages=messages)
    assert again.message.content == AFTER_TOOL == chat(client, "", messages=CALLED).message.content
    assert again.finish_reason == "stop"


def test_without_tools_or_with_none_of_them_nothing_is_a_call(client: OpenAI):
    text = (
        ANSWERS["weather"].replace("<tool_call>", "").replace("</tool_call>", "")
    )  # they are special tokens
    for more in ({"tools": None}, {"tool_choice": "none"}):
        choice = chat(client, "weather", **more)
        assert choice.message.content == text
        assert choice.finish_reason == "stop"
    assert chat(client, "weather", tool_choice="auto").finish_reason == "tool_calls"
    other: Any = [{"type": "function", "function": {"name": "other"}}]
    assert chat(client, "weather", tools=other).message.tool_calls is None


def test_several_choices_have_calls_of_their_own(client: OpenAI):
    settings = {**SETTINGS, "temperature": 0.01, "seed": 1, "n": 3}
    found = client.chat.completions.create(**settings, messages=question("weather"), tools=TOOLS)
    assert [calls_of(choice) for choice in found.choices] == [[("weather", WEATHER)]] * 3
    assert (
        len(
            {
                choice.message.tool_calls[0].id
                for choice in found.choices
                if choice.message.tool_calls
            }
        )
        == 3
    )


@pytest.mark.parametrize("ask", [chat, stream])
def test_reasoning_comes_apart_from_the_answer(client: OpenAI, ask: Any):
    choice = ask(client, "hello")
    assert choice.message.content == "Hello!"
    assert choice.message.reasoning_content == choice.message.reasoning == "They greet."
    assert choice.finish_reason == "stop"
    without = chat(client, "hello", extra_body={"include_reasoning": False})
    assert without.message.content == "Hello!"
    assert not hasattr(without.message, "reasoning_content")


TIME: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "zone", "schema": ZONE, "strict": True},
}


@pytest.mark.parametrize("ask", [chat, stream])
@pytest.mark.parametrize("choice", [FORCED["tool_choice"], "required"])
def test_a_call_that_must_be_made_comes_after_the_reasoning(client: OpenAI, ask: Any, choice: Any):
    asked: dict[str, Any] = {**FORCED, "tool_choice": choice, "parallel_tool_calls": False}
    said = ask(client, "hello", **asked)
    assert (said.message.reasoning, said.message.content or "") == ("They greet.", "")
    [(name, arguments)] = calls_of(said)
    assert json.loads(arguments) in POSSIBLE[name]
    assert said.finish_reason == "tool_calls"
    for more in (AT_ONCE, {"reasoning_effort": "none"}):
        at_once = ask(client, "hello", **asked, extra_body=more)
        assert not hasattr(at_once.message, "reasoning")
        assert calls_of(at_once) and not at_once.message.content


@pytest.mark.parametrize("ask", [chat, stream])
def test_structured_output_comes_after_the_reasoning(client: OpenAI, ask: Any):
    opened = [*question("hello"), {"role": "assistant", "content": "<think>\nThey"}]
    for more, thought in (
        ({}, "They greet."),
        ({"messages": opened, "extra_body": {"continue_final_message": True}}, " greet."),
        ({"extra_body": AT_ONCE}, None),
    ):
        said = ask(client, "hello", tools=omit, response_format=TIME, **more)
        assert getattr(said.message, "reasoning", None) == thought
        assert json.loads(said.message.content) == {"zone": "UTC"}
        assert said.finish_reason == "stop"


def test_what_the_prompt_has_opened_or_closed(client: OpenAI):
    """By `chat_template_kwargs` and by a message that is continued."""
    opened = [*question("hello"), {"role": "assistant", "content": "<think>\nThey"}]
    choice = chat(client, "", messages=opened, extra_body={"continue_final_message": True})
    assert (choice.message.reasoning, choice.message.content) == (" greet.", "Hello!")
    numbers = [
        client.chat.completions.create(
            **SETTINGS, messages=question("hello"), extra_body=more
        ).usage.prompt_tokens
        for more in (
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
            {"reasoning_effort": "high"},
        )
    ]
    assert numbers[0] == numbers[3] < numbers[1] == numbers[2]


def test_a_message_is_continued_and_echoed(client: OpenAI):
    messages = [*question("weather"), {"role": "assistant", "content": "I look.\n"}]
    settings: dict[str, Any] = {**SETTINGS, "messages": messages, "tools": TOOLS}
    for body, text in (
        ({"continue_final_message": True}, ""),
        (
            {"continue_final_message": True, "add_generation_prompt": False, "echo": True},
            "I look.\n",
        ),
    ):
        choice = chat(client, "", messages=messages, extra_body=body)
        assert (choice.message.content or "", calls_of(choice)) == (text, [("weather", WEATHER)])
        events = client.chat.completions.create(**settings, extra_body=body, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events) == text
    with pytest.raises(BadRequestError, match="cannot be combined"):
        chat(
            client,
            "",
            messages=messages,
            extra_body={"continue_final_message": True, "add_generation_prompt": True},
        )


def test_without_a_generation_prompt_the_last_ones_turn_is_continued(client: OpenAI):
    with_prompt, without = (
        client.chat.completions.create(
            **SETTINGS, messages=question("hello"), extra_body={"add_generation_prompt": value}
        )
        for value in (True, False)
    )
    assert with_prompt.usage.prompt_tokens == without.usage.prompt_tokens + 1
    assert [each.choices[0].message.role for each in (with_prompt, without)] == [
        "assistant",
        "user",
    ]


def test_a_stream_has_an_event_for_every_token(client: OpenAI):
    """Also where it is a part of a character, or of a call's name: clients take the first event for
    the first token."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    settings: dict[str, Any] = {**SETTINGS, "stream": True, "stream_options": options}
    events = list(
        client.chat.completions.create(**settings, messages=question("both"), tools=TOOLS)
    )
    *others, last = events
    counts = [event.usage.completion_tokens for event in others]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert set(counts) == set(range(last.usage.completion_tokens + 1)), (
        "none is left out, none said twice at once"
    )
    assert all(
        event.usage.total_tokens == event.usage.prompt_tokens + event.usage.completion_tokens
        for event in events
    )
    pieces = list(client.completions.create(**settings, prompt="😀", logit_bias={"200": 100}))
    assert [piece.usage.completion_tokens for piece in pieces] == [*range(1, 101), 100]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [*TOOLS, {"type": "function", "function": {}}]}, "tools[2].function"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f\0"}}]}, "tools[0]"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"tool_choice": {"type": "function", "function": {"name": "sun"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [function("f", {"type": "no such type"})]}, "tools"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_is_wrong_is_named(client: OpenAI, more: dict[str, Any], param: str):
    body = {**SETTINGS, "messages": question("weather"), "tools": TOOLS, **more}
    with pytest.raises(BadRequestError) as raised:
        client.post("/chat/completions", body=body, cast_to=object)
    assert raised.value.param == param


RESPONSE_TOOLS: Any = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
RESPONSE: dict[str, Any] = {
    "model": "caller",
    "temperature": 0,
    "max_output_tokens": 100,
    "tools": RESPONSE_TOOLS,
}


def test_responses_have_calls_and_go_back_with_what_tools_say(client: Any):
    made = client.responses.create(**RESPONSE, input="weather")
    assert made.status == "completed"
    assert made.output_text == "I look.\n"
    [asked] = [item for item in made.output if item.type == "function_call"]
    assert (asked.name, asked.arguments) == ("weather", WEATHER)
    said: Any = {"type": "function_call_output", "call_id": asked.call_id, "output": "rain"}
    # The model has learned what comes after a call without text before it.
    items: list[Any] = [*question("weather"), asked.model_dump(), said]
    assert client.responses.create(**RESPONSE, input=items).output_text == AFTER_TOOL
    follows = client.responses.create(**RESPONSE, input=[said], previous_response_id=made.id)
    assert follows.status == "completed"


def test_responses_stream_calls_and_reasoning(client: Any):
    for text in ("both", "hello"):
        whole = client.responses.create(**RESPONSE, input=text)
        with client.responses.stream(**RESPONSE, input=text) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        plain = [
            [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in each.output]
            for each in (whole, final)
        ]
        assert len(plain[0]) == len(plain[1]) == 2
        if text == "both":
            assert [(item.name, item.arguments) for item in final.output] == [
                ("weather", WEATHER),
                ("clock", CLOCK),
            ]
            assert kinds.count("response.function_call_arguments.done") == 2
        else:
            assert final.output[0].content[0].text == "They greet."
            assert final.output_text == "Hello!"
            assert (
                0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens
            )
            assert "response.reasoning_text.delta" in kinds


def test_a_broken_call_is_text_of_the_response(client: Any):
    for stream in (False, True):
        made = client.responses.create(**RESPONSE, input="broken", stream=stream)
        response = list(made)[-1].response if stream else made
        assert response.output_text == BROKEN
        assert [item.type for item in response.output] == ["message"]


SHORT_TOOLS: Any = [{"type": "function", **tool["function"], "strict": False} for tool in SHORT]
HOME: Any = {
    "type": "namespace",
    "name": "home",
    "description": "Where you are.",
    "tools": [SHORT_TOOLS[0]],
}
AWAY: Any = {**HOME, "name": "away"}


def test_a_function_of_a_namespace_is_called_and_sent_back_by_two_names(client: Any):
    tools = [HOME, SHORT_TOOLS[1]]
    asked: dict[str, Any] = {
        **RESPONSE,
        "input": "weather",
        "tools": tools,
        "reasoning": {"effort": "none"},
    }
    for choice in (
        {"type": "function", "name": "weather"},
        {"type": "function", "name": "home__weather"},
    ):
        made = client.responses.create(**asked, tool_choice=choice)
        [call] = made.output
        assert (call.namespace, call.name) == ("home", "weather")
        assert json.loads(call.arguments) is not None
        assert made.tools[0].tools[0].name == "weather"
    with client.responses.stream(
        **asked, tool_choice={"type": "function", "name": "weather"}
    ) as stream:
        items = [event.item for event in stream if event.type.startswith("response.output_item.")]
    assert [(item.namespace, item.name) for item in items] == [("home", "weather")] * 2, (
        "from the first event on"
    )
    plain = client.responses.create(**asked, tool_choice={"type": "function", "name": "clock"})
    assert (plain.output[0].namespace, plain.output[0].name) == (None, "clock")
    # The model is shown the call that it made, by the name that it knows.
    said: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    counted = [
        client.responses.input_tokens.count(
            model="caller", input=[*question("weather"), each, said]
        ).input_tokens
        for each in (
            call.model_dump(),
            {**call.model_dump(), "namespace": None, "name": "home__weather"},
        )
    ]
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([HOME, AWAY], {"type": "function", "name": "weather"}, "tool_choice"),
        ([HOME], {"type": "function", "name": "clock"}, "tool_choice"),
        ([HOME, HOME], "auto", "tools[1].tools[0].name"),
        ([{**HOME, "name": None}], "auto", "tools[0].name"),
        ([{**HOME, "tools": [AWAY]}], "auto", "tools[0].tools[0].type"),
        ([{**HOME, "tools": [{"type": "function"}]}], "auto", "tools[0].tools[0].name"),
    ],
)
def test_what_is_wrong_with_a_namespace_is_named(client: Any, tools: Any, choice: Any, param: str):
    body = {**RESPONSE, "input": "weather", "tools": tools, "tool_choice": choice}
    with pytest.raises(BadRequestError) as raised:
        client.post("/responses", body=body, cast_to=object)
    assert raised.value.param == param


ANTHROPIC: dict[str, Any] = {
    "model": "caller",
    "extra_body": {"temperature": 0},  # the client has no word for it any more
    "max_tokens": 100,
    "tools": [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in TOOLS
    ],
}


def test_anthropics_messages_have_calls_and_thinking(caller: Served):
    with anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0) as client:
        both: Any = {**ANTHROPIC, "messages": question("both")}
        whole = client.messages.create(**both)
        assert whole.stop_reason == "tool_use"
        calls = [(block.name, block.input) for block in whole.content if block.type == "tool_use"]
        assert calls == [("weather", json.loads(WEATHER)), ("clock", json.loads(CLOCK))]
        with client.messages.stream(**both) as stream:
            final = stream.get_final_message()
        assert [block.model_dump(exclude={"id"}) for block in final.content] == [
            block.model_dump(exclude={"id"}) for block in whole.content
        ]
        _, asked = client.messages.create(**{**both, "messages": question("weather")}).content
        result = {"type": "tool_result", "tool_use_id": asked.id, "content": "rain"}
        messages: Any = [
            *question("weather"),
            {"role": "assistant", "content": [asked.model_dump()]},
            {"role": "user", "content": [result]},
        ]
        assert (
            client.messages.create(**{**both, "messages": messages}).content[0].text == AFTER_TOOL
        )
        thinking = client.messages.create(**{**both, "messages": question("hello")}).content
        assert [block.type for block in thinking] == ["thinking", "text"]
        assert (thinking[0].thinking, thinking[1].text) == ("They greet.", "Hello!")
        broken = client.messages.create(**{**both, "messages": question("broken")})
        assert [block.text for block in broken.content] == [
            BROKEN
        ] and broken.stop_reason == "end_turn"
        schema = {"name": "clock", "input_schema": ZONE}
        choice = {"type": "tool", "name": "clock"}
        forced = client.messages.create(**{**both, "tools": [schema], "tool_choice": choice})
        assert [(block.name, block.input) for block in forced.content] == [
            ("clock", {"zone": "UTC"})
        ]
