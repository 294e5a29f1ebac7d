"""Choosing the next token of many requests in one batched pass.

The order: penalties on the logits, logit bias, forbidden tokens, temperature, min-p, top-k, top-p. A
draw uses one uniform number that is a pure function of the request's seed and the token's place in it, so a seeded
request gives the same tokens in any company. Log-probabilities are those of the model, before all of that.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from coserve.settings import is_number

# Below this, scores divided by the temperature overflow, and the likeliest token is all but certain.
_LEAST_TEMPERATURE = 1e-5
# Candidates among which top-k and top-p are looked for first.
_NUM_CANDIDATES = 1024
_MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends; ValueError at birth names the field and its range.

    temperature: 0 is greedy. top_p, min_p: shares of probability. top_k: number of tokens, 0 or -1 for all.
    repetition_penalty: divides positive logits and multiplies negative ones of tokens in prompt or output (arXiv
    1909.05858). presence_penalty,
    frequency_penalty: subtracted once, and once per use, for tokens in the output (OpenAI). logit_bias: added, by
    token.
    seed: None draws one. logprobs: how many of the likeliest tokens to report beside the chosen one, None for no
    report.
    stop, stop_token_ids: end the request. min_tokens: before so many, nothing ends it. ignore_eos: the end-of-text
    token does not end it.
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
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("logit_bias", Mapping), ("stop", tuple), ("stop_token_ids", tuple), ("ignore_eos", bool)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a {kind.__name__.lower()}, not {getattr(self, name)!r}")
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")
        self._number("temperature", 0, 2)
        self._number("top_p", 0, 1, above=True)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0, 10, above=True)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        self._whole("max_tokens", 1)
        self._whole("min_tokens", 0, self.max_tokens)
        self._whole("top_k", -1)
        self._whole("n", 1, 128)
        if self.seed is not None:
            self._whole("seed", -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            self._whole("logprobs", 0, _MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or token < 0 or not is_number(bias) or not -100 <= bias <= 100:
                raise ValueError(
                    f"logit_bias must map token ids to numbers from -100 to 100, not {token!r} to {bias!r}"
                )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be strings that are not empty, not {self.stop!r}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError for token ids that a model of this vocabulary does not have; to be asked before the first
        token.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if wrong := [token for token in ids if not 0 <= token < vocab_size]:
                raise ValueError(f"{name} names token {wrong[0]}; the model has {vocab_size}")

    @property
    def penalizes(self) -> bool:
        """Whether tokens that were used before weigh less (or more)."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _number(self, name: str, least: float, most: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        if not is_number(value) or not least <= value <= most or (above and value == least):
            bounds = f"above {least} and at most {most}" if above else f"from {least} to {most}"
            raise ValueError(f"{name} must be a number {bounds}, not {value!r}")

    def _whole(self, name: str, least: int, most: int | None = None) -> None:
        value = getattr(self, name)
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < least
            or (most is not None and value > most)
        ):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name} must be a whole number {bounds}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """One request, at the point where its next token is chosen.

    seed: of its draws. prompt, output: token ids so far. forbidden: ids that must not come now (the ends of a request
    that is still below its min_tokens).
    """

    params: SamplingParams
    seed: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    forbidden: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """tokens int64 [n]; logprobs float32 [n], of the chosen tokens; the likeliest tokens of each row and their logprobs
    [n, k], with k the most that any row asked for (0: nobody did).
    """

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Choose a token for each row of logits [n, vocabulary]; `logits` stays as it is."""
    raw = logits.float()
    scores = _adjusted(raw, rows)
    tokens = scores.argmax(-1)
    if drawn := [index for index, row in enumerate(rows) if row.params.temperature >= _LEAST_TEMPERATURE]:
        which = torch.tensor(drawn, device=logits.device)
        tokens[which] = _draw(scores[which], [rows[index] for index in drawn])
    return _report(raw, tokens, max(row.params.logprobs or 0 for row in rows))


def _report(raw: Tensor, tokens: Tensor, k: int) -> Sampled:
    norm = raw.logsumexp(-1)
    top = raw.topk(min(k, raw.shape[1]), -1)
    return Sampled(
        tokens=tokens,
        logprobs=raw.gather(1, tokens[:, None])[:, 0] - norm,
        top_tokens=top.indices,
        top_logprobs=top.values - norm[:, None],
    )


def _adjusted(raw: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logit bias, penalties and forbidden tokens, as sparse changes: most rows and most tokens have none."""
    changes = _Changes()
    for index, row in enumerate(rows):
        for token, bias in row.params.logit_bias.items():
            changes.add(index, token, bias)
        if row.params.penalizes:
            used = Counter(row.output)
            for token in used.keys() | set(row.prompt):
                penalty = row.params.presence_penalty * (token in used) + row.params.frequency_penalty * used[token]
                changes.add(index, token, -penalty, row.params.repetition_penalty)
        for token in row.forbidden:
            changes.add(index, token, float("-inf"))
    return changes.applied(raw)


class _Changes:
    """What happens to single logits: first divided or multiplied by a factor, then added to."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, row: int, token: int, addend: float, factor: float = 1.0) -> None:
        before, scale = self._at.get((row, token), (0.0, 1.0))
        self._at[row, token] = before + addend, scale * factor

    def applied(self, raw: Tensor) -> Tensor:
        if not self._at:
            return raw
        where = torch.tensor(list(self._at), device=raw.device).T
        addend, factor = torch.tensor(list(self._at.values()), device=raw.device).T
        values = raw[where[0], where[1]]
        scores = raw.clone()
        scores[where[0], where[1]] = torch.where(values > 0, values / factor, values * factor) + addend
        return scores


def _draw(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token per row, all with temperature above 0."""

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(row.params, name) for row in rows], device=scores.device)[:, None]

    scores = scores / column("temperature")
    if any(row.params.min_p > 0 for row in rows):
        floor = scores.amax(-1, keepdim=True) + column("min_p").log()
        scores = scores.masked_fill(scores < floor, float("-inf"))
    if cut := [index for index, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1]:
        which = torch.tensor(cut, device=scores.device)
        scores[which] = _cut(scores[which], column("top_k")[which], column("top_p")[which])
    # Inverse transform sampling: the first token at which the cumulative probability exceeds a uniform number.
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum_(-1)
    target = _uniform(rows).to(scores.device)[:, None] * cumulative[:, -1:]
    tokens: Tensor = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens.clamp_(max=scores.shape[1] - 1)  # the product above may round up to the sum itself


def _cut(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top_k likeliest tokens, and of those the fewest whose probabilities sum to top_p.

    Most rows find all of those among a few candidates; only the others are sorted whole.
    """
    few = scores.topk(min(_NUM_CANDIDATES, scores.shape[1]))
    total = scores.logsumexp(-1, keepdim=True)
    mass = (few.values - total).exp().sum(-1, keepdim=True)
    enough = torch.where(top_k > 0, top_k <= few.values.shape[1], mass >= top_p)[:, 0]
    kept = torch.full_like(scores, float("-inf"))
    kept.scatter_(1, few.indices, _kept(few.values, total, top_k, top_p))
    if not bool(enough.all()):
        rest = (~enough).nonzero()[:, 0]
        ordered, order = scores[rest].sort(-1, descending=True)
        kept[rest] = kept[rest].scatter_(1, order, _kept(ordered, total[rest], top_k[rest], top_p[rest]))
    return kept


def _kept(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The likeliest scores in falling order, those that are cut at -inf; total [n, 1]: logsumexp of the whole rows."""
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    total = torch.where(top_k > 0, ordered.logsumexp(-1, keepdim=True), total)
    probabilities = (ordered - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    return ordered.masked_fill((before >= top_p) & (rank > 0), float("-inf"))


def _uniform(rows: Sequence[SamplingRow]) -> Tensor:
    """A number in [0, 1) for each row, float64 [n], from its seed and the place of the token to come."""
    places = ((row.seed % 2**64) << 32 | len(row.output) for row in rows)
    return torch.tensor([Random(place).random() for place in places], dtype=torch.float64)
