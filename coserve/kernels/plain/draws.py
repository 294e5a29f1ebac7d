"""Draws of a place in each row of scores, among all or among the likeliest; see `Backend.draw`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.transfer import on_device

# Candidates among which top-k and top-p are looked for first.
_NUM_CANDIDATES = 1024
# Where top-p needs more tokens than that, probability is counted in bins, which reach this far
# below the likeliest score: all lower scores together have less probability than the smallest
# difference of a top_p from 1.
_NUM_BINS = 4096
_DEPTH = 32.0


def draw(
    scores: Tensor, uniform: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]
) -> Tensor:
    """Implement `Backend.draw`."""
    device = scores.device
    numbers = on_device(torch.tensor(uniform, dtype=torch.float64), device)[:, None]
    cut = [index for index, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if k > 0 or p < 1]
    if not cut:
        return _inverse(scores, numbers)
    tokens = torch.empty(len(scores), dtype=torch.int64, device=device)
    if len(cut) < len(scores):
        whole = on_device(sorted(set(range(len(scores))).difference(cut)), device)
        tokens[whole] = _inverse(scores[whole], numbers[whole])
    which = on_device(cut, device)
    some_k = on_device([top_k[index] for index in cut], device)[:, None]
    some_p = on_device([top_p[index] for index in cut], device, torch.float64)[:, None]
    most = max(_NUM_CANDIDATES, *(top_k[index] for index in cut))
    tokens[which] = _draw_cut(
        scores[which], numbers[which], some_k, some_p, min(most, scores.shape[1])
    )
    return tokens


def _draw_cut(
    scores: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int
) -> Tensor:
    """Draw among the top_k likeliest tokens (all, where it is not above 0), and of those among the
    fewest whose probabilities sum to top_p; of equal ones, the first in the vocabulary are kept.

    All of top_k are among the candidates. Most rows have all of top_p there, too; the others look
    at all tokens. Only the device knows which rows these are, so that a step with rows of top_k or
    top_p waits for it once more.
    """
    ordered, candidates = scores.topk(num_candidates)
    within = (top_k <= 0) | (torch.arange(num_candidates, device=scores.device) < top_k)
    # Shares are of what top-k leaves.
    left = ordered.masked_fill(~within, float("-inf")).logsumexp(-1, keepdim=True)
    total = torch.where(top_k > 0, left, scores.logsumexp(-1, keepdim=True))
    shares = (ordered - total).double().exp_()
    reach = shares.cumsum(-1)
    least, ties = _edge(ordered, within & (reach - shares < top_p))
    # Candidates are in the order of the vocabulary, so that a number leads to the same token as in
    # the whole row.
    candidates = candidates.sort(-1).values
    tokens = candidates.gather(
        1, _draw_above(scores.gather(1, candidates), least, ties, uniform)[:, None]
    )[:, 0]
    if num_candidates < scores.shape[1]:
        # Said so that rows without numbers (a broken model's) are in neither.
        short = ((top_k <= 0) & (reach[:, -1:] < top_p))[:, 0]
        if bool(short.any()):
            least[short], ties[short] = _nucleus(scores[short], total[short], top_p[short])
        open_ended = short | (least == ordered[:, -1:])[:, 0]
        if bool(open_ended.any()):
            tokens[open_ended] = _draw_above(
                *(each[open_ended] for each in (scores, least, ties, uniform))
            )
    return tokens


def _edge(ordered: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest score that is kept, and how many equal to it are, [n, 1] each. Of scores in
    falling order [n, m], the first is kept in any case.
    """
    number = kept.sum(-1, keepdim=True).clamp_(min=1)
    least = ordered.gather(1, number - 1)
    return least, number - (ordered > least).sum(-1, keepdim=True)


def _nucleus(scores: Tensor, total: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `_edge` of the fewest likeliest tokens whose probabilities sum to top_p, in whole
    rows [n, vocabulary].

    Without sorting: probability is summed in bins of similar scores, and only the bin in which it
    reaches top_p is looked at token by token.

    Args:
        total: logsumexp of the rows [n, 1].
    """
    most = scores.amax(-1, keepdim=True)
    depth = (most - scores.amin(-1, keepdim=True)).clamp_(1e-6, _DEPTH)
    bins = ((most - scores) * ((_NUM_BINS - 1) / depth)).clamp_(max=_NUM_BINS - 1).long()
    shares = (scores - total).double().exp_()
    first = torch.arange(0, len(scores) * _NUM_BINS, _NUM_BINS, device=scores.device)[:, None]
    bins += first  # every row has bins of its own
    sums, sizes = (
        torch.bincount(bins.flatten(), weights, len(scores) * _NUM_BINS).view(
            len(scores), _NUM_BINS
        )
        for weights in (shares.flatten(), None)
    )
    above = sums.cumsum(-1) - sums
    edge = (above < top_p).sum(-1, keepdim=True) - 1
    ordered = (
        scores.masked_fill(bins != edge + first, float("-inf"))
        .topk(int(sizes.gather(1, edge).max()))
        .values
    )
    shares = (ordered - total).double().exp_()
    return _edge(ordered, above.gather(1, edge) + shares.cumsum(-1) - shares < top_p)


def _draw_above(scores: Tensor, least: Tensor, ties: Tensor, uniform: Tensor) -> Tensor:
    """Draw among the scores above `least`, and the first `ties` that are equal to it."""
    equal = scores == least
    kept = (scores > least) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= ties.int()))
    return _inverse(scores.masked_fill(~kept, float("-inf")), uniform)


def _inverse(scores: Tensor, uniform: Tensor) -> Tensor:
    """Return the first place in each row at which the cumulative probability exceeds its number of
    uniform [n, 1] (inverse transform sampling).
    """
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum_(-1)
    target = uniform * cumulative[:, -1:]
    places: Tensor = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return places.clamp_(
        max=scores.shape[1] - 1
    )  # the product above may round up to the sum itself
