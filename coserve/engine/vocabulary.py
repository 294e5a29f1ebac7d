"""A model's tokens as bytes: a byte-level token need not be a whole character."""

import re
from functools import cache
from typing import TYPE_CHECKING

from coserve.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenBytes:
    """The bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = {token: str(each.content).encode() for token, each in added.items()}
        self.special = frozenset(token for token, each in added.items() if each.special)
        self._is_byte_level = "ByteLevel" in type(tokenizer.backend_tokenizer.decoder).__name__

    def of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; none for one that the tokenizer does not
        have.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if (added := self._added.get(token)) is not None:
            return added
        if (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece)) is not None:
            return bytes([int(byte[1], 16)])
        if self._is_byte_level and all(character in _byte_of() for character in piece):
            return bytes(_byte_of()[character] for character in piece)
        return str(piece).replace("\u2581", " ").encode()  # sentencepiece's space

    def all(self, vocab_size: int) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """Return the bytes of all of a model's tokens, and the special ones, whose bytes are a name
        and show in no text.

        Raises:
            RequestError: texts are more than their tokens one after the other.
        """
        if self._tokenizer.backend_tokenizer.decoder is None:
            raise RequestError(
                "a grammar needs a tokenizer that writes tokens without spaces between them"
            )
        pieces = tuple([self.of(token) for token in range(vocab_size)])
        return pieces, tuple(sorted(token for token in self.special if token < vocab_size))


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's table):
    printable bytes stand for themselves, the others are in order from U+0100.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
