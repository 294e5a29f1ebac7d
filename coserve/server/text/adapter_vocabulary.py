"""Tokens that an adapter's directory adds to the model's tokenizer, and the vocabulary size.

Only the names of added tokens are read, as data: the text of a prompt is still split by the model's
own tokenizer.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from coserve.adapters.brought import vocabulary_of
from coserve.adapters.file_names import WEIGHTS_FILE
from coserve.adapters.tensor_files import open_tensors
from coserve.adapters.whole_files import read_small_file
from coserve.errors import AdapterError
from coserve.models.base import Architecture
from coserve.settings import MOST_WHOLE, is_whole

_TOKENIZER_FILE = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 128 << 20
_MAX_ADDED, _MAX_CHARACTERS = 4096, 256
# Directories whose vocabulary is kept for the next request.
_NUM_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token that a tokenizer has in addition to its vocabulary."""

    id: int
    """Id of the token."""
    content: str
    """Text of the token."""
    is_special: bool
    """Whether the text of an answer omits it."""


@dataclass(frozen=True, kw_only=True)
class AdapterVocabulary:
    """Vocabulary of an adapter's model."""

    vocab_size: int
    """Number of tokens."""
    added: tuple[AddedToken, ...] = ()
    """Tokens that the adapter's tokenizer adds, by id."""


class AdapterVocabularies:
    """Cache of the vocabularies of adapters' directories; it may be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, int, int], AdapterVocabulary] = OrderedDict()

    def of(self, directory: str, architecture: Architecture) -> AdapterVocabulary:
        """Return a directory's vocabulary, or the model's if it cannot be read. Blocks."""
        path = Path(directory)
        key = (directory, _changed_at(path / WEIGHTS_FILE), _changed_at(path / _TOKENIZER_FILE))
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        vocabulary = AdapterVocabulary(
            vocab_size=_vocab_size(path, architecture), added=_added_tokens(path)
        )
        with self._lock:
            self._kept[key] = vocabulary
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return vocabulary


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _vocab_size(path: Path, architecture: Architecture) -> int:
    try:
        with open_tensors(path / WEIGHTS_FILE) as file:
            return vocabulary_of(file, architecture)
    except AdapterError:  # the engine reports it when it reads the directory
        return architecture.vocab_size


def _added_tokens(path: Path) -> tuple[AddedToken, ...]:
    try:
        content = read_small_file(path / _TOKENIZER_FILE, _MAX_TOKENIZER_BYTES)
        data = json.loads(content or b"{}")
        tokens = [_added(each) for each in data.get("added_tokens", ())]
    except (
        AdapterError,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ):
        return ()
    return tuple(sorted(tokens, key=lambda token: token.id)) if len(tokens) <= _MAX_ADDED else ()


def _added(fields: Any) -> AddedToken:
    token, content = fields["id"], fields["content"]
    if (
        not is_whole(token, 0, MOST_WHOLE)
        or not isinstance(content, str)
        or not 0 < len(content) <= _MAX_CHARACTERS
    ):
        raise ValueError
    return AddedToken(id=token, content=content, is_special=bool(fields.get("special")))
