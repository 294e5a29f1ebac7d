"""/v1/responses with the real client."""

import json
import time
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError
from pydantic import BaseModel
from served import Served, chat_tokens

SETTINGS: dict[str, Any] = {"model": "small", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture
def served(either_server: Served) -> Served:
    return either_server


class Pet(BaseModel):
    is_cat: bool


def chat_text(client: Any, messages: list[Any], max_tokens: int = 12) -> str:
    answer = client.chat.completions.create(
        model="small", temperature=0, max_tokens=max_tokens, messages=messages
    )
    return answer.choices[0].message.content


def test_one_is_created_kept_and_deleted(client: Any):
    made = client.responses.create(**SETTINGS, input="hello", metadata={"k": "v"})
    assert made.id.startswith("resp_")
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert made.output_text == chat_text(client, [{"role": "user", "content": "hello"}])
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(chat_tokens("hello")), 12)
    found = client.responses.retrieve(made.id)
    assert found == made
    assert found.metadata == {"k": "v"}
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(NotFoundError, match="not found"):
            ask(made.id)


def test_one_that_is_not_stored_cannot_be_found(client: Any):
    made = client.responses.create(**SETTINGS, input="hello", store=False)
    assert made.output_text
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(NotFoundError):
        client.responses.create(**SETTINGS, input="hello", previous_response_id=made.id)


def test_a_stream_says_the_same_by_openais_events(client: Any):
    whole = client.responses.create(**SETTINGS, input="hello")
    events = list(client.responses.create(**SETTINGS, input="hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    begin, end = (
        ["created", "in_progress", "output_item.added", "content_part.added"],
        [*("output_text.done", "content_part.done", "output_item.done", "incomplete")],
    )
    assert kinds[:4] == begin and kinds[-4:] == end
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == whole.output_text
    )
    assert events[-1].response.output_text == whole.output_text
    assert client.responses.retrieve(events[0].response.id) == events[-1].response


def test_a_conversation_follows_from_the_last_response(client: Any):
    first = client.responses.create(**SETTINGS, input="hello", instructions="Be brief.")
    second = client.responses.create(**SETTINGS, input="and you?", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and you?"},
    ]
    assert second.output_text == chat_text(client, messages), (
        "instructions are those of one response alone"
    )
    assert first.output_text == chat_text(
        client, [{"role": "system", "content": "Be brief."}, messages[0]]
    )
    items: list[Any] = [
        {"role": "user", "content": "hello"},
        *first.output,
        {"role": "user", "content": "and you?"},
    ]
    third = client.responses.create(**SETTINGS, input=items)
    assert third.output_text == second.output_text, "output items go back as they are"
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError, match=first.id) as raised:
        client.responses.create(**SETTINGS, input="now?", previous_response_id=second.id)
    assert raised.value.code == "previous_response_not_found"


def test_input_items_come_in_pages(client: Any):
    texts = ["a", "b", "c"]
    made = client.responses.create(
        **SETTINGS, input=[{"role": "user", "content": text} for text in texts]
    )
    items = list(client.responses.input_items.list(made.id, limit=2, order="asc"))
    assert [item.content[0].text for item in items] == texts
    [newest] = client.responses.input_items.list(made.id, limit=1).data
    assert newest.id == items[-1].id


def test_input_tokens_are_counted(client: Any, served: Served):
    assert client.responses.input_tokens.count(model="small", input="hello").input_tokens == len(
        chat_tokens("hello")
    )


def test_the_text_follows_a_schema(client: Any):
    parsed = client.responses.parse(
        model="small", input="a cat", max_output_tokens=200, text_format=Pet
    )
    assert isinstance(parsed.output_parsed, Pet)
    with client.responses.stream(
        model="small", input="a cat", max_output_tokens=200, text_format=Pet
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Pet)
    found = client.responses.create(
        model="small",
        input="a cat",
        max_output_tokens=200,
        text={"format": {"type": "json_object"}},
    )
    assert found.output_text.startswith("{")


def test_logprobs_of_the_text(client: Any):
    made = client.responses.create(
        **SETTINGS, input="hello", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = made.output[0].content[0]
    assert len(part.logprobs) == 12
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


def wait_for(client: Any, id: str) -> Any:
    until_s = time.monotonic() + 60
    while (found := client.responses.retrieve(id)).status in ("queued", "in_progress"):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return found


def test_one_runs_in_the_background(client: Any):
    made = client.responses.create(**SETTINGS, input="hello", background=True)
    assert made.status in ("queued", "in_progress") and made.background
    done = wait_for(client, made.id)
    assert done.output_text == client.responses.create(**SETTINGS, input="hello").output_text
    assert client.responses.cancel(made.id).status == done.status, "it is over"


def test_one_in_the_background_is_streamed_and_cancelled(client: Any):
    settings = {**SETTINGS, "max_output_tokens": 400}
    with client.responses.create(**settings, input="hello", background=True, stream=True) as stream:
        events = iter(stream)
        first = next(events)
        assert first.type == "response.queued"
        while next(events).type != "response.output_text.delta":
            pass
    id = first.response.id
    again = (
        list(client.responses.retrieve(id, stream=True, starting_after=0))
        if is_live(client, id)
        else []
    )
    assert not again or again[0].sequence_number == 1, "the client that went away did not end it"
    other = client.responses.create(**settings, input="hello", background=True)
    ended = client.responses.cancel(other.id)
    assert ended.status in ("cancelled", "incomplete", "completed")
    assert client.responses.retrieve(other.id) == ended
    with pytest.raises(BadRequestError, match="has ended"):
        client.responses.retrieve(other.id, stream=True)


def is_live(client: Any, id: str) -> bool:
    return client.responses.retrieve(id).status == "in_progress"


def test_what_was_not_in_the_background_cannot_be_cancelled(client: Any):
    made = client.responses.create(**SETTINGS, input="hello")
    with pytest.raises(BadRequestError, match="synchronous"):
        client.responses.cancel(made.id)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x" * 100_000}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}, "previous_response_id": "resp_1"}, "conversation"),
        ({"truncation": "never"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"temprature": 1}, "temprature"),
        ({"model": "none"}, "model"),
        ({"previous_response_id": "resp_\0"}, "previous_response_id"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_is_wrong_is_named(client: Any, more: dict[str, Any], param: str):
    with pytest.raises(APIStatusError) as raised:
        client.post("/responses", body={**SETTINGS, "input": "hello", **more}, cast_to=object)
    assert raised.value.status_code in (400, 404)
    assert raised.value.param == param


def test_what_is_too_long_loses_its_oldest_turns(client: Any):
    """The small model has room for 512 tokens."""
    system, last = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "and you?"},
    )
    turns = [{"role": "user", "content": f"{n} {'a b ' * 40}"} for n in range(8)]
    items: list[Any] = [system, *turns, last]
    with pytest.raises(BadRequestError) as raised:
        client.responses.create(**SETTINGS, input=items)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")
    made = client.responses.create(**SETTINGS, input=items, truncation="auto")
    assert made.truncation == "auto"
    rests = [[system, *turns[first:], last] for first in range(1, 9)]
    fits = next(
        rest
        for rest in rests
        if sum(len(chat_tokens(each["content"])) for each in rest) + 12 <= 512
    )
    assert made.output_text == chat_text(client, fits)
    with pytest.raises(BadRequestError, match="context length"):
        client.responses.create(**SETTINGS, input="a b " * 300, truncation="auto")


def test_a_stream_ends_without_a_marker_and_names_its_events(served: Served):
    """Clients of other languages read the names of events."""
    with httpx.stream(
        "POST",
        f"{served.url}/v1/responses",
        json={**SETTINGS, "input": "hello", "stream": True},
        timeout=60,
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {each['type']}" for each in data]
