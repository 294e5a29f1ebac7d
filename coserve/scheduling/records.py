"""Recorded latencies, and a linear model of counted work where nothing was recorded (LLMStation
section 4.2).

Records are grouped by (hardware, model, adapters) and keyed by (decode batch, tuning length).
Hardware and model are the engine's own, which leaves the adapters: what a job trains, and how many
bypasses those have that requests use. Beside the paper's two, a key has the kind of step, and the
part of the device. A record overrules the model as soon as it is there, until it is too old: what
was once held up by something else would never be tried again. What is recorded only if it is
planned (`renew`) gives way to a prediction step by step.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.plan import JobProgress
from coserve.scheduling.profile import Curve

# Weight of the newest step in a record: contexts grow under one key.
_NEWEST = 0.3
# Records that have come since a record was last renewed, for it to be forgotten.
_OLD = 2000
# How much of such a record is left after each that has come since: half of it after 140.
_TRUST_PER_RECORD = 0.995
# How unsure a linear model is of its first weights.
_UNSURE = 100.0
# Minimum time of a piece, as a share of its longest part, whatever the weights.
_MIN_SHARE = 0.1
# Rows beyond which a forward pass is bound by computation.
_MANY = 1024, 2048


class PieceWork(NamedTuple):
    """Work of a piece, in seconds at the device's rates."""

    fixed_s: float
    """Time of a step with nothing to compute."""
    computation_s: float
    """Time of its computation."""
    communication_s: float
    """Time of data that ranks move between their devices; 0 on a single device."""
    memory_s: float
    """Time of its memory access."""


class Key(NamedTuple):
    """Key of a record."""

    kind: str
    """Kind of step."""
    batch: int
    """Rows of requests."""
    length: int
    """Rows of the job, in the window or in a tasklet."""
    units: tuple[int, int] | None = None
    """Units of the device for requests and for jobs; None where each has all of it."""


@dataclass
class LinearModel:
    """Seconds as a weighted sum of a piece's work; weights by recursive least squares, all steps
    counting alike.

    At first a piece takes its computation and its memory access, one after the other.
    """

    weights: list[float] = field(default_factory=lambda: [0.0, 1.0, 1.0, 1.0])
    """Weights of the fields of `PieceWork`."""
    _inverse: list[list[float]] = field(
        default_factory=lambda: [
            [_UNSURE if row == column else 0.0 for column in range(4)] for row in range(4)
        ]
    )

    def seconds(self, work: PieceWork) -> float:
        weighted_s = sum([weight * each for weight, each in zip(self.weights, work, strict=True)])
        return max(weighted_s, _MIN_SHARE * max(work))

    def learn(self, work: PieceWork, seconds: float) -> None:
        """Learn the time of a piece. The error that counts is a share of it."""
        x = [each / seconds for each in work]
        px = [sum([p * each for p, each in zip(row, x, strict=True)]) for row in self._inverse]
        gain = [each / (1 + sum([a * b for a, b in zip(x, px, strict=True)])) for each in px]
        error = 1 - sum([weight * each for weight, each in zip(self.weights, x, strict=True)])
        self.weights = [
            weight + each * error for weight, each in zip(self.weights, gain, strict=True)
        ]
        self._inverse = [
            [p - g * other for p, other in zip(row, px, strict=True)]
            for row, g in zip(self._inverse, gain, strict=True)
        ]


@dataclass
class LatencyRecords:
    """Recorded latencies, and a linear model for each kind of step."""

    records: dict[Hashable, dict[Key, tuple[float, int]]] = field(default_factory=dict)
    """Seconds, by adapters and by key, with the number of records when they were renewed."""
    models: dict[str, LinearModel] = field(default_factory=dict)
    """Linear models by kind."""
    num_recorded: int = 0
    """Number of records so far."""

    def seconds(self, adapters: Hashable, key: Key, work: Callable[[], PieceWork]) -> float:
        """Return the recorded seconds, or what the model of this kind predicts; only that calls
        `work`.
        """
        recorded_s = self.recorded(adapters, key)
        return (
            (self.models.get(key.kind) or LinearModel()).seconds(work())
            if recorded_s is None
            else recorded_s
        )

    def recorded(self, adapters: Hashable, key: Key) -> float | None:
        """Return the recorded seconds; None if there was no such step, or not for long."""
        record = self.records.get(adapters, {}).get(key)
        return record[0] if record is not None and self.num_recorded - record[1] < _OLD else None

    def record(self, adapters: Hashable, key: Key, work: PieceWork, seconds: float) -> None:
        """Record the time of a piece."""
        if seconds <= 0:
            return
        old, self.num_recorded = self.recorded(adapters, key), self.num_recorded + 1
        mean_s = seconds if old is None else (1 - _NEWEST) * old + _NEWEST * seconds
        self.records.setdefault(adapters, {})[key] = mean_s, self.num_recorded
        self.models.setdefault(key.kind, LinearModel()).learn(work, seconds)

    def aged(self, adapters: Hashable, key: Key, predicted_s: float) -> float:
        """Return what `renew` recorded, which gives way to a prediction with age."""
        record = self.records.get(adapters, {}).get(key)
        if record is None:
            return predicted_s
        trust = _TRUST_PER_RECORD ** (self.num_recorded - record[1])
        seconds: float = predicted_s * (record[0] / predicted_s) ** trust
        return seconds

    def renew(self, adapters: Hashable, key: Key, seconds: float, *, predicted_s: float) -> None:
        """Record the time of a piece beside its prediction; no model learns from it."""
        if seconds <= 0 or predicted_s <= 0:
            return
        is_new = key not in self.records.get(adapters, {})
        old = seconds if is_new else self.aged(adapters, key, predicted_s)
        self.num_recorded += 1
        self.records.setdefault(adapters, {})[key] = (
            (1 - _NEWEST) * old + _NEWEST * seconds,
            self.num_recorded,
        )


def forward_work(load: ForwardLoad, latency: LatencyModel) -> PieceWork:
    """Return the work of a forward pass."""
    p = latency.profile
    fixed_s, row_s = _apart(p.forward, p.sums)
    computation_s = (
        load.rows * row_s + load.pairs * p.s_per_pair + load.window_rows * p.s_per_window_row
    )
    memory_s = fixed_s + p.head.at(load.sampled) + load.keys * p.s_per_key
    return PieceWork(fixed_s, computation_s, p.sums.at(load.rows), memory_s)


def tasklet_work(job: JobProgress, rows: int, latency: LatencyModel) -> PieceWork:
    """Return the work of a backward tasklet."""
    p = latency.profile
    fixed_s, row_s = _apart(p.backward, p.backward_sums)
    pairs = rows * job.mean_context_len
    computation_s = rows * row_s * latency.backward_weight(job) + pairs * p.backward_s_per_pair
    return PieceWork(fixed_s, computation_s, p.backward_sums.at(rows), fixed_s)


def _apart(curve: Curve, sums: Curve) -> tuple[float, float]:
    """Return the seconds of one row, which are those of reading the weights, and of each row among
    many, both without the sums.
    """
    few_s, many_s, more_s = (curve.at(rows) - sums.at(rows) for rows in (1, *_MANY))
    return few_s, (more_s - many_s) / (_MANY[1] - _MANY[0])
