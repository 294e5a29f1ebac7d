"""Tokenizers of adapters that have tokens of their own; see `adapter_vocabulary`."""

from collections import OrderedDict
from functools import cached_property
from threading import Lock

from coserve.models.base import Architecture
from coserve.models.families import build_architecture
from coserve.server.text.adapter_vocabulary import AdapterVocabularies, AddedToken
from coserve.server.text.prompts import Prompts

# Tokenizers with the tokens of adapters that are kept, beside the model's.
_NUM_KEPT = 8


class AdapterReaders:
    """Cache of tokenizers of adapters' directories; it may be used from any thread."""

    def __init__(self, prompts: Prompts) -> None:
        """Begin with an empty cache.

        Args:
            prompts: Tokenizer of the model.
        """
        self._prompts, self._vocabularies, self._lock = prompts, AdapterVocabularies(), Lock()
        self._kept: OrderedDict[tuple[AddedToken, ...], Prompts] = OrderedDict()

    @cached_property
    def _architecture(self) -> Architecture:
        return build_architecture(self._prompts.source.config)

    def of(self, directory: str) -> tuple[Prompts, int]:
        """Return the tokenizer of an adapter, and the vocabulary size of its model. Blocks."""
        vocabulary = self._vocabularies.of(directory, self._architecture)
        added = tuple(token for token in vocabulary.added if token.id < vocabulary.vocab_size)
        with self._lock:
            if added not in self._kept:
                self._kept[added] = self._prompts.with_tokens(added)
            self._kept.move_to_end(added)
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
            return self._kept[added], vocabulary.vocab_size
