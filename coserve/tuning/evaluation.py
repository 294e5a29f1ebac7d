"""What a validation set is measured by beside its loss: a metric of answers, which the model writes
to its questions.

A question is an example up to the last run of trained tokens, which is what the answer is held
against: the last assistant's turn of a chat, or a completion. A metric is a function of two texts,
and one line of `METRICS`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coserve.errors import DataError
from coserve.settings import MOST_WHOLE, check_whole, shown
from coserve.tuning.examples import Example

LOSS = "loss"
# The share of answers is measured of which this is so, by (expected, answer).
METRICS: Mapping[str, Callable[[str, str], bool]] = {
    "exact_match": lambda expected, answer: expected.strip() == answer.strip(),
    "json_valid": lambda expected, answer: _json(answer) is not None,
    "json_match": lambda expected, answer: (
        _json(answer) is not None and _json(answer) == _json(expected)
    ),
}


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How a validation set is measured; ValueError names the field.

    metric: "loss" alone, or also the share of greedy answers that are as they should be:
    `exact_match`, the expected text but for white space around it; `json_valid`, JSON;
    `json_match`, JSON of the same value. max_tokens: of an answer. max_examples: the first of the
    set, which are asked; the loss is of all.
    """

    metric: str = LOSS
    max_tokens: int = 128
    max_examples: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or self.metric not in (LOSS, *METRICS):
            raise ValueError(
                f"metric must be one of {', '.join((LOSS, *METRICS))}, not {shown(self.metric)}"
            )
        check_whole("max_tokens", self.max_tokens, 1, MOST_WHOLE)
        check_whole("max_examples", self.max_examples, 1, MOST_WHOLE)

    @property
    def asks(self) -> bool:
        """Whether there are answers to write."""
        return self.metric != LOSS


@dataclass(frozen=True)
class Question:
    """Token ids: of the prompt, and of the answer that should come."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


def questions_of(examples: Sequence[Example], config: EvaluationConfig) -> tuple[Question, ...]:
    """Of a validation set, in its order; none if no answers are asked for. DataError: there are
    none to ask, since no example has a prompt, or all were cut.
    """
    if not config.asks:
        return ()
    found = [question for example in examples if (question := _question(example)) is not None]
    if not found:
        raise DataError(
            f"{config.metric} needs examples with a prompt and a whole answer; none of these "
            f"{len(examples)} has both"
        )
    return tuple(found[: config.max_examples])


def _question(example: Example) -> Question | None:
    tokens, trained = example.sequences[-1]  # the last has the last turn
    if example.truncated or True not in trained:
        return None
    end = len(trained) - trained[::-1].index(True)
    start = end
    while start and trained[start - 1]:
        start -= 1
    return Question(tokens[:start], tokens[start:end]) if start else None


def is_right(metric: str, expected: str, answer: str) -> bool:
    """Whether an answer is as it should be, by a metric of answers."""
    return METRICS[metric](expected, answer)


def _json(text: str) -> tuple[object] | None:
    """The value in a tuple, so that null is one; None if it is no JSON."""
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
