"""Sampling: the next tokens of many requests in one batched pass.

The order: penalties on the logits, logit bias, forbidden and allowed tokens, the grammar's mask,
temperature, min-p, top-k, top-p. A draw uses one uniform number that is a pure function of the
request's seed and the token's place in it, so that a seeded request gets the same tokens in any
company. Log-probabilities are those of the model, before all of that.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from coserve.devices.sampling_params import SamplingParams
from coserve.kernels.base import Backend
from coserve.kernels.plain import PlainBackend
from coserve.kernels.transfer import on_device

# A CPU works on few rows at a time, so that they stay in its caches, or on some more of a small
# vocabulary; an accelerator on enough to be busy.
_ROWS_AT_ONCE_ON_CPU, _SCORES_AT_ONCE_ON_CPU = 8, 1 << 18
_ROWS_AT_ONCE_ELSEWHERE = 64
_BITS, _STEP = 2**64 - 1, 0x9E3779B97F4A7C15


class TokenCounts:
    """Used tokens of a request, for its penalties: those of its prompt, and counts of those of its
    output.

    A request whose params penalize keeps one and adds every token it is given; no others need one.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = array("q", self._slots)
        self._uses = array("f", bytes(4 * len(self._slots)))

    def add(self, token: int) -> None:
        """Count a token of the output."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._tokens):
            self._tokens.append(token)
            self._uses.append(0)
        self._uses[slot] += 1

    def __len__(self) -> int:
        return len(self._tokens)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the distinct tokens int64 [n], n above 0, and their uses in the output float32
        [n].

        They are views on the CPU, to be dropped before the next `add`.
        """
        return torch.frombuffer(self._tokens, dtype=torch.int64), torch.frombuffer(
            self._uses, dtype=torch.float32
        )


class SamplingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request, at the point where its next token is chosen."""

    params: SamplingParams
    """Settings of its sampling."""
    seed: int
    """Seed of its draws."""
    place: int = 0
    """Number of tokens that it has been given so far."""
    counts: TokenCounts | None = None
    """Its used tokens, for params that penalize (ValueError if they are missing)."""
    forbidden: Sequence[int] = ()
    """Ids that must not be chosen now: the ends of a request that is below its min_tokens."""
    mask: bytes = b""
    """Mask of its grammar: a bit for each token that may come, the lowest first; empty: all may."""

    def __post_init__(self) -> None:
        if self.counts is None and self.params.penalizes:
            raise ValueError("params with a penalty need the counts of the tokens so far")


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Chosen tokens of n rows."""

    tokens: Tensor
    """The tokens, int64 [n]."""
    logprobs: Tensor
    """Their log-probabilities, float32 [n]; [0] if no row asks for any."""
    top_tokens: Tensor
    """The likeliest tokens of each row, [n, k], with k the most that any row asks for."""
    top_logprobs: Tensor
    """Their log-probabilities, [n, k]."""


class SampledParams:
    """Params of the rows that are sampled in a step, with what is the same in every step of these
    rows.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        device: torch.device,
        vocab_sizes: Sequence[int] = (),
    ) -> None:
        """Prepare the params.

        Args:
            params: Those of each row.
            device: Device of the logits.
            vocab_sizes: Number of tokens of each row's model, where some have fewer than there are
                logits.
        """
        self.last_tokens = (
            on_device([size - 1 for size in vocab_sizes], device) if vocab_sizes else None
        )
        """Last token of each row's model, int64 [n]; None: each has as many tokens as there are
        logits."""
        self.biased = {index for index, each in enumerate(params) if each.biases}
        """Rows with biases."""
        self.num_top = [each.num_top for each in params]
        """Number of likeliest tokens that each row reports."""
        if vocab_sizes:
            self.num_top = [
                min(number, size) for number, size in zip(self.num_top, vocab_sizes, strict=True)
            ]
        self.reports = any(each.logprobs is not None for each in params)
        """Whether any row reports log-probabilities."""
        self.named = [
            (index, each.logprob_token_ids)
            for index, each in enumerate(params)
            if each.logprob_token_ids
        ]
        """Rows that name the tokens to report, and these."""
        self.drawn = [index for index, each in enumerate(params) if each.draws]
        """Rows whose tokens are drawn; the settings below are theirs."""
        own = [params[index] for index in self.drawn]
        self.top_k, self.top_p = [each.top_k for each in own], [each.top_p for each in own]
        self.temperature = on_device([each.temperature for each in own], device, torch.float32)[
            :, None
        ]
        """Float32 [drawn, 1]."""
        min_p = [each.min_p for each in own]
        self.min_p = on_device(min_p, device, torch.float32)[:, None] if any(min_p) else None
        """Float32 [drawn, 1]; None: all are 0."""


def sample(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    backend: Backend | None = None,
    params: SampledParams | None = None,
) -> Sampled:
    """Choose a token for each row of logits [n, vocabulary], which stay as they are.

    Args:
        logits: The logits.
        rows: How each token is chosen.
        backend: Kernels; None: the plain ones.
        params: Params of the rows, where they are kept.
    """
    device = logits.device
    backend = backend or PlainBackend(device)
    params = params or SampledParams([row.params for row in rows], device)
    # Rows whose logits change before a token is chosen; all others are read as they are.
    changed = params.biased.union(
        [i for i, row in enumerate(rows) if row.counts or row.forbidden or row.mask]
    )
    drawn, adjusted = params.drawn, sorted(changed.difference(params.drawn))
    # Three kinds: plain rows (one argmax over all logits), adjusted ones that take the likeliest,
    # and drawn ones. The latter two overwrite what the first put in their places.
    is_plain = len(drawn) + len(adjusted) < len(rows)
    tokens = (
        backend.argmax(logits)
        if is_plain
        else torch.empty(len(rows), dtype=torch.int64, device=device)
    )
    # One number in [0, 1) per drawn row, from its seed and place alone.
    uniform = _uniform([rows[index] for index in drawn])

    def scores_of(few: Sequence[int], which: Tensor) -> Tensor:
        scores = logits[which].float()
        if not changed.isdisjoint(few):
            _adjust_(scores, [rows[index] for index in few])
        return scores

    for few in _few(len(adjusted), logits):
        which = on_device(adjusted[few], device)
        tokens[which] = backend.argmax(scores_of(adjusted[few], which))
    for few in _few(len(drawn), logits):
        which = on_device(drawn[few], device)
        scores = scores_of(drawn[few], which).div_(params.temperature[few])
        if params.min_p is not None:
            # p >= min_p * max p, by logits: the norm is the same on both sides.
            floor = scores.amax(-1, keepdim=True) + params.min_p[few].log()
            scores.masked_fill_(scores < floor, float("-inf"))
        tokens[which] = backend.draw(scores, uniform[few], params.top_k[few], params.top_p[few])
    if params.last_tokens is not None:  # where no token may come, any place is drawn
        tokens = tokens.minimum(params.last_tokens)
    return _report(logits, tokens, params)


def _few(number: int, logits: Tensor) -> list[slice]:
    """Return the rows in slices, each of which is done at once."""
    at_once = _ROWS_AT_ONCE_ELSEWHERE
    if logits.device.type == "cpu":
        at_once = max(_ROWS_AT_ONCE_ON_CPU, _SCORES_AT_ONCE_ON_CPU // max(1, logits.shape[1]))
    return [slice(start, start + at_once) for start in range(0, number, at_once)]


def _report(logits: Tensor, tokens: Tensor, params: SampledParams) -> Sampled:
    if not params.reports:
        none = logits.new_empty(len(tokens), 0, dtype=torch.float32)
        return Sampled(
            tokens=tokens, logprobs=none.new_empty(0), top_tokens=none.long(), top_logprobs=none
        )
    raw = logits.float()
    # Log-probabilities are logit - norm, of the model's own logits.
    norm = raw.logsumexp(-1)
    top_values, top_tokens = raw.topk(min(max(params.num_top), raw.shape[1]), -1)
    for index, named in params.named:
        which = on_device(named, logits.device)
        # A request that names tokens gets these in place of the likeliest.
        top_tokens[index, : len(named)], top_values[index, : len(named)] = which, raw[index, which]
    return Sampled(
        tokens=tokens,
        logprobs=raw.gather(1, tokens[:, None])[:, 0] - norm,
        top_tokens=top_tokens,
        top_logprobs=top_values - norm[:, None],
    )


def _column(rows: Sequence[SamplingRow], name: str, device: torch.device) -> Tensor:
    return on_device([getattr(row.params, name) for row in rows], device)[:, None]


def _adjust_(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply penalties, logit bias and forbidden tokens, as sparse changes, and masks.

    Most rows and most tokens have none.
    """
    _penalize_(scores, rows)
    if biases := [
        (i, token, bias)
        for i, row in enumerate(rows)
        for token, bias in row.params.logit_bias.items()
    ]:
        where = on_device([(index, token) for index, token, _ in biases], scores.device).T
        addends = on_device([bias for *_, bias in biases], scores.device, torch.float32)
        scores[where[0], where[1]] += addends
    if forbidden := [(index, token) for index, row in enumerate(rows) for token in row.forbidden]:
        where = on_device(forbidden, scores.device).T
        scores[where[0], where[1]] = float("-inf")
    for index, row in enumerate(rows):
        if row.params.allowed_token_ids:
            which = on_device(row.params.allowed_token_ids, scores.device)
            # Kept before everything is forbidden, since biases were added already.
            allowed = scores[index, which]
            scores[index] = float("-inf")
            scores[index, which] = allowed
    if masked := [index for index, row in enumerate(rows) if row.mask]:
        _mask_(scores, masked, [rows[index].mask for index in masked])


def _mask_(scores: Tensor, rows: Sequence[int], masks: Sequence[bytes]) -> None:
    """Let only the tokens of some rows' masks come.

    Masks go to the device as bits, and are unpacked there.
    """
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(rows), -1)
    packed = on_device(packed, scores.device)
    bits = torch.bitwise_right_shift(
        packed[:, :, None], torch.arange(8, dtype=torch.uint8, device=scores.device)
    )
    # [rows, tokens]; masks are whole words of 32 bits, so the last ones may have no token.
    is_out = (bits.bitwise_and_(1) == 0).view(len(rows), -1)[:, : scores.shape[1]]
    if (
        more := scores.shape[1] - is_out.shape[1]
    ) > 0:  # tokens of adapters, which no grammar knows
        is_out = torch.nn.functional.pad(is_out, (0, more), value=True)
    if len(rows) == len(scores):
        scores.masked_fill_(is_out, float("-inf"))
    else:
        which = on_device(rows, scores.device)
        scores[which] = scores[which].masked_fill_(is_out, float("-inf"))


def _penalize_(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    counted = [
        (index, row.counts.tensors())
        for index, row in enumerate(rows)
        if row.params.penalizes and row.counts
    ]
    if not counted:
        return
    device = scores.device
    # All rows' used tokens end to end: index (row), tokens and uses, each [sum of sizes].
    sizes = torch.tensor([len(tokens) for _, (tokens, _) in counted])
    index = on_device(
        torch.tensor([index for index, _ in counted]).repeat_interleave(sizes), device
    )
    tokens = on_device(torch.cat([tokens for _, (tokens, _) in counted]), device)
    uses = on_device(torch.cat([uses for _, (_, uses) in counted]), device)
    repetition, presence, frequency = (
        _column(rows, f"{kind}_penalty", device)[index, 0]
        for kind in ("repetition", "presence", "frequency")
    )
    values = scores[index, tokens]
    # CTRL's penalty (arXiv 1909.05858); of a negative score, the product is the lower one.
    values = torch.where(values > 0, values / repetition, values * repetition)
    scores[index, tokens] = values - (presence * (uses > 0) + frequency * uses)


def _uniform(rows: Sequence[SamplingRow]) -> list[float]:
    """Return numbers in [0, 1), from each row's seed and the place of its next token."""
    return [(_mixed(_mixed(row.seed) + row.place * _STEP) >> 11) * 2.0**-53 for row in rows]


def _mixed(number: int) -> int:
    """Return 64 bits that look random, others for every number modulo 2^64.

    With numbers that are `_STEP` apart it is the generator SplitMix64 (Steele, Lea and Flood,
    OOPSLA 2014, figure 16), any number of which is computed without those before it.
    """
    # SplitMix64 works modulo 2^64, Python's integers do not.
    number &= _BITS
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _BITS
    return number ^ number >> 31
