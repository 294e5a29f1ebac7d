"""Output of /v1/responses: its items, and the events about them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coserve.server.responses.items import new_item_id
from coserve.server.tool_parsers.base import (
    Arguments,
    CallBegins,
    CallFails,
    Content,
    Part,
    Reasoning,
)

Event = dict[str, Any]


class ResponseOutput:
    """Builder of the output from the parts of an answer.

    A tool call that turns out to be invalid is removed, and its text becomes a message.
    """

    def __init__(self, apart: Mapping[str, dict[str, str]]) -> None:
        """Begin with an empty output.

        Args:
            apart: Names of functions in namespaces; see `tool_namespaces.apart`.
        """
        self._apart = apart
        self._items: list[dict[str, Any]] = []
        self._dropped: set[int] = set()

    @property
    def items(self) -> list[dict[str, Any]]:
        """Items of the response, including an unfinished one."""
        return [item for place, item in enumerate(self._items) if place not in self._dropped]

    def take(self, part: Part, call_id: str, logprobs: Sequence[Any]) -> Iterator[Event]:
        """Yield the events of a part.

        Args:
            part: The part.
            call_id: Id of a call, if the part begins one.
            logprobs: Log-probabilities, if the part is content.
        """
        if isinstance(part, CallBegins):
            yield from self.close()
            names = self._apart.get(part.name, {"name": part.name})
            yield from self._open("function_call", {"call_id": call_id, **names, "arguments": ""})
        elif isinstance(part, Arguments):
            item = self._items[-1]
            item["arguments"] += part.text
            yield self._event("response.function_call_arguments.delta", delta=part.text)
        elif isinstance(part, CallFails):
            yield from self.close("incomplete")
            # Its events have been sent: the item keeps its place, and only leaves the output.
            self._dropped.add(len(self._items) - 1)
            yield from self.take(Content(part.text), call_id, logprobs)
        elif isinstance(part, Reasoning):
            yield from self._into(
                "reasoning", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""}
            )
            yield self._text("response.reasoning_text.delta", part.text)
        else:
            assert isinstance(part, Content)
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._into("message", {"role": "assistant", "content": []}, empty)
            self._items[-1]["content"][0]["logprobs"] += logprobs
            yield self._text("response.output_text.delta", part.text, logprobs=list(logprobs))

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Yield the events that end the current item, if there is one."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
            )
        else:
            part = item["content"][0]
            if item["type"] == "message":
                yield self._event(
                    "response.output_text.done",
                    content_index=0,
                    text=part["text"],
                    logprobs=part["logprobs"],
                )
            else:
                yield self._event(
                    "response.reasoning_text.done", content_index=0, text=part["text"]
                )
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        yield {
            "type": "response.output_item.done",
            "output_index": len(self._items) - 1,
            "item": _copy(item),
        }

    def _into(self, kind: str, fields: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
        """Yield the events that begin an item of a type, with one part of content, unless it is
        open.
        """
        if (
            self._items
            and self._items[-1]["type"] == kind
            and self._items[-1]["status"] == "in_progress"
        ):
            return
        yield from self.close()
        yield from self._open(kind, fields)
        self._items[-1]["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        item = {"id": new_item_id(kind), "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        yield {
            "type": "response.output_item.added",
            "output_index": len(self._items) - 1,
            "item": _copy(item),
        }

    def _text(self, type: str, text: str, **more: Any) -> Event:
        self._items[-1]["content"][0]["text"] += text
        return self._event(type, content_index=0, delta=text, **more)

    def _event(self, type: str, **fields: Any) -> Event:
        return {
            "type": type,
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            **fields,
        }


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an item, which may still change."""
    copy = dict(item)
    for name, value in item.items():
        if isinstance(value, list):
            copy[name] = [dict(part) for part in value]
    return copy
