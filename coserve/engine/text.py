"""Incremental decoding: from a request's tokens to the text that can be shown now, up to a stop
string.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Character that decoders write for bytes that are no character, or not one yet.
_REPLACEMENT = "\ufffd"
# UTF-8 has at most four bytes in a character, and a token at least one.
_MAX_UNFINISHED = 3
# Prompt tokens that decide how the first token of the output reads (a space before it or not).
_NUM_CONTEXT = 6


class TextStream:
    """The text of one request, token by token.

    The pieces that `push` and `finish` return make up the tokenizer's text for prompt and output
    (its spaces as they are, without the clean-up before punctuation) less that for the prompt.
    Bytes that are no UTF-8 become replacement characters; how many depends on the decoder.

    A token's text depends on its neighbours: byte-level tokens may be parts of a character, and
    sentencepiece's decoders drop the space before a first word. So a few tokens are decoded anew
    for each: those of the last piece and all since, and the new text is what they have beyond the
    last piece's alone.
    """

    stopped: str | None = None  # the stop string that was hit; the text ends before it

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompt_tokens: Sequence[int],
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        shown_tokens: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        """Begin after a prompt.

        Args:
            tokenizer: A fast tokenizer.
            prompt_tokens: Tokens that the output continues.
            stop: Strings that end the text; of several, the one that is complete first (then the
                longest) does, however the text is cut into tokens.
            skip_special_tokens: Whether special tokens have no text, except for shown_tokens.
            include_stop: Whether the text ends after the stop string, not before it.
        """
        self._tokenizer = tokenizer
        self._silent = (
            {
                token
                for token, added in tokenizer.added_tokens_decoder.items()
                if added.special and added.content not in shown_tokens
            }
            if skip_special_tokens
            else set()
        )
        self._window = self._context(prompt_tokens)
        self._num_read = len(self._window)  # tokens of the window whose text is settled
        # Characters of the window's text that are settled.
        self._num_settled = len(self._decode(self._window))
        self._stop, self._include_stop = stop, include_stop
        self._held = ""  # settled, but perhaps the start of a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Return all text so far."""
        return "".join(self._pieces)

    def push(self, token: int, may_stop: bool = True) -> str:
        """Return the text that can be shown after the next token; not to be called after a stop
        string was hit.

        It is never a part of a character, nor what could be the start of a stop string.

        Args:
            may_stop: Whether stop strings count in the text that this token completes (and in what
                was held back before); if not, a later match lies wholly after it.
        """
        return self._show(self._settle(token), may_stop)

    def finish(self) -> str:
        """Return the text that was held back, when no more tokens come.

        The end of a text may be the start of a stop string, or of a character: then it ends in
        replacement characters.
        """
        if self.stopped is not None:
            return ""
        rest = self._held + self._decode(self._window)[self._num_settled :]
        self._held, self._window, self._num_settled = "", [], 0
        self._pieces.append(rest)
        return rest

    def _decode(self, tokens: list[int]) -> str:
        # The tokens are without silent ones here, and clean-up would change text that was already
        # shown.
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _is_silent(self, token: int) -> bool:
        """Return whether a token has no text and no effect on that of others: a special one, or one
        that only the model has.

        In the window, such tokens would push out those that have text.
        """
        return token in self._silent or self._tokenizer.convert_ids_to_tokens(token) is None

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt's last tokens that have text; they begin with a whole character, if
        there is one.
        """
        context: list[int] = []
        for token in reversed(prompt):
            if self._is_silent(token):
                continue
            context.insert(0, token)
            if len(context) >= _NUM_CONTEXT and not self._decode(context).startswith(_REPLACEMENT):
                break
            if len(context) == _NUM_CONTEXT + _MAX_UNFINISHED:
                break
        return context

    def _settle(self, token: int) -> str:
        """Append a token, and return the new text that no later token changes."""
        if self._is_silent(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        unsettled = len(text) - len(text.rstrip(_REPLACEMENT))
        start, num_read = 0, self._num_read
        if not unsettled:
            start, num_read = self._num_read, len(self._window)
        elif len(self._window) - self._num_read > _MAX_UNFINISHED:
            # No character is that long, so these bytes are none; only the last tokens may still
            # become one.
            start = num_read = len(self._window) - _MAX_UNFINISHED
            unsettled = min(unsettled, len(self._decode(self._window[start:])))
        # Never less than before: a decoder may take characters back while it waits for the bytes
        # of the next one.
        settled = max(self._num_settled, len(text) - unsettled)
        piece = text[self._num_settled : settled]
        self._num_settled = settled
        if start:
            self._window = self._window[start:]
            self._num_settled += len(self._decode(self._window)) - len(text)
        self._num_read = num_read - start
        return piece

    def _show(self, piece: str, may_stop: bool) -> str:
        """Return the part that can be shown of what is held back and `piece`."""
        text, self._held = self._held + piece, ""
        if may_stop:
            matches = [
                (text.find(stop) + len(stop), -len(stop), stop)
                for stop in self._stop
                if stop in text
            ]
            if matches:
                end, _, self.stopped = min(matches)
                text = text[: end if self._include_stop else end - len(self.stopped)]
            elif held := self._could_stop(text):
                text, self._held = text[:-held], text[-held:]
        self._pieces.append(text)
        return text

    def _could_stop(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the start of a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=0) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
