"""Reasoning before an answer: `<think>…</think>`, as DeepSeek R1, Qwen 3 and others write it."""

from coserve.server.tool_parsers.base import Content, Part, Reasoning, num_held

BEGIN, END = "<think>", "</think>"


def begins_inside(prompt_end: str, continued: str = "") -> bool:
    """Return whether an answer begins within reasoning.

    Args:
        prompt_end: End of the prompt's text, in which some chat templates open the reasoning.
        continued: Message that the answer continues.
    """
    if continued:
        return continued.rfind(BEGIN) > continued.rfind(END)
    return prompt_end.rstrip().endswith(BEGIN)


def may_begin(prompt_end: str, continued: str, template: str) -> bool:
    """Return whether an answer may open a reasoning itself.

    It may if the model writes reasoning and the prompt has not closed it already.
    """
    return (
        BEGIN in template
        and not continued.strip()
        and not prompt_end.rstrip().endswith((BEGIN, END))
    )


class ThinkReader:
    """Incremental reader of reasoning in the text of one answer.

    Only the beginning of an answer can be reasoning; line breaks around it are dropped.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._rest = ""
        self._inside = inside
        self._outside = False  # only content follows
        self._is_fresh = True  # nothing of the reasoning, or of the content after it, was passed on

    @property
    def is_inside(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._inside

    def push(self, text: str) -> list[Part]:
        """Return the parts that further text completes."""
        if self._outside and not self._is_fresh:
            return [Content(text)] if text else []
        self._rest += text
        parts: list[Part] = []
        if not self._inside and not self._outside:
            self._begin()
        if self._inside:
            parts += self._reasoning()
        if self._outside:
            parts += self._content()
        return parts

    def finish(self) -> list[Part]:
        """Return the parts that are left at the end of the text."""
        rest, self._rest = self._rest, ""
        if self._inside:
            rest = rest.rstrip("\n")
            return [Reasoning(rest)] if rest else []
        return [Content(rest)] if rest and not self._outside else []

    def _begin(self) -> None:
        text = self._rest.lstrip()
        if text.startswith(BEGIN):
            self._inside, self._rest = True, text[len(BEGIN) :]
        # Neither the marker nor the beginning of one: the answer has no reasoning.
        elif not BEGIN.startswith(text):
            self._outside, self._is_fresh = True, False

    def _reasoning(self) -> list[Part]:
        if self._is_fresh:
            self._rest = self._rest.lstrip("\n")
        text, end, after = self._rest.partition(END)
        if not end:
            # Hold back what may be the beginning of the end marker.
            text = text[: len(text) - num_held(text, (END,))]
        # Line breaks wait for what follows: before the end marker they are dropped.
        shown = text.rstrip("\n")
        self._rest = self._rest[len(shown) :]
        self._is_fresh = self._is_fresh and not shown
        if end:
            self._inside, self._outside, self._is_fresh, self._rest = False, True, True, after
        return [Reasoning(shown)] if shown else []

    def _content(self) -> list[Part]:
        text = self._rest.lstrip("\n") if self._is_fresh else self._rest
        self._rest = ""
        self._is_fresh = self._is_fresh and not text
        return [Content(text)] if text else []
