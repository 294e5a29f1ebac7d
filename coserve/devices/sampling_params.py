"""How a request's tokens are chosen: settings alone, so that processes without tensors can check
and send them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from coserve.devices.grammars.grammar import Grammar
from coserve.settings import check_whole, is_number

MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_LOGPROB_TOKEN_IDS = 128
# Below this, scores divided by the temperature overflow, and the likeliest token is all but
# certain.
_LEAST_TEMPERATURE = 1e-5
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
    """How a request's tokens are chosen, and when it ends; ValueError names the field and its
    range.

    temperature: 0 is greedy. top_p, min_p: shares of probability. top_k: number of tokens, 0 or -1
    for all. repetition_penalty: divides positive logits and multiplies negative ones of tokens in
    prompt or output (arXiv 1909.05858). presence_penalty, frequency_penalty: subtracted once, and
    once per use, for tokens in the output (OpenAI). logit_bias: added, by token. seed: None draws
    one. logprobs: how many of the likeliest tokens to report beside the chosen one, None for no
    report. prompt_logprobs: the same for the prompt's tokens; then max_tokens may be 0.
    logprob_token_ids: tokens to report in place of the likeliest. allowed_token_ids: the only ones
    that may come, unless there are none. bad_words: token sequences whose last token must not come
    after the others. stop, stop_token_ids: end the request. min_tokens: nothing ends it before.
    ignore_eos: the end-of-text token does not end it. skip_special_tokens: they have no text.
    include_stop_str_in_output: the text has the stop string, too. cache_salt: what is known of a
    prompt's beginning is shared by requests with the same one alone. num_public_tokens: of the
    prompt's first tokens, those that are no secret: tenants share what is known of them. grammar:
    that the output follows from its first token on; it ends the request where nothing may come
    after. embeds: the first token comes with the state that it was chosen from: after the final
    norm, as the last linear layer of the head reads it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprob_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: str = ""
    num_public_tokens: int = 0
    grammar: Grammar | None = None
    embeds: bool = False

    def __post_init__(self) -> None:  # noqa: C901
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name} must be a {kind.__name__.lower()}, not {getattr(self, name)!r}"
                )
        for name in _TOKEN_IDS:
            if not all(map(_is_id, getattr(self, name))):
                raise ValueError(f"{name} must be token ids, not {getattr(self, name)!r}")
        if not all(
            isinstance(word, tuple) and word and all(map(_is_id, word)) for word in self.bad_words
        ):
            raise ValueError(
                f"bad_words must be tuples of token ids that are not empty, not {self.bad_words!r}"
            )
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(f"logprob_token_ids must be {MAX_LOGPROB_TOKEN_IDS} tokens at most")
        if self.logprob_token_ids and self.logprobs is None:
            raise ValueError("logprob_token_ids needs logprobs")
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
        for token, bias in self.logit_bias.items():
            if (
                not isinstance(token, int)
                or token < 0
                or not is_number(bias)
                or not -100 <= bias <= 100
            ):
                raise ValueError(
                    f"logit_bias must map token ids to numbers from -100 to 100, not {token!r} to "
                    f"{bias!r}"
                )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be strings that are not empty, not {self.stop!r}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError for token ids that a model of this vocabulary does not have; to be asked
        before the first token.
        """
        named = {name: getattr(self, name) for name in ("logit_bias", *_TOKEN_IDS)}
        named["bad_words"] = [token for word in self.bad_words for token in word]
        for name, ids in named.items():
            if wrong := [token for token in ids if not 0 <= token < vocab_size]:
                raise ValueError(f"{name} names token {wrong[0]}; the model has {vocab_size}")

    @cached_property
    def draws(self) -> bool:
        """Whether tokens are drawn; else the likeliest is taken."""
        return self.temperature >= _LEAST_TEMPERATURE

    @cached_property
    def biases(self) -> bool:
        """Whether some tokens weigh more or less in every draw, or cannot come."""
        return bool(self.logit_bias or self.allowed_token_ids)

    @cached_property
    def num_top(self) -> int:
        """How many tokens are reported beside the chosen one."""
        return len(self.logprob_token_ids) or self.logprobs or 0

    @cached_property
    def penalizes(self) -> bool:
        """Whether tokens that were used before weigh less (or more)."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @cached_property
    def takes_likeliest(self) -> bool:
        """Whether the token is that of the largest logit, and nothing else of the logits is asked
        for.
        """
        changes = self.penalizes or self.biases or self.grammar is not None
        return not (self.draws or changes or self.logprobs is not None)

    def _number(self, name: str, least: float, most: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        if not is_number(value) or not least <= value <= most or (above and value == least):
            bounds = f"above {least} and at most {most}" if above else f"from {least} to {most}"
            raise ValueError(f"{name} must be a number {bounds}, not {value!r}")
