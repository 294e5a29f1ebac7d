"""Interface of parsers of an answer's text, and the parts they return: content, reasoning, tool
calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str
    """The text."""


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str
    """The text."""


@dataclass(frozen=True)
class CallBegins:
    """Begin of a tool call; its arguments follow."""

    name: str
    """Name of the function."""


@dataclass(frozen=True)
class Arguments:
    """Further arguments of the last tool call, in JSON."""

    text: str
    """The JSON text."""


@dataclass(frozen=True)
class CallFails:
    """Notice that the last tool call is not one."""

    text: str
    """Text that the model wrote, from the beginning of the call."""


Part = Content | Reasoning | CallBegins | Arguments | CallFails


class ToolParser(ABC):
    """Incremental parser of the text of one answer.

    The sizes of the pieces only change when parts are returned. Arguments are returned as the model
    writes them. What only looks like a call, or calls an unknown function, is content; if its
    arguments had begun, there is a `CallFails`.
    """

    markers: ClassVar[tuple[str, ...]] = ()  # special tokens that the text must keep
    reads_all: ClassVar[bool] = False  # whether it reads answers without tools, too

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Begin with an empty answer.

        Args:
            schemas: JSON schemas of the arguments of functions that can be called, by name.
        """
        self._schemas = schemas or {}
        self._names = self._schemas.keys()
        self._rest = ""  # text that has not been read yet
        self._parts: list[Part] = []

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Return whether models with this chat template write calls in this format."""

    @classmethod
    def new_id(cls) -> str:
        """Return a new id of a call, which the template accepts in the tool's answer."""
        return f"call_{uuid4().hex[:24]}"

    def push(self, text: str) -> list[Part]:
        """Return the parts that further text completes."""
        self._rest += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """Return the parts that are left at the end of the text."""
        self._end()
        return self._take()

    @abstractmethod
    def _step(self) -> bool:
        """Read from the start of the remaining text, if it is long enough; return whether to try
        again.
        """

    @abstractmethod
    def _end(self) -> None:
        """Read the remaining text, although it is incomplete."""

    def _add(self, *parts: Part) -> None:
        self._parts += parts

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class JsonCalls(ToolParser):
    """Parser of calls whose arguments are JSON, so that a grammar can enforce their schema."""

    separator: ClassVar[str | None] = None
    """Text between calls; None: there is only one call."""

    @classmethod
    @abstractmethod
    def around(cls, name: str) -> tuple[str, str]:
        """Return what a model writes before and after the arguments of a call of a function."""


def num_held(text: str, markers: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may begin one of the markers."""
    longest = min(len(text), max(map(len, markers)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in markers)), 0
    )
