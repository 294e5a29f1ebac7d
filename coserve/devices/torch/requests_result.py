"""Result of requests' rows in a step: tokens, scores of prompts and embeddings."""

from collections.abc import Callable, Mapping, Sequence
from math import nan

from msgspec import structs
from torch import Tensor

from coserve.devices.grammars.grammar import CANNOT_FOLLOW
from coserve.devices.grammars.matching import Matcher
from coserve.devices.messages.steps import TokenLogprob
from coserve.devices.torch.readout import Pending, Readout
from coserve.kernels.transfer import on_device


class RequestsResult:
    """Result of requests' rows, to be read once the step's numbers are there."""

    def __init__(
        self,
        tokens: Sequence[Callable[[], dict[str, TokenLogprob]]],
        prompts: Mapping[str, Sequence[Callable[[], list[TokenLogprob]]]],
        matchers: Mapping[str, Matcher],
        embeddings: Mapping[str, Pending],
    ) -> None:
        self._tokens, self._prompts, self._matchers = tokens, prompts, matchers
        self._embeddings = embeddings

    def tokens(self) -> dict[str, TokenLogprob]:
        """Return the tokens of requests that sample; they count as used from then on. To be called
        once.
        """
        return {request: line for some in self._tokens for request, line in some().items()}

    def ended(self) -> tuple[str, ...]:
        """Return the requests whose grammar allows nothing after their token; after `tokens`."""
        return tuple([request for request, matcher in self._matchers.items() if matcher.has_ended])

    def refused(self) -> dict[str, str]:
        """Return the reason by request for which no token can be chosen."""
        return {
            request: f"{CANNOT_FOLLOW}{matcher.error}"
            for request, matcher in self._matchers.items()
            if matcher.error is not None
        }

    def embeddings(self) -> dict[str, tuple[float, ...]]:
        """Return the states of requests that ask for them."""
        return {request: tuple(pending.floats()) for request, pending in self._embeddings.items()}

    def prompts(self) -> dict[str, tuple[TokenLogprob, ...]]:
        """Return the scores of prompts that were scored."""
        return {
            request: tuple(one for chunk in chunks for one in chunk())
            for request, chunks in self._prompts.items()
        }


def score_rows(
    scores: Tensor, targets: Sequence[int], k: int, readout: Readout
) -> Callable[[], list[TokenLogprob]]:
    """Score a token in each row of scores [n, vocab_size]: its log-probability and rank, and the k
    likeliest.

    Returns:
        A function that returns the scores once the readout is read.
    """
    logprobs = scores.float().log_softmax(-1)
    tokens = on_device(targets, scores.device)
    own = logprobs.gather(1, tokens[:, None])
    values, places = logprobs.topk(k)
    read = TokenReadout(readout, tokens, own[:, 0], places, values)
    # 1 for the likeliest; tokens that are equally likely count, too.
    ranks = readout.add((logprobs >= own).sum(-1))
    return lambda: [
        structs.replace(line, rank=rank)
        for line, rank in zip(read.lines([k] * len(targets)), ranks.ints(), strict=True)
    ]


class TokenReadout:
    """Tokens [n] with their logprobs [n] (or [0]: none), and the likeliest [n, k] with theirs, of
    some rows.
    """

    def __init__(
        self,
        readout: Readout,
        tokens: Tensor,
        logprobs: Tensor,
        top_tokens: Tensor,
        top_logprobs: Tensor,
    ) -> None:
        self._tokens, self._logprobs = readout.add(tokens), readout.add(logprobs)
        self._top_tokens, self._top_logprobs = readout.add(top_tokens), readout.add(top_logprobs)

    def lines(self, numbers: Sequence[int]) -> list[TokenLogprob]:
        """Return what was read of each row.

        Args:
            numbers: How many of the likeliest tokens each row asks for.
        """
        tokens = self._tokens.ints()
        # Empty where no row reports any (`Sampled.logprobs`).
        logprobs = self._logprobs.floats() or [nan] * len(tokens)
        if not any(numbers):
            return [
                TokenLogprob(token=token, logprob=logprob)
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
        likeliest = list(zip(self._top_tokens.ints(), self._top_logprobs.floats(), strict=True))
        k = len(likeliest) // max(1, len(tokens))
        return [
            TokenLogprob(
                token=token,
                logprob=logprob,
                top=tuple(likeliest[row * k : row * k + min(number, k)]),
            )
            for row, (token, logprob, number) in enumerate(
                zip(tokens, logprobs, numbers, strict=True)
            )
        ]
