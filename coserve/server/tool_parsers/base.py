"""What a parser makes of an answer's text as it comes: content, reasoning, and calls of tools."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text from before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of the function of this name; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of the last call, in JSON."""

    text: str


@dataclass(frozen=True)
class CallFails:
    """The last call turned out to be none. text: what the model wrote, from where the call
    began.
    """

    text: str


Part = Content | Reasoning | CallBegins | Arguments | CallFails


class ToolParser(ABC):
    """Reads the text of one answer, in pieces of any size, which change nothing but when the parts
    come.

    Arguments come as the model writes them. What only looked like a call, or calls a function that
    is not there, is content; if its arguments had begun to come, `CallFails` says so.
    """

    markers: ClassVar[tuple[str, ...]] = ()  # special tokens that it must see
    reads_all: ClassVar[bool] = False  # also answers to requests without tools

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """schemas: of the arguments of each function that can be called."""
        self._schemas = schemas or {}
        self._names = self._schemas.keys()
        self._rest = ""  # text that has not been read yet
        self._parts: list[Part] = []

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Whether models with this chat template write their calls so."""

    @classmethod
    def new_id(cls) -> str:
        """For a call: one that the template takes back with the tool's answer."""
        return f"call_{uuid4().hex[:24]}"

    def push(self, text: str) -> list[Part]:
        """What the next piece of text adds."""
        self._rest += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """What is left when no more text comes."""
        self._end()
        return self._take()

    @abstractmethod
    def _step(self) -> bool:
        """Read from the start of the text that is left, if enough of it is there; whether to try
        again.
        """

    @abstractmethod
    def _end(self) -> None:
        """Read what is left, though it is not complete."""

    def _add(self, *parts: Part) -> None:
        self._parts += parts

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class JsonCalls(ToolParser):
    """Of calls whose arguments are written as JSON, so that a grammar can follow their schema."""

    separator: ClassVar[str | None] = (
        None  # what lies between two calls; None: an answer has one at most
    )

    @classmethod
    @abstractmethod
    def around(cls, name: str) -> tuple[str, str]:
        """What a model writes before the arguments of a call of this function, and after them."""


def num_held(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of a text that could be the start of one of the markers."""
    longest = min(len(text), max(map(len, markers)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in markers)), 0
    )
