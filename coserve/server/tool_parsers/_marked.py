"""Parsers of answers in which a marker begins each call, with content before, between and after."""

from abc import abstractmethod
from typing import ClassVar

from coserve.server.tool_parsers._json_call import JsonCall
from coserve.server.tool_parsers.base import Content, JsonCalls, ToolParser, num_held


class MarkedCalls(ToolParser):
    """Parser of calls that begin with `_begin`, which `_step_in_call` reads.

    White space alone beside calls is not content.
    """

    _begin: ClassVar[str]
    _in_call = False
    _is_blank = True  # whether nothing but white space has come since the last call
    _num_calls = 0

    def _step(self) -> bool:
        return self._step_in_call() if self._in_call else self._step_in_content()

    def _step_in_content(self) -> bool:
        place = self._rest.find(self._begin)
        begins = place >= 0
        end = place if begins else len(self._rest) - num_held(self._rest, (self._begin,))
        text = self._rest[:end]
        if self._is_blank and not text.strip():
            if begins:
                text = ""
            else:
                end, text = 0, ""  # it may come before a call
        if text:
            self._add(Content(text))
            self._is_blank = False
        self._rest = self._rest[end:]
        if begins:
            self._rest = self._rest[len(self._begin) :]
            self._in_call = True
            self._enter()
        return begins

    def _leave(self, *, failed: bool) -> None:
        """Leave a call."""
        self._in_call = False
        self._is_blank = not failed
        self._num_calls += not failed

    @abstractmethod
    def _enter(self) -> None:
        """Enter a call, after its marker."""

    @abstractmethod
    def _step_in_call(self) -> bool:
        """Do what `_step` does, within a call."""

    @abstractmethod
    def _end_call(self) -> None:
        """Do what `_end` does, within a call."""

    def _end(self) -> None:
        if self._in_call:
            self._end_call()
        if self._rest and not (self._num_calls and self._is_blank and not self._rest.strip()):
            self._add(Content(self._rest))
        self._rest = ""


class MarkedJsonCalls(MarkedCalls, JsonCalls):
    """Parser of calls that are one JSON object each.

    `_step_after_call` reads what follows a call, up to where the next may begin.
    """

    _call: JsonCall | None = None  # None after its end

    def _enter(self) -> None:
        self._call = JsonCall(self._names, self._begin)

    def _step_in_call(self) -> bool:
        if self._call is None:
            return self._step_after_call()
        parts, self._rest = self._call.push(self._rest)
        self._add(*parts)
        if not self._call.is_complete:
            return False
        if self._call.failed:
            self._leave(failed=True)
        else:
            self._call = None
        return True

    @abstractmethod
    def _step_after_call(self) -> bool:
        """Do what `_step` does, after a call."""

    def _end_call(self) -> None:
        if self._call is not None:
            self._add(*self._call.finish())
            self._leave(failed=self._call.failed)
        else:
            self._end_after_call()
            self._leave(failed=False)

    @abstractmethod
    def _end_after_call(self) -> None:
        """Do what `_end` does, after a call."""
