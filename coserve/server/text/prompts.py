"""Conversion of text to tokens and back in the server's process; the engine gets only tokens.

Tenants take turns at the tokenizer.
"""

import copy
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coserve.engine.prompts import Prompt, load_tokenizer, tokens_of
from coserve.engine.vocabulary import TokenBytes
from coserve.errors import CoserveError, ModelError, RequestError
from coserve.models.source import ModelSource, find_model
from coserve.server.errors import ApiError
from coserve.server.tenancy.task_turns import TenantTurns
from coserve.server.text.adapter_vocabulary import AddedToken
from coserve.server.text.generation_defaults import read_defaults

if TYPE_CHECKING:
    from tokenizers import AddedToken as LibraryToken
    from transformers import PreTrainedTokenizerBase

# Characters of a prompt that takes some milliseconds, or longer.
_LONG = 4_000
# Long prompts that are read at once.
_NUM_LONG = 2


def template_of(given: str | None) -> str | None:
    """Return a chat template: the content of a file, or the text itself if it has Jinja's braces.

    Raises:
        CoserveError: It is neither.
    """
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except (OSError, ValueError) as error:
        raise CoserveError(f"--chat-template {given} cannot be read: {error}") from None


class Prompts:
    """The model's tokenizer in threads of its own, so that a long prompt delays neither streams nor
    short prompts.
    """

    def __init__(
        self, model: str, generation_config: str = "auto", chat_template: str | None = None
    ) -> None:
        """Prepare a tokenizer; `load` must follow.

        Args:
            model: Directory or hub id of the model.
            generation_config: Source of sampling defaults; see `read_defaults`.
            chat_template: Chat template that replaces the model's.
        """
        self._model, self._generation_config, self._chat_template = (
            model,
            generation_config,
            chat_template,
        )
        self.defaults: Mapping[str, Any] = {}  # fields of SamplingParams that a request leaves open
        self._thread, self._slow_threads = (
            TenantTurns(1, "tokenizer"),
            TenantTurns(_NUM_LONG, "long prompts"),
        )
        self._copies = threading.local()  # a tokenizer for each of the slow threads
        self.longest_token = 0  # characters; 0 without a tokenizer
        self._source: ModelSource | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.text_tokenizer: PreTrainedTokenizerBase | None = None  # only for the event loop
        self._pieces: dict[int, TokenPiece] = {}
        self._token_bytes: TokenBytes | None = None

    async def load(self) -> None:
        """Load the tokenizer.

        Raises:
            ModelError: There is no such model.
        """
        await self._run(self._thread, self._load)

    def _load(self) -> None:
        source = find_model(self._model, with_weights=False)
        self._tokenizer = load_tokenizer(source)
        if self._chat_template is not None:
            self._use_template(self._chat_template)
        self.text_tokenizer = copy.deepcopy(self._tokenizer)
        if self._tokenizer is not None:
            self._token_bytes = TokenBytes(self._tokenizer)
            self.longest_token = max(map(len, self._tokenizer.get_vocab()))
        self.defaults = read_defaults(source.directory, self._generation_config)
        self._source = source

    def _use_template(self, template: str) -> None:
        if self._tokenizer is None:
            raise ModelError("--chat-template: the model has no tokenizer, which chats need")
        self._tokenizer.chat_template = template
        try:
            tokens_of([{"role": "user", "content": "x"}], self._tokenizer, self._model)
        except RequestError as error:
            raise ModelError(f"--chat-template cannot be used: {error}") from None

    def with_tokens(self, added: Sequence[AddedToken]) -> "Prompts":
        """Return the tokenizer of an adapter that has more tokens. Blocks.

        It is this one if it has them all, or gives them other ids.
        """
        known = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        new = [token for token in added if token.content not in known]
        if self._tokenizer is None or not new:
            return self
        # Threads and files are shared; what depends on the tokens is replaced below.
        extended = copy.copy(self)
        extended._tokenizer = tokenizer = self.tokenizer
        assert tokenizer is not None
        tokenizer.add_tokens([_library_token(token) for token in new])
        if any(tokenizer.convert_tokens_to_ids(token.content) != token.id for token in new):
            return self
        extended._copies, extended._pieces = threading.local(), {}
        extended.text_tokenizer, extended._token_bytes = (
            copy.deepcopy(tokenizer),
            TokenBytes(tokenizer),
        )
        extended.longest_token = max(self.longest_token, *(len(token.content) for token in new))
        return extended

    async def vocabulary(self, vocab_size: int) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """Return the bytes of all tokens, and the special ones; see `TokenBytes.all`.

        Raises:
            RequestError: The model has no tokenizer.
        """
        if self._token_bytes is None:
            raise RequestError("structured output needs a tokenizer, and this model has none")
        vocabulary: tuple[tuple[bytes, ...], tuple[int, ...]] = await self._run(
            self._slow_threads, self._token_bytes.all, vocab_size
        )
        return vocabulary

    def close(self) -> None:
        """End the threads."""
        for thread in (self._thread, self._slow_threads):
            thread.shutdown()

    async def tokens(
        self,
        prompt: Prompt,
        template: Mapping[str, Any] | None = None,
        special: bool | None = None,
        *,
        param: str | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: Text, token ids, or messages of a chat.
            template: Arguments of the chat template; see `tokens_of`.
            special: Whether special tokens are added; see `tokens_of`.
            param: Field that the prompt comes from.

        Raises:
            ApiError: The prompt cannot be tokenized.
        """
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
            return list(prompt)  # type: ignore[arg-type]
        is_long = num_characters(prompt) > _LONG
        thread = self._slow_threads if is_long else self._thread
        try:
            tokens: list[int] = await self._run(
                thread, self._tokens, prompt, is_long, template, special
            )
        except RequestError as error:
            raise ApiError(str(error), param=param) from None
        return tokens

    def _tokens(
        self,
        prompt: Prompt,
        is_long: bool,
        template: Mapping[str, Any] | None,
        special: bool | None,
    ) -> list[int]:
        tokenizer = self._tokenizer
        if is_long:
            if not hasattr(self._copies, "tokenizer"):
                # A tokenizer must not be used by two threads at once.
                self._copies.tokenizer = self.tokenizer
            tokenizer = self._copies.tokenizer
        return tokens_of(prompt, tokenizer, self._model, template, special)

    @property
    def is_loaded(self) -> bool:
        """Return whether `load` is done."""
        return self._source is not None

    @property
    def source(self) -> ModelSource:
        """The model's files; only after `load`."""
        assert self._source is not None
        return self._source

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The tokenizer; other threads must copy it."""
        return copy.deepcopy(self._tokenizer)

    @property
    def has_text(self) -> bool:
        """Return whether the model has a tokenizer."""
        return self._tokenizer is not None

    @property
    def chat_template(self) -> str:
        """The chat template, all of them if there are several by name; "" without one."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    async def words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of words, each with its spellings; see `_spellings`.

        Raises:
            RequestError: The model has no tokenizer.
        """
        if not words:
            return ()
        tokens: tuple[tuple[int, ...], ...] = await self._run(self._thread, self._words, words)
        return tokens

    def _words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        if self._tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, and this model has none")
        texts = [text for word in words for text in _spellings(word)]
        found = [
            tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts
        ]
        return tuple(dict.fromkeys(tokens for tokens in found if tokens))

    def has_special(self, texts: Collection[str]) -> bool:
        """Return whether one of the texts is a special token, which an answer's text omits."""
        added = () if self._tokenizer is None else self._tokenizer.added_tokens_decoder.values()
        return any(token.special and str(token.content) in texts for token in added)

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens, including special ones; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    async def decoded(self, tokens: list[int]) -> str:
        """Return `text` without blocking the event loop."""
        text: str = await self._run(self._thread, self.text, tokens)
        return text

    async def names(self, tokens: list[int]) -> list[str]:
        """Return the vocabulary's entries of tokens; only with a tokenizer."""
        assert self._tokenizer is not None
        names: list[str] = await self._run(
            self._thread, self._tokenizer.convert_ids_to_tokens, tokens
        )
        return names

    def piece(self, token: int) -> "TokenPiece":
        """Return the text and bytes of a single token."""
        piece = self._pieces.get(token)
        if piece is None:
            known = self._token_bytes
            raw = str(token).encode() if known is None else known.of(token)
            special = known is not None and token in known.special
            piece = TokenPiece(
                text=raw.decode("utf-8", "replace"), raw=list(raw), is_special=special
            )
            self._pieces[token] = piece
        return piece

    async def _run(self, threads: TenantTurns, function: Any, *arguments: Any) -> Any:
        return await threads.run(partial(function, *arguments))


def num_characters(prompt: Prompt) -> int:
    """Return the number of characters of a text or of a chat's messages; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(
        len(str(text))
        for message in prompt
        if isinstance(message, Mapping)
        for text in message.values()
    )


def _library_token(token: AddedToken) -> "LibraryToken":
    from tokenizers import AddedToken as LibraryToken

    return LibraryToken(token.content, special=token.is_special, normalized=False)


def _spellings(word: str) -> tuple[str, ...]:
    """Return a word without a leading space and with one; only white space stays as it is."""
    bare = word.lstrip()
    return (bare, f" {bare}") if bare else (word,)


@dataclass(frozen=True, kw_only=True)
class TokenPiece:
    """Text and bytes of a single token."""

    text: str
    """Its text."""
    raw: list[int]
    """Its bytes, which need not be whole characters."""
    is_special: bool
    """Whether the text of an answer omits it."""

    @property
    def name(self) -> str:
        """Name that no other token has: OpenAI's form for bytes that are not characters."""
        return (
            self.text
            if "\ufffd" not in self.text
            else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw)
        )
