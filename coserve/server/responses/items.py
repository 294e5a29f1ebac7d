"""Conversion between items of /v1/responses and messages of a chat."""

from collections.abc import Sequence
from typing import Any

from coserve.server.bodies.texts import check_texts
from coserve.server.errors import ApiError
from coserve.server.generation.generation import new_id
from coserve.server.responses.schemas import ContentPart, InputItem
from coserve.server.responses.tool_namespaces import flat_name

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def new_item_id(kind: str) -> str:
    """Return a new id for an item of a type."""
    return new_id(_PREFIXES[kind], "_")


def input_items(given: str | Sequence[InputItem], where: str = "input") -> list[dict[str, Any]]:
    """Return items in their full form, each with an id.

    Args:
        given: The input.
        where: Field of the body that it comes from.

    Raises:
        ApiError: An item is wrong, or not supported.
    """
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    return [_item(item, f"{where}[{place}]") for place, item in enumerate(items)]


def page_of(
    items: Sequence[dict[str, Any]], *, order: str, limit: int, after: str | None = None
) -> dict[str, Any]:
    """Return a page of a list of items, which is in ascending order.

    Raises:
        ApiError: `after` is not the id of an item.
    """
    items = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError(f"after names {after!r}, which does not exist", param="after")
        items = items[places[0] + 1 :]
    data = list(items[:limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > limit,
    }


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items as messages of a chat.

    Consecutive reasoning, text and calls of the assistant become one message.
    """
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            thought += _text(item.get("content") or item["summary"])
        elif kind == "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
            )
        elif kind == "function_call":
            function = {
                "name": flat_name(item.get("namespace"), item["name"]),
                "arguments": item["arguments"],
            }
            call = {"id": item["call_id"], "type": "function", "function": function}
            # Reasoning begins a message of its own, to which it is attached below.
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": item["role"], "content": _text(item["content"])})
        if thought and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    return messages


def _item(item: InputItem, where: str) -> dict[str, Any]:
    kind = item.type or "message"
    check_texts(item.model_dump(), param=where)
    if kind not in _PREFIXES:
        raise ApiError(
            f"{where}.type is {kind[:100]!r}, which is not supported: it must be one of "
            f"{', '.join(_PREFIXES)}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    full: dict[str, Any] = {"id": item.id or new_item_id(kind), "type": kind}
    if kind == "message":
        role = _required(item.role, f"{where}.role")
        shown = "output_text" if role == "assistant" else "input_text"
        return {
            **full,
            "role": role,
            "status": "completed",
            "content": _parts(item.content, shown, f"{where}.content"),
        }
    if kind == "reasoning":
        content = _parts(item.content or [], "reasoning_text", f"{where}.content")
        return {
            **full,
            "summary": _parts(item.summary or [], "summary_text", f"{where}.summary"),
            "content": content,
        }
    full |= {"call_id": _required(item.call_id, f"{where}.call_id"), "status": "completed"}
    if kind == "function_call":
        return {
            **full,
            "name": _required(item.name, f"{where}.name"),
            **({} if item.namespace is None else {"namespace": item.namespace}),
            "arguments": _required(item.arguments, f"{where}.arguments"),
        }
    output = _required(item.output, f"{where}.output")
    if isinstance(output, str):
        return {**full, "output": output}
    return {**full, "output": _parts(output, "input_text", f"{where}.output")}


def _parts(
    content: str | Sequence[ContentPart] | None, shown: str, where: str
) -> list[dict[str, Any]]:
    """Return parts of content in their full form.

    Args:
        content: The content.
        shown: Type of text parts here.
        where: Field that it comes from.
    """
    given = _required(content, where)
    if isinstance(given, str):
        return [_part(shown, given)]
    parts = []
    for place, part in enumerate(given):
        if part.type == "refusal":
            parts.append(
                {"type": "refusal", "refusal": _required(part.refusal, f"{where}[{place}].refusal")}
            )
        elif part.type in _TEXTS:
            parts.append(_part(shown, _required(part.text, f"{where}[{place}].text")))
        else:
            raise ApiError(
                f"{where}[{place}].type is {part.type[:100]!r}, which is not supported: this model "
                f"reads only text",
                param=f"{where}[{place}].type",
                code="unsupported_parameter",
            )
    return parts


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        part["refusal"] if part["type"] == "refusal" else part["text"] for part in content
    )


def _required(value: Any, where: str) -> Any:
    if value is None:
        raise ApiError(
            f"Missing required parameter: '{where}'.",
            param=where,
            code="missing_required_parameter",
        )
    return value
