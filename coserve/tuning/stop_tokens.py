"""Tokens that end turns, as text."""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopTokens:
    """Tokens that end turns: those at which generation stops, and all special ones, which templates
    write there.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end_tokens: Collection[int]) -> None:
        """end_tokens: ids at which generation stops beside the tokenizer's own end-of-text token,
        if they are known.
        """
        added = tokenizer.added_tokens_decoder
        named = [
            tokenizer.convert_ids_to_tokens(token)
            for token in end_tokens
            if 0 <= token < len(tokenizer)
        ]
        # The end-of-text token.
        self.eos: str | None = tokenizer.eos_token
        self._are_known = bool(end_tokens)
        self._stops = tuple(filter(None, (self.eos, *named)))
        special = [token.content for token in added.values() if token.special]
        self._closing = (*self._stops, *tokenizer.all_special_tokens, *special)

    def closing(self, text: str) -> str | None:
        """Return the token that a text ends with, but for white space; None if it is not one that
        ends turns.
        """
        text = text.rstrip()
        return max(
            (token for token in self._closing if text.endswith(token)), key=len, default=None
        )

    def first_stop(self, text: str) -> str | None:
        """Return the token at which generation stops that a text begins with."""
        return next((token for token in self._stops if text.startswith(token)), None)

    def is_stop(self, token: str) -> bool:
        """Return whether generation stops at a token, or may, if that is not known."""
        return token in self._stops or not self._are_known

    def closed(self, text: str) -> str:
        """Return a text up to the first token, of those that it ends with, at which generation
        stops.
        """
        text = text.rstrip()
        while (last := self.closing(text)) is not None:
            before = text.removesuffix(last).rstrip()
            if not before.endswith(self._stops):
                break
            text = before
        return text
