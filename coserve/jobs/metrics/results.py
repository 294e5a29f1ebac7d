"""Metrics of a job: the data of its events, and the result file in OpenAI's format."""

import csv
import io
from collections.abc import Sequence
from math import isfinite
from typing import Any

from coserve.engine.jobs.events import JobEvent
from coserve.jobs.records import IS_BEST, EventRecord
from coserve.tuning.evaluation import METRICS

# Names of answers' metrics in events.
ANSWERS = tuple(f"valid_{name}" for name in METRICS)
FILENAME = "step_metrics.csv"
_MARGIN = "reward_margin"
_COLUMNS = {
    "step": "step",
    "train_loss": "train_loss",
    "train_accuracy": "train_mean_token_accuracy",
    "valid_loss": "valid_loss",
    "valid_mean_token_accuracy": "valid_mean_token_accuracy",
}


def metrics_of(event: JobEvent, *, num_steps: int, tokens_per_s: float | None) -> dict[str, Any]:
    """Return the data of a metrics event. Validation always covers the whole set."""
    data: dict[str, Any] = {"step": event.step, "total_steps": num_steps}
    if event.kind == "step":
        data |= {
            "train_loss": _number(event.loss),
            "train_mean_token_accuracy": _number(event.token_accuracy),
            "learning_rate": event.learning_rate,
            "gradient_norm": _number(event.norm),
            "num_tokens": event.num_tokens,
            "tokens_per_s": _number(tokens_per_s),
        }
    else:
        for kind in ("valid", "full_valid"):
            data |= {
                f"{kind}_loss": _number(event.loss),
                f"{kind}_mean_token_accuracy": _number(event.token_accuracy),
            }
        if event.is_best:
            data[IS_BEST] = True
    of = "train" if event.kind == "step" else "valid"
    data |= {f"{of}_{name}": _number(value) for name, value in event.metrics.items()}
    return data


def message_of(event: JobEvent, num_steps: int) -> str:
    """Return the message of a metrics event."""
    what = "training" if event.kind == "step" else "validation"
    loss = "no number" if _number(event.loss) is None else f"{event.loss:.4g}"
    skipped = (
        " (the gradient was not finite: skipped)"
        if event.kind == "step" and event.norm is None
        else ""
    )
    margin = f", reward margin={event.metrics[_MARGIN]:.4g}" if _MARGIN in event.metrics else ""
    answers = "".join(
        f", {name}={event.metrics[name]:.4g}" for name in METRICS if name in event.metrics
    )
    best = " (the best so far)" if event.is_best else ""
    return f"Step {event.step}/{num_steps}: {what} loss={loss}{margin}{answers}{skipped}{best}"


def by_step(events: Sequence[EventRecord]) -> dict[int, dict[str, Any]]:
    """Return all metrics of each step, in the order of steps."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events:
        assert event.step is not None
        steps.setdefault(event.step, {}).update(event.data)
    return dict(sorted(steps.items()))


def results_csv(events: Sequence[EventRecord]) -> bytes:
    """Return the result file of a job; values that were not measured are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    steps = by_step(events)
    measured = {name for data in steps.values() for name in data}
    columns = _COLUMNS | {name: name for name in ANSWERS if name in measured}
    writer.writerow(columns)
    for data in steps.values():
        values = [data.get(name) for name in columns.values()]
        writer.writerow(["" if value is None else value for value in values])
    return text.getvalue().encode()


def _number(value: float | None) -> float | None:
    """Return a finite number, or None, since JSON has neither NaN nor infinity."""
    return value if value is not None and isfinite(value) else None
