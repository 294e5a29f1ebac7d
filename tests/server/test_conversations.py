"""/v1/conversations with the real client."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError

SETTINGS: dict[str, Any] = {"model": "small", "temperature": 0, "max_output_tokens": 8}
HELLO: dict[str, Any] = {"type": "message", "role": "user", "content": "hello"}


@pytest.fixture
def conversation(client: Any) -> Iterator[str]:
    made = client.conversations.create(items=[HELLO], metadata={"topic": "greetings"})
    yield made.id
    client.delete(f"/conversations/{made.id}", cast_to=httpx.Response)


def said(client: Any, id: str) -> list[tuple[str, str]]:
    return [
        (item.role, item.content[0].text)
        for item in client.conversations.items.list(id, order="asc")
    ]


def test_one_is_created_changed_and_deleted(client: Any):
    made = client.conversations.create(metadata={"topic": "none"})
    assert (made.object, made.metadata) == ("conversation", {"topic": "none"})
    changed = client.conversations.update(made.id, metadata={"topic": "greetings"})
    assert client.conversations.retrieve(made.id) == changed
    assert changed.metadata == {"topic": "greetings"} and changed.created_at == made.created_at
    gone = client.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for ask in (
        client.conversations.retrieve,
        client.conversations.delete,
        client.conversations.items.list,
    ):
        with pytest.raises(NotFoundError, match=made.id):
            ask(made.id)


def test_items_are_added_listed_in_pages_and_deleted(client: Any, conversation: str):
    items = client.conversations.items
    added = items.create(
        conversation, items=[{**HELLO, "content": text} for text in ("one", "two")]
    )
    assert [item.content[0].text for item in added.data] == ["one", "two"] and not added.has_more
    assert said(client, conversation) == [("user", text) for text in ("hello", "one", "two")]
    newest = items.list(conversation, limit=2)
    assert [item.id for item in newest.data] == [
        item.id for item in reversed(added.data)
    ] and newest.has_more
    assert [item.content[0].text for item in items.list(conversation, after=newest.last_id)] == [
        "hello"
    ]
    found = items.retrieve(added.first_id, conversation_id=conversation)
    assert found == added.data[0]
    assert items.delete(added.first_id, conversation_id=conversation).id == conversation
    assert said(client, conversation) == [("user", "hello"), ("user", "two")]
    for ask in (items.retrieve, items.delete):
        with pytest.raises(NotFoundError, match=added.first_id):
            ask(added.first_id, conversation_id=conversation)
    with pytest.raises(BadRequestError, match=added.last_id):
        items.create(conversation, items=[{**HELLO, "id": added.last_id}])


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_follows_it_and_is_added_to_it(client: Any, conversation: str, is_stream: bool):
    settings: dict[str, Any] = {**SETTINGS, "store": False}
    first = client.responses.create(
        **settings, conversation=conversation, input="and you?", stream=is_stream
    )
    if is_stream:
        first = list(first)[-1].response
    assert first.conversation.id == conversation
    plain = client.responses.create(**settings, input=[HELLO, {**HELLO, "content": "and you?"}])
    assert first.output_text == plain.output_text and plain.conversation is None
    talk = [("user", "hello"), ("user", "and you?"), ("assistant", first.output_text)]
    assert said(client, conversation) == talk
    counted = client.responses.input_tokens.count(
        model="small", conversation=conversation, input="now?"
    )
    second = client.responses.create(**settings, conversation={"id": conversation}, input="now?")
    assert second.usage.input_tokens == counted.input_tokens
    assert said(client, conversation) == [
        *talk,
        ("user", "now?"),
        ("assistant", second.output_text),
    ]


def test_what_came_to_no_good_end_is_not_added(client: Any, conversation: str):
    with pytest.raises(NotFoundError):
        client.responses.create(
            **{**SETTINGS, "model": "none"}, conversation=conversation, input="and you?"
        )
    assert said(client, conversation) == [("user", "hello")]


def test_what_is_wrong_is_named(client: Any, conversation: str):
    [there] = client.conversations.items.list(conversation)
    wrong = [
        ("/conversations", {"items": [{"role": "user"}]}, "items[0].content"),
        ("/conversations", {"items": [{**HELLO, "id": "msg_1"}] * 2}, "items"),
        ("/conversations", {"items": [HELLO] * 21}, "items"),
        ("/conversations", {"metadata": {"k": 1}}, "metadata"),
        (f"/conversations/{conversation}/items", {"items": []}, "items"),
        ("/conversations/conv_1", {"metadata": {}}, "conversation_id"),
        (
            "/responses",
            {**SETTINGS, "conversation": conversation, "input": [{**HELLO, "id": there.id}]},
            "input",
        ),
    ]
    for path, body, param in wrong:
        with pytest.raises(APIStatusError) as raised:
            client.post(path, body=body, cast_to=object)
        assert raised.value.param == param, raised.value
