"""Metrics of a validation set beside its loss, over answers that the model writes to its questions.

A question is an example up to the last run of trained tokens, which is the expected answer: the
last assistant's turn of a chat, or a completion. A metric is a function of two texts, and one line
of `METRICS`.
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
    """Settings of an evaluation.

    Raises:
        ValueError: A field is out of its range; the message names both.
    """

    metric: str = LOSS
    """Metric: "loss" alone, or also the share of greedy answers that are right: `exact_match`, the
    expected text but for white space around it; `json_valid`, JSON; `json_match`, JSON of the same
    value.
    """
    max_tokens: int = 128
    """Maximum number of tokens of an answer."""
    max_examples: int = 100
    """Number of questions, from the first of the set on; the loss is over all examples."""

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or self.metric not in (LOSS, *METRICS):
            raise ValueError(
                f"metric must be one of {', '.join((LOSS, *METRICS))}, not {shown(self.metric)}"
            )
        check_whole("max_tokens", self.max_tokens, 1, MOST_WHOLE)
        check_whole("max_examples", self.max_examples, 1, MOST_WHOLE)

    @property
    def asks(self) -> bool:
        """Return whether the metric needs answers."""
        return self.metric != LOSS


@dataclass(frozen=True)
class Question:
    """A question with its expected answer, as token ids."""

    prompt: tuple[int, ...]
    """Tokens of the prompt."""
    expected: tuple[int, ...]
    """Tokens of the expected answer."""


def questions_of(examples: Sequence[Example], config: EvaluationConfig) -> tuple[Question, ...]:
    """Return the questions of a validation set, in its order; none if the metric needs no answers.

    Raises:
        DataError: There are no questions, since no example has a prompt, or all were cut.
    """
    if not config.asks:
        return ()
    questions = [question for example in examples if (question := _question(example)) is not None]
    if not questions:
        raise DataError(
            f"{config.metric} needs examples with a prompt and a whole answer; none of these "
            f"{len(examples)} has both"
        )
    return tuple(questions[: config.max_examples])


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
    """Return whether an answer is right, by a metric of answers."""
    return METRICS[metric](expected, answer)


def _json(text: str) -> tuple[object] | None:
    """Return the value in a tuple, so that null is one; None if the text is not JSON."""
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
