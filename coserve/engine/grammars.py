"""Grammars of requests: the device compiles them, and must know before the first one what tokens stand for."""

from collections.abc import Callable, Sequence

from coserve.devices.base import Device
from coserve.devices.grammar import Grammar
from coserve.devices.matching import Vocabulary
from coserve.devices.messages import OpenGrammar, SetVocabulary
from coserve.errors import RequestError

# Makes the pieces and the special tokens of a `Vocabulary`.
FindPieces = Callable[[], tuple[Sequence[bytes], Sequence[int]]]


class Grammars:
    """On one device. vocabulary: what tokens stand for, once that is known."""

    def __init__(self, device: Device, end_tokens: frozenset[int], find_pieces: FindPieces | None) -> None:
        """find_pieces: asked with the first grammar, unless somebody has told; None if there is no tokenizer to ask."""
        self._device, self._end_tokens, self._find_pieces = device, end_tokens, find_pieces
        self.vocabulary: Vocabulary | None = None

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """See `EngineCore.use_vocabulary`."""
        vocabulary = Vocabulary(tuple(pieces), tuple(special), tuple(sorted(self._end_tokens)))
        self._device.execute(SetVocabulary(vocabulary))
        self.vocabulary = vocabulary

    def open(self, grammar: Grammar) -> None:
        """Have it compiled; RequestError if it cannot be used."""
        if self.vocabulary is None:
            if self._find_pieces is None:
                raise RequestError("a grammar needs a tokenizer, and this model has none")
            self.use_vocabulary(*self._find_pieces())
        self._device.execute(OpenGrammar(grammar))
