"""/v1/messages with Anthropic's real client, and /v1/chat/completions/batch."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from served import Served, chat_tokens

from coserve.server.http.deadline import DeadlineMiddleware

CHAT: Any = {"model": "small", "temperature": 0, "max_tokens": 12}
# The client has no word for a temperature any more.
SETTINGS: Any = {"model": "small", "max_tokens": 12, "extra_body": {"temperature": 0}}
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as found:
        yield found


def chat(served: Served, messages: list[Any], **more: Any) -> Any:
    return served.client().chat.completions.create(**{**CHAT, "messages": messages, **more})


def test_an_answer_is_that_of_the_chat(client: Any, served: Served):
    found = client.messages.create(**SETTINGS, messages=HELLO)
    assert (found.type, found.role, found.stop_reason) == ("message", "assistant", "max_tokens")
    assert [block.text for block in found.content] == [
        chat(served, HELLO).choices[0].message.content
    ]
    counted = found.usage.input_tokens + found.usage.cache_read_input_tokens
    assert (counted, found.usage.output_tokens) == (len(chat_tokens("hello")), 12)
    assert client.messages.count_tokens(model="small", messages=HELLO).input_tokens == len(
        chat_tokens("hello")
    )


def test_system_and_blocks(client: Any, served: Served):
    blocks = [
        {"type": "text", "text": "hel"},
        {"type": "text", "text": "lo", "cache_control": {"type": "ephemeral"}},
    ]
    found = client.messages.create(
        **SETTINGS,
        system="Be brief.",
        messages=[{"role": "user", "content": blocks}],
        metadata={"user_id": "x"},
    )
    same = chat(served, [{"role": "system", "content": "Be brief."}, *HELLO])
    assert found.content[0].text == same.choices[0].message.content


def test_a_stream_says_the_same(client: Any):
    whole = client.messages.create(**SETTINGS, messages=HELLO)
    with client.messages.stream(**SETTINGS, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_an_answer_continues_what_it_is_given_to_begin_with(client: Any, served: Served):
    begun = [*HELLO, {"role": "assistant", "content": "The sky"}]
    found = client.messages.create(**SETTINGS, messages=begun)
    more = {"continue_final_message": True, "add_generation_prompt": False}
    expected = chat(served, begun, extra_body=more)
    assert found.content[0].text == expected.choices[0].message.content
    assert found.usage.input_tokens == expected.usage.prompt_tokens
    assert found.content[0].text != chat(served, begun).choices[0].message.content, (
        "the beginning of another message"
    )


def test_it_stops_where_it_is_asked_to(client: Any):
    text = client.messages.create(**SETTINGS, messages=HELLO).content[0].text
    stop = next(each for each in text if each.isalnum())
    found = client.messages.create(**SETTINGS, messages=HELLO, stop_sequences=[stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"extra_body": {"temperature": 9}}, "temperature"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_is_wrong_is_said_as_anthropic_does(client: Any, more: dict[str, Any], words: str):
    with pytest.raises(anthropic.BadRequestError, match=words) as raised:
        client.messages.create(**{**SETTINGS, "messages": HELLO, **more})
    body: Any = raised.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**SETTINGS, "model": "none", "messages": HELLO})


@pytest.mark.parametrize("has_begun", [True, False])
def test_what_takes_too_long_is_an_error_to_anthropics_client(has_begun: bool):
    """Also in the middle of a stream, where it passes over events without a name."""

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(
                {
                    "type": "http.response.body",
                    "body": b"event: ping\ndata: {}\n\n",
                    "more_body": True,
                }
            )
        await asyncio.Event().wait()

    async def ask() -> Any:
        transport = httpx2.ASGITransport(DeadlineMiddleware(endless, timeout_s=0.1))
        async with anthropic.AsyncAnthropic(
            api_key="none", max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
        ) as client:
            stream = await client.messages.create(**SETTINGS, messages=HELLO, stream=True)
            return [event async for event in stream]

    with pytest.raises(anthropic.APIStatusError, match="--request-timeout") as raised:
        asyncio.run(ask())
    body: Any = raised.value.body
    assert body["type"] == "error"


def test_several_chats_at_once(served: Served):
    chats = [HELLO, [{"role": "user", "content": "and you?"}]]
    answer = served.post("/v1/chat/completions/batch", json={**CHAT, "messages": chats})
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    alone = [chat(served, each) for each in chats]
    assert [choice["message"]["content"] for choice in choices] == [
        each.choices[0].message.content for each in alone
    ]
    assert answer.json()["usage"]["total_tokens"] == sum(each.usage.total_tokens for each in alone)
    for more, param in (
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"messages": [HELLO, []]}, "messages[1]"),
    ):
        wrong = served.post("/v1/chat/completions/batch", json={**CHAT, "messages": chats, **more})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
