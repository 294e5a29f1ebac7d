"""Grammars as masks of a vocabulary: the tokens that may come next, so that the output stays a text
of the grammar.

llguidance computes them (https://github.com/guidance-ai/llguidance): a lexer of derivatives below
an Earley parser, walked over a trie of the vocabulary. It counts its work, and ends with an error
where a grammar asks for too much. But it recurses over the parts of a grammar, so that deep ones
overflow the stack: a grammar is tried in a sandbox first (`checker.py`). It releases Python's lock
meanwhile.

The device chooses tokens, so it has the matchers: a mask is needed where logits are, and is
computed there while the forward pass runs. The engine sends a request's grammar with `OpenRequest`,
and the tokens so far with it, as for penalties. So a request that was preempted, or is replayed,
gets its state back, and no masks are sent or recorded. Nothing here needs torch.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from coserve.devices.grammars.allocated import allocated_bytes
from coserve.devices.grammars.grammar import MAX_STATES, WHITE_SPACE, Grammar, text_before
from coserve.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# Limits in llguidance's own units: about a second for compiling, some hundredths for a step.
_COMPILE_FUEL, _STEP_FUEL, _STEP_ITEMS = 500_000, 200_000, 50_000
# How far a grammar is followed before it is accepted: what is too much for a step shows mostly in
# its first ones.
_NUM_TRIED = 24
_MAX_MESSAGE = 300
_NO_TEXT = "it allows no text that the model's tokens can make up"


class Vocabulary(msgspec.Struct, frozen=True):
    """Texts that tokens stand for."""

    pieces: tuple[bytes, ...]
    """Bytes of each token by id; empty for tokens that have none."""
    special: tuple[int, ...]
    """Ids whose piece is a name and no text; a grammar matches them by name alone."""
    ends: tuple[int, ...]
    """Ids that end a text."""


class GrammarCompiler:
    """Compiler of grammars over one vocabulary, for several threads at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Prepare the vocabulary.

        Raises:
            RequestError: llguidance is not installed, or does not take the vocabulary.
        """
        self._library = library()
        self.vocabulary = vocabulary
        with _errors("structured output cannot be used with this vocabulary"):
            self._tokenizer: LLTokenizer = _tokenizer(self._library, vocabulary)
        self._special = {
            vocabulary.pieces[token].decode(errors="replace"): token for token in vocabulary.special
        }

    def compile(self, grammar: Grammar, *, max_states: int = MAX_STATES) -> "LLMatcher":
        """Return a matcher at its beginning.

        Deep grammars overflow the stack, which ends the process: a process that others need may
        compile only what has passed in a sandbox.

        Args:
            grammar: The grammar.
            max_states: States that its lexer may make, now and while texts follow it.

        Raises:
            RequestError: The grammar is wrong, too large, or allows no text.
        """
        with _errors():
            matcher = self._built(grammar, max_states)
            # On a copy: the matcher that is kept stays at its beginning.
            self._follow(matcher.deep_copy())
            return matcher

    def measure(self, grammar: Grammar) -> int:
        """Return the bytes that a grammar takes when it is compiled and has been followed for some
        tokens.

        No other thread may allocate meanwhile.

        Raises:
            RequestError: As `compile`.
        """
        before = allocated_bytes()
        with _errors():
            matcher = self._built(grammar, MAX_STATES)
            # Kept until the bytes are counted, since its states are a part of them.
            followed = matcher.deep_copy()
            self._follow(followed)
            return max(1, allocated_bytes() - before)

    def _built(self, grammar: Grammar, max_states: int) -> "LLMatcher":
        limits = self._library.LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            step_max_items=_STEP_ITEMS,
            max_lexer_states=max_states,
            verbose_errors=False,
        )
        matcher: LLMatcher = self._library.LLMatcher(
            self._tokenizer, self._source(grammar), log_level=0, limits=limits
        )
        _check(matcher)
        return matcher

    def _source(self, grammar: Grammar) -> str:
        """Return a grammar in llguidance's own form."""
        source = self._plain_source(grammar)
        if not grammar.after:
            return source
        is_lark = grammar.kind in ("lark", "gbnf")
        inner = {"lark_grammar": source} if is_lark else json.loads(source)["grammars"][0]
        outer = {
            "name": "outer",
            "lark_grammar": text_before(grammar.after, grammar.begun_by, "inner", self._special),
        }
        return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})

    def _plain_source(self, grammar: Grammar) -> str:
        """Return the same without the text that may come before the grammar."""
        matcher: type[LLMatcher] = self._library.LLMatcher
        if grammar.kind == "json_schema":
            lenient = grammar.is_lenient
            options: JsonCompileOptions = {
                "whitespace_pattern": WHITE_SPACE,
                "lenient": lenient,
                "coerce_one_of": lenient,
            }
            return matcher.grammar_from_json_schema(
                _without_options(grammar.text), overrides=options
            )
        if grammar.kind == "regex":
            return matcher.grammar_from_regex(grammar.text)
        if grammar.kind == "lark":
            return matcher.grammar_from_lark(grammar.text)
        return matcher.grammar_from_lark(_lark_of(grammar.text))

    def _follow(self, matcher: "LLMatcher") -> None:
        """Take some tokens.

        Raises:
            RequestError: No token can come first, or following the grammar is too much work.
        """
        ends = self.vocabulary.ends
        for place in range(_NUM_TRIED):
            mask = matcher.compute_bitmask()
            _check(matcher)
            token = _some_token(mask, place, len(self.vocabulary.pieces), ends)
            if token is None:  # the text must end here
                if place == 0:
                    raise RequestError(f"the grammar cannot be used: {_NO_TEXT}")
                return
            # Its own mask allowed the token, so a refusal is an error such as used-up fuel.
            if not matcher.consume_token(token):
                _check(matcher)
            if matcher.is_stopped():
                return


class Matcher:
    """State of one sequence in a grammar; its next mask is computed as soon as its last token is
    known.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        num_tokens: int,
        thread: Executor,
        output: Sequence[int],
        vocab_size: int | None = None,
    ) -> None:
        """Begin to compute the first mask.

        Args:
            matcher: llguidance's matcher, at its beginning.
            num_tokens: Number of the vocabulary's tokens.
            thread: Computes masks.
            output: Tokens of the sequence so far.
            vocab_size: Number of tokens of the sequence's model, if that may be less.
        """
        self._matcher, self._num_tokens, self._thread = matcher, num_tokens, thread
        self._num_usable = num_tokens if vocab_size is None else min(num_tokens, vocab_size)
        self.has_ended = False
        """Whether nothing may follow any more."""
        self.error: str | None = None
        """Why no token can be chosen."""
        self._mask: Future[bytes] | None = None
        if output:
            # A request that was preempted, or is replayed, comes with its output so far.
            self._matcher.consume_tokens(list(output))
        self._advance()

    def mask(self) -> bytes:
        """Return a bit for each token that may come next, in whole words of 32; after an error or
        the end, all.
        """
        num_bytes = -(-self._num_tokens // 32) * 4
        if self._mask is None:
            return b"\xff" * num_bytes
        # Computed since the last token, while the forward pass ran; waits if it is not done.
        mask = self._mask.result()[:num_bytes]
        if self._matcher.is_error() or not int.from_bytes(mask, "little") & (
            (1 << self._num_usable) - 1
        ):
            # A row without any token would make the sampler's softmax NaN: let all come, and refuse
            # the request.
            self._mask, self.error = None, _error_of(self._matcher) or _NO_TEXT
            return self.mask()
        return mask

    def accept(self, token: int) -> None:
        """Continue with the next token."""
        if self.error is None and not self.has_ended:
            self._matcher.consume_token(token)
            self._advance()

    def _advance(self) -> None:
        self._mask = None
        if self._matcher.is_error():
            self.error = _error_of(self._matcher)
        elif self._matcher.is_stopped():
            self.has_ended = True
        else:
            self._mask = self._thread.submit(self._matcher.compute_bitmask)


@contextmanager
def _errors(message: str = "the grammar cannot be used") -> Iterator[None]:
    """Turn all that the compiler raises into RequestError.

    Args:
        message: Beginning of the error's message.
    """
    try:
        yield
    except (RequestError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # panics of its Rust code are no Exception
        raise RequestError(f"{message}: {_one_line(str(error))}") from None


def library() -> Any:
    """Return llguidance.

    Raises:
        RequestError: It is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "structured output needs the package llguidance: pip install llguidance"
        ) from None
    return llguidance


def _tokenizer(library: Any, vocabulary: Vocabulary) -> "LLTokenizer":
    """Return the vocabulary for llguidance.

    Where no token ends a text, a token that the model does not have takes that part.
    """
    pieces, ends = list(vocabulary.pieces), list(vocabulary.ends)
    if not ends:
        ends = [len(pieces)]
        # One more than the model has; masks are cut back to the model's tokens.
        pieces.append(b"<end>")
    special = sorted({*vocabulary.special, *ends})
    tokens = _Tokens(pieces, ends[0], special)
    tokenizer: LLTokenizer = library.LLTokenizer(
        library.TokenizerWrapper(tokens), n_vocab=len(pieces), eos_token=ends
    )
    return tokenizer


class _Tokens:
    """Vocabulary in the interface that llguidance calls."""

    bos_token_id = None

    def __init__(self, pieces: list[bytes], end: int, special: list[int]) -> None:
        self.tokens = [piece or b"<end>" * (token in special) for token, piece in enumerate(pieces)]
        self.eos_token_id, self.special_token_ids = end, special
        without = set(special)
        self._ids = {
            piece: token for token, piece in enumerate(pieces) if piece and token not in without
        }
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text, always the longest; bytes that no token has are left out."""
        data, tokens, place = text if isinstance(text, bytes) else text.encode(), [], 0
        while place < len(data):
            # After the loop, `length` is that of the match, or 1 if there was none: one byte is
            # left out.
            for length in range(min(self._longest, len(data) - place), 0, -1):
                if (token := self._ids.get(data[place : place + length])) is not None:
                    tokens.append(token)
                    break
            place += length
        return tokens


def _without_options(schema: str) -> str:
    """Return a schema without the compiler's own options, which it must not choose."""
    return json.dumps(
        {name: value for name, value in json.loads(schema).items() if name != "x-guidance"}
    )


def _lark_of(gbnf: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(gbnf))
    except Exception as error:  # it raises what it likes
        raise RequestError(f"the grammar cannot be read as GBNF: {_one_line(str(error))}") from None


def _check(matcher: "LLMatcher") -> None:
    if reason := _error_of(matcher):
        raise RequestError(f"the grammar cannot be used: {reason}")


def _error_of(matcher: "LLMatcher") -> str | None:
    if not matcher.is_error():
        return None
    reason = _one_line(matcher.get_error().partition("<non-verbose")[0])
    return _NO_TEXT if reason.startswith("NoExtension") else reason


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…"


def _some_token(mask: bytes, turn: int, num_tokens: int, ends: Sequence[int]) -> int | None:
    """Return one of a mask's tokens that do not end a text, in each turn another; None if there is
    none.
    """
    # Masks come in words of 32 bits: bits beyond the vocabulary are dropped.
    bits = int.from_bytes(mask, "little") & ((1 << num_tokens) - 1)
    for end in ends:
        bits &= ~(1 << end)
    # The first token from a place on that moves by a prime from turn to turn, so that parts of the
    # grammar are tried that the first tokens do not reach.
    start = (turn * 7919) % num_tokens
    from_start = bits >> start << start
    # Wraps around to the first tokens.
    bits = from_start or bits
    lowest = bits & -bits
    return lowest.bit_length() - 1 if bits else None
