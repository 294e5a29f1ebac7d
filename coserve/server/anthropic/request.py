"""Chats for bodies of /v1/messages."""

import json
from collections.abc import Sequence
from typing import Any

from coserve.server.anthropic.schemas import (
    AnthropicBlock,
    AnthropicMessage,
    CountBody,
    MessagesBody,
    ToolChoice,
)
from coserve.server.bodies.reader import body_of
from coserve.server.bodies.schemas import ChatBody, TextBody
from coserve.server.chat.request import ChatRequest, chat_request
from coserve.server.errors import ApiError
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import new_id

# Fields that have the same name and meaning in a chat.
_SAME = (
    *TextBody.model_fields,
    "chat_template_kwargs",
    "enable_thinking",
    "include_reasoning",
    "reasoning_effort",
)
# How a chat's fields are called here.
_NAMES = {"stop": "stop_sequences", "tools": "tools", "tool_choice": "tool_choice"}


async def message_request(
    body: CountBody, context: GenerationContext, tenant: str, arrival_s: float
) -> ChatRequest:
    """Return the chat that a body asks for.

    Raises:
        ApiError: A field is wrong, or the request cannot be admitted.
    """
    try:
        return await chat_request(
            _chat_body(body), context, tenant, arrival_s, id=new_id("msg", "_")
        )
    except ApiError as error:
        if error.param is not None:
            error.param = _NAMES.get(error.param, error.param)
        raise


def _chat_body(body: CountBody) -> ChatBody:
    system = (
        [] if body.system is None else [{"role": "system", "content": _text(body.system, "system")}]
    )
    messages = [
        each
        for n, message in enumerate(body.messages)
        for each in _messages(message, f"messages[{n}]")
    ]
    tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(body.tools or ())]
    same = {name: value for name in _SAME if (value := getattr(body, name, None)) is not None}
    if body.thinking is not None and body.thinking.type != "adaptive":
        same.setdefault("enable_thinking", body.thinking.type == "enabled")
    if isinstance(body, MessagesBody):
        if body.max_tokens < 1:
            raise ApiError(
                f"max_tokens must be at least 1, not {body.max_tokens}", param="max_tokens"
            )
        same |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    else:
        same["max_tokens"] = 1
    last = messages[-1] if messages else {}
    if (
        last.get("role") == "assistant"
        and (last["content"] or "").strip()
        and "tool_calls" not in last
    ):
        same |= {
            "continue_final_message": True,
            "add_generation_prompt": False,
        }  # it is the beginning of the answer
    choice = body.tool_choice
    is_parallel = getattr(body, "parallel_tool_calls", None) is not False
    if choice is not None and choice.disable_parallel_tool_use is not None:
        is_parallel = not choice.disable_parallel_tool_use
    fields = {
        "tools": tools or None,
        "tool_choice": _choice(choice),
        "parallel_tool_calls": is_parallel,
    }
    return body_of(
        ChatBody, {"model": body.model, "messages": [*system, *messages], **same, **fields}
    )


def _messages(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """Return a message as messages of a chat.

    Results of tools become messages of their own, before the user's text.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    text, thought = "", ""
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        name = f"{where}.content[{place}]"
        if block.type == "text":
            text += _required(block.text, f"{name}.text")
        elif block.type == "thinking":
            thought += block.thinking or ""
        elif block.type == "redacted_thinking":
            continue
        elif block.type == "tool_use":
            function = {
                "name": _required(block.name, f"{name}.name"),
                "arguments": json.dumps(block.input or {}),
            }
            calls.append(
                {"id": _required(block.id, f"{name}.id"), "type": "function", "function": function}
            )
        elif block.type == "tool_result":
            id = _required(block.tool_use_id, f"{name}.tool_use_id")
            content = "" if block.content is None else _text(block.content, f"{name}.content")
            results.append({"role": "tool", "tool_call_id": id, "content": content})
        else:
            raise _unsupported(block.type, name)
    answer: dict[str, Any] = {"role": message.role, "content": text}
    if calls:
        answer |= {"tool_calls": calls, "content": text or None}
    if thought:
        answer["reasoning_content"] = thought
    return results if results and not (text or calls) else [*results, answer]


def _text(content: str | Sequence[AnthropicBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for place, block in enumerate(content):
        if block.type != "text":
            raise _unsupported(block.type, f"{where}[{place}]")
    return "".join(_required(block.text, f"{where}[{n}].text") for n, block in enumerate(content))


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise _unsupported(tool.type, where)
    function = {
        "name": tool.name,
        "parameters": _required(tool.input_schema, f"{where}.input_schema"),
    }
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {
            "type": "function",
            "function": {"name": _required(choice.name, "tool_choice.name")},
        }
    return "required" if choice.type == "any" else choice.type


def _unsupported(kind: str, where: str) -> ApiError:
    message = f"{where}.type is {kind[:100]!r}, which is not supported"
    return ApiError(message, param=f"{where}.type", code="unsupported_parameter")


def _required(value: Any, where: str) -> Any:
    if value is None:
        raise ApiError(
            f"Missing required parameter: '{where}'.",
            param=where,
            code="missing_required_parameter",
        )
    return value
