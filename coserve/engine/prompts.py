"""Conversion of prompts to token ids: text, ids, or the messages of a chat. It is shared by the
engine and the server, which has no engine in its process.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coserve.errors import CoserveError, ModelError, RequestError
from coserve.models.source import ModelSource
from coserve.settings import is_whole, shown
from coserve.tuning.chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The first line of tiktoken's files: a token in base 64, and its rank.
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s")
# Text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def load_tokenizer(source: ModelSource) -> "PreTrainedTokenizerBase | None":
    """Return the model's tokenizer; None if it has none.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if source.directory is None or not any((source.directory / name).exists() for name in names):
        return None
    _check_sentencepiece(source.directory)
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.directory, local_files_only=True
        )
    except Exception as error:  # many kinds, for what is missing and what is damaged
        raise ModelError(
            f"the tokenizer in {source.directory} cannot be read: {' '.join(str(error).split())}"
        ) from error
    return tokenizer


def end_tokens_of(
    source: ModelSource, tokenizer: "PreTrainedTokenizerBase | None"
) -> frozenset[int]:
    """Return the ids that end a text, by the model's configuration, its generation configuration,
    and the tokenizer.
    """
    named = [getattr(source.config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    if source.directory is not None:
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            text = (source.directory / "generation_config.json").read_text()
            named.append(json.loads(text).get("eos_token_id"))
    ids: list[Any] = []
    for value in named:
        ids += value if isinstance(value, list | tuple) else [value]
    return frozenset(one for one in ids if isinstance(one, int))


def _check_sentencepiece(directory: Path) -> None:
    """Check a tokenizer.model that is the model's only vocabulary: transformers takes a damaged one
    for tiktoken's, and an empty one for an empty vocabulary.

    Raises:
        ModelError: it cannot be read.
    """
    path = directory / "tokenizer.model"
    if not path.exists() or (directory / "tokenizer.json").exists():
        return
    content = path.read_bytes()
    if _TIKTOKEN.match(content):
        return
    from sentencepiece import SentencePieceProcessor

    try:
        num_pieces = SentencePieceProcessor(model_proto=content).get_piece_size() if content else 0
    except RuntimeError:
        num_pieces = 0
    if not num_pieces:
        raise ModelError(
            f"the tokenizer in {directory} cannot be read: tokenizer.model is neither "
            f"SentencePiece's nor tiktoken's; "
            "it is damaged or was not copied whole"
        )


def tokens_of(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase | None",
    model: str,
    template: Mapping[str, Any] | None = None,
    special: bool | None = None,
) -> list[int]:
    """Return a prompt's token ids.

    Args:
        template: What a chat's template gets beside its messages, such as `tools`.
        special: Whether the tokenizer adds special tokens such as that of the beginning; None: to
            text, not to chats, whose template writes them.

    Raises:
        RequestError: the prompt is text, and there is no tokenizer; or it is not a prompt.
    """
    if not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is text, token ids or messages, not {shown(prompt)}")
    if not isinstance(prompt, str) and not any(isinstance(each, Mapping) for each in prompt):
        return [_checked_id(each, index) for index, each in enumerate(prompt)]
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer: prompts must be token ids")
    if isinstance(prompt, str):
        return _text_tokens(prompt, tokenizer, special=special is not False)
    messages: Sequence[Mapping[str, Any]] = prompt  # type: ignore[assignment]
    try:
        text = ChatTemplate(tokenizer).render(
            messages, {"add_generation_prompt": True, **(template or {})}, strict=False
        )
    except CoserveError as error:
        raise RequestError(str(error)) from None
    return _text_tokens(text, tokenizer, special=bool(special))


def _checked_id(value: Any, index: int) -> int:
    if not is_whole(value, -(2**63)):  # the model's vocabulary is checked later
        raise RequestError(
            f"element {index} of the prompt is {value!r}: token ids are whole numbers; "
            "a prompt is text, token ids, or the messages of a chat"
        )
    return int(value)


def _text_tokens(text: str, tokenizer: "PreTrainedTokenizerBase", *, special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt has half a character (a lone surrogate) at {error.start}"
        ) from None
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
