"""A tokenizer's chat template: conversations to text, for training and for requests alike."""

import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from coserve.errors import DataError
from coserve.tuning.template_messages import message_form, template_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# transformers keeps each template once compiled, with the marks that it notes while it renders.
# This makes a template of our own, so that requests that are rendered meanwhile note nothing there.
# The line end after a comment is not written.
_OURS = "{# of training #}\n"
_one_at_a_time = Lock()

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def source(self, tools: Any = None) -> str:
        """Return the template's text, of several that for tools if there are any; DataError if
        there is none.
        """
        try:
            template: str = self._tokenizer.get_chat_template(None, tools)
        except ValueError as error:  # there is none, or none of this name
            raise _refused(error) from None
        return template

    def is_marked(self, tools: Any = None) -> bool:
        """Return whether the template marks what the assistant writes with `{% generation %}`."""
        return _MARK.search(self.source(tools)) is not None

    def render(self, messages: Messages, given: Mapping[str, Any], *, strict: bool = True) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages of OpenAI's format.
            given: Everything else that the template gets: tools, its variables,
                add_generation_prompt.
            strict: See `template_message`.

        Raises:
            DataError: The messages are wrong, or the template refuses them.
        """
        plain = self._plain(messages, given, strict=strict)
        try:
            if any(message["content"] is None for message in plain):
                return self._rendered(plain, given)[
                    0
                ]  # transformers' method leaves null fields out
            text: str = self._tokenizer.apply_chat_template(plain, tokenize=False, **given)
        except Exception as error:  # templates raise any kind
            raise _refused(error) from error
        return text

    def marked(
        self, messages: Messages, given: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where each of its marked parts begins and ends; DataError as
        `render`.
        """
        plain = self._plain(messages, given, strict=True)
        try:
            with _one_at_a_time:
                return self._rendered(plain, given, return_assistant_tokens_mask=True)
        except Exception as error:  # templates raise any kind
            raise _refused(error) from error

    def _plain(
        self, messages: Messages, given: Mapping[str, Any], *, strict: bool
    ) -> list[dict[str, Any]]:
        form = message_form(self.source(given.get("tools")))
        return [template_message(message, form, strict=strict) for message in messages]

    def _rendered(
        self, plain: list[dict[str, Any]], given: Mapping[str, Any], **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), marks = render_jinja_template(
            conversations=[plain],
            chat_template=(_OURS if options else "") + self.source(given.get("tools")),
            **options,
            **{**self._tokenizer.special_tokens_map, **given},
        )
        return text, marks[0] if marks else []


def _refused(error: Exception) -> DataError:
    return DataError(f"the chat template refuses the messages: {' '.join(str(error).split())}")
