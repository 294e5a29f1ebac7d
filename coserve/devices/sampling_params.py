"""Settings of a request's sampling, which processes without tensors check and send."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from coserve.devices.grammars.grammar import Grammar
from coserve.settings import check_whole, is_number

MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_LOGPROB_TOKEN_IDS = 128
# Below this, scores divided by the temperature overflow, and the likeliest token is all but
# certain.
_MIN_TEMPERATURE = 1e-5
_TOKEN_IDS = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids")
_KINDS: dict[str, type] = {
    "logit_bias": Mapping,
    **dict.fromkeys(("stop", "bad_words", *_TOKEN_IDS), tuple),
    **dict.fromkeys(
        ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "embeds"), bool
    ),
    "cache_salt": str,
}


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of a request: how its tokens are chosen, and when it ends.

    Raises:
        ValueError: A value is out of range; the message names the field and its range.
    """

    max_tokens: int = 16
    """Most tokens to generate; with `prompt_logprobs` it may be 0."""
    temperature: float = 1.0
    """Divisor of the logits, from 0 to 2; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Share of probability, above 0: only the likeliest tokens that together reach it may be drawn.
    """
    top_k: int = 0
    """Number of likeliest tokens that may be drawn; 0 or -1: all."""
    min_p: float = 0.0
    """Least probability of a token that may be drawn, as a share of the likeliest token's."""
    repetition_penalty: float = 1.0
    """Number that divides positive logits and multiplies negative ones of tokens in prompt or
    output (arXiv 1909.05858).
    """
    presence_penalty: float = 0.0
    """Number that is subtracted once from the logits of tokens in the output, from -2 to 2
    (OpenAI).
    """
    frequency_penalty: float = 0.0
    """Number that is subtracted from the logits of tokens in the output for each of their uses,
    from -2 to 2 (OpenAI).
    """
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Number that is added to a logit, from -100 to 100, by token id."""
    seed: int | None = None
    """Seed of the draws; None: a random one."""
    n: int = 1
    """Number of outputs for the prompt."""
    logprobs: int | None = None
    """Number of likeliest tokens to report beside each chosen one, up to 20; None: no report."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end the request."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request."""
    min_tokens: int = 0
    """Number of tokens before which nothing ends the request."""
    ignore_eos: bool = False
    """Whether the request continues after the end-of-text token."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens to report in place of the likeliest ones; needs `logprobs`."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be chosen; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not come: after all of its tokens but the last, the last is not
    chosen.
    """
    skip_special_tokens: bool = True
    """Whether special tokens have no text."""
    include_stop_str_in_output: bool = False
    """Whether the text ends with the stop text."""
    cache_salt: str = ""
    """Text that a request must have in common with another one to share cached prefixes."""
    num_public_tokens: int = 0
    """Number of the prompt's first tokens that are no secret: tenants share their cached pages."""
    grammar: Grammar | None = None
    """Grammar that the output follows from its first token on; where it allows nothing more, the
    request ends.
    """
    embeds: bool = False
    """Whether the first token comes with the state that it was chosen from: after the final norm,
    as the last linear layer of the head reads it.
    """

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_tokens()
        self._check_numbers()

    def _check_kinds(self) -> None:
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name} must be a {kind.__name__.lower()}, not {getattr(self, name)!r}"
                )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be strings that are not empty, not {self.stop!r}")

    def _check_tokens(self) -> None:
        for name in _TOKEN_IDS:
            if not all(map(_is_id, getattr(self, name))):
                raise ValueError(f"{name} must be token ids, not {getattr(self, name)!r}")
        for word in self.bad_words:
            if not (isinstance(word, tuple) and word and all(map(_is_id, word))):
                raise ValueError(
                    "bad_words must be tuples of token ids that are not empty, not "
                    f"{self.bad_words!r}"
                )
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(f"logprob_token_ids must be {MAX_LOGPROB_TOKEN_IDS} tokens at most")
        if self.logprob_token_ids and self.logprobs is None:
            raise ValueError("logprob_token_ids needs logprobs")
        for token, bias in self.logit_bias.items():
            is_token = isinstance(token, int) and token >= 0
            if not (is_token and is_number(bias) and -100 <= bias <= 100):
                raise ValueError(
                    f"logit_bias must map token ids to numbers from -100 to 100, not {token!r} to "
                    f"{bias!r}"
                )

    def _check_numbers(self) -> None:
        self._number("temperature", 0, 2)
        self._number("top_p", 0, 1, above=True)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0, 10, above=True)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        check_whole("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0)
        check_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_whole("top_k", self.top_k, -1)
        check_whole("num_public_tokens", self.num_public_tokens, 0)
        check_whole("n", self.n, 1, 128)
        if self.seed is not None:
            check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, MAX_LOGPROBS)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check token ids against a model's vocabulary, before the first token.

        Raises:
            ValueError: A setting names a token that the model does not have.
        """
        named = {name: getattr(self, name) for name in ("logit_bias", *_TOKEN_IDS)}
        named["bad_words"] = [token for word in self.bad_words for token in word]
        for name, ids in named.items():
            if wrong := [token for token in ids if not 0 <= token < vocab_size]:
                raise ValueError(f"{name} names token {wrong[0]}; the model has {vocab_size}")

    @cached_property
    def draws(self) -> bool:
        """Return whether tokens are drawn; otherwise the likeliest is taken."""
        return self.temperature >= _MIN_TEMPERATURE

    @cached_property
    def biases(self) -> bool:
        """Return whether some tokens weigh more or less in every draw, or cannot come."""
        return bool(self.logit_bias or self.allowed_token_ids)

    @cached_property
    def num_top(self) -> int:
        """Return the number of tokens that are reported beside the chosen one."""
        return len(self.logprob_token_ids) or self.logprobs or 0

    @cached_property
    def penalizes(self) -> bool:
        """Return whether used tokens weigh less (or more)."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @cached_property
    def takes_likeliest(self) -> bool:
        """Return whether the likeliest token is taken, and nothing else is read of the logits."""
        changes = self.penalizes or self.biases or self.grammar is not None
        return not (self.draws or changes or self.logprobs is not None)

    def _number(self, name: str, least: float, most: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        if not is_number(value) or not least <= value <= most or (above and value == least):
            bounds = f"above {least} and at most {most}" if above else f"from {least} to {most}"
            raise ValueError(f"{name} must be a number {bounds}, not {value!r}")
