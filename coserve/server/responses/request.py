"""Chats for bodies of /v1/responses."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from coserve.server.bodies.reader import body_of
from coserve.server.bodies.schemas import ChatBody, SamplingBody
from coserve.server.bodies.texts import check_texts
from coserve.server.chat.request import ChatRequest, chat_request
from coserve.server.errors import ApiError
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import new_id
from coserve.server.responses.items import messages_of
from coserve.server.responses.schemas import ReasoningBody, ResponseBody, TextFormat
from coserve.server.responses.tool_namespaces import choice_of, functions_of

_NOT_THERE = ("prompt", "context_management", "moderation", "n", "max_tokens", "response_format")
_INSTEAD = {
    "max_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "n": "a response has one answer",
}
# How a chat's fields are called here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_NO_FIELDS_OF_CHATS = (*_NOT_THERE, "stream", "stream_options", "metadata")
_MAX_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


async def response_request(
    body: ResponseBody,
    items: Sequence[dict[str, Any]],
    context: GenerationContext,
    tenant: str,
    arrival_s: float,
) -> ChatRequest:
    """Return the chat that a body asks for.

    Args:
        body: The body.
        items: The conversation with its new items; if truncation is allowed, as much of its end as
            fits.
        context: Parts of the server.
        tenant: Tenant that asks.
        arrival_s: Time of arrival, by the engine's clock.

    Raises:
        ApiError: A field is wrong, or the request cannot be admitted.
    """
    _refuse_what_is_not_there(body)

    async def asked(kept: Sequence[dict[str, Any]]) -> ChatRequest:
        return await chat_request(
            _chat_body(body, kept), context, tenant, arrival_s, id=new_id("resp", "_")
        )

    try:
        return await (
            _longest_that_fits(asked, items) if body.truncation == "auto" else asked(items)
        )
    except ApiError as error:
        head, dot, rest = (error.param or "").partition(".")
        if (place := head.partition("[")[0]) in _NAMES:
            # The item that a message was made of is not known.
            is_whole = head == place
            error.param = _NAMES[place] + (dot + rest if is_whole else "")
        raise


async def _longest_that_fits(
    asked: Callable[[Sequence[dict[str, Any]]], Awaitable[ChatRequest]],
    items: Sequence[dict[str, Any]],
) -> ChatRequest:
    """Leave out as few items as possible, from the beginning up to a user's message.

    Messages of the system stay.
    """
    places = [place for place, item in enumerate(items) if place and item.get("role") == "user"]
    longest, wrong = await _if_it_fits(asked, items)
    # Binary search for the first place from which the conversation fits; none if all of it does.
    first, last = 0, len(places) if longest is None else 0
    while first < last:
        middle = (first + last) // 2
        said = [
            item for item in items[: places[middle]] if item.get("role") in ("system", "developer")
        ]
        request, error = await _if_it_fits(asked, [*said, *items[places[middle] :]])
        if request is None:
            wrong, first = error, middle + 1
        else:
            longest, last = request, middle
    if longest is None:
        assert wrong is not None
        raise wrong
    return longest


async def _if_it_fits(
    asked: Callable[[Sequence[dict[str, Any]]], Awaitable[ChatRequest]],
    items: Sequence[dict[str, Any]],
) -> tuple[ChatRequest | None, ApiError | None]:
    """Return the chat, or the error if it is too long."""
    try:
        return await asked(items), None
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return None, error


def _refuse_what_is_not_there(body: ResponseBody) -> None:
    for name in _NOT_THERE:
        if getattr(body, name) not in (None, [], {}, *((1,) if name == "n" else ())):
            hint = _INSTEAD.get(name, "leave it out")
            raise ApiError(
                f"{name} is not supported: {hint}", param=name, code="unsupported_parameter"
            )
    if body.background and body.store is False:
        raise ApiError("background can only be used when `store` is true", param="background")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise ApiError(
            f"max_output_tokens must be at least 1, not {body.max_output_tokens}",
            param="max_output_tokens",
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    check_metadata(body.metadata)


def check_metadata(metadata: dict[str, Any] | None) -> None:
    """Check metadata against OpenAI's limits.

    Raises:
        ApiError: It exceeds them.
    """
    if metadata is None:
        return
    check_texts(metadata, param="metadata")
    is_short = all(
        isinstance(value, str) and len(key) <= _LONGEST_KEY and len(value) <= _LONGEST_VALUE
        for key, value in metadata.items()
    )
    if len(metadata) > _MAX_METADATA or not is_short:
        raise ApiError(
            f"metadata must have at most {_MAX_METADATA} entries, of strings of {_LONGEST_KEY} "
            f"and {_LONGEST_VALUE} characters at most",
            param="metadata",
        )


def _chat_body(body: ResponseBody, items: Sequence[dict[str, Any]]) -> ChatBody:
    same = {
        name: value
        for name in SamplingBody.model_fields
        if name not in _NO_FIELDS_OF_CHATS and (value := getattr(body, name)) is not None
    }
    instructions = (
        [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    )
    with_logprobs = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not with_logprobs:
        raise ApiError(
            'top_logprobs needs include to contain "message.output_text.logprobs"',
            param="top_logprobs",
        )
    reasoning = body.reasoning or ReasoningBody()
    more: dict[str, Any] = {
        "messages": [*instructions, *messages_of(items)],
        "max_completion_tokens": body.max_output_tokens,
        "tools": functions_of(body.tools) or None,
        "tool_choice": choice_of(body.tool_choice, body.tools),
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": with_logprobs,
        "top_logprobs": (body.top_logprobs or 0) if with_logprobs else None,
        "reasoning_effort": body.reasoning_effort if reasoning.effort is None else reasoning.effort,
        "enable_thinking": body.enable_thinking if reasoning.enabled is None else reasoning.enabled,
        "include_reasoning": False if reasoning.exclude else body.include_reasoning,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": None
        if body.text is None or body.text.format is None
        else _format(body.text.format),
    }
    return body_of(ChatBody, {**same, **more})


def _format(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    fields = {"name": asked.name, "schema": asked.schema_, "strict": asked.strict}
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in fields.items() if value is not None},
    }
