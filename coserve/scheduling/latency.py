"""How long a step will take: counted costs times measured curves, corrected by what steps really took.

LLMStation section 4.2 and HARLI section 5 predict from linear models of counted work, and trust records over models
once there are some. So here: a `Profile` holds seconds by number of rows, measured once (or made from a datasheet), for
the pieces that a step is made of; the counts of `scheduling.counts` carry it over to other adapters and lengths; and
every measured step moves a correction for steps of its kind. The margin is what recent predictions were wrong by.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coserve.scheduling.counts import JobCounts, ModelCounts
from coserve.scheduling.plan import JobView, RequestView
from coserve.scheduling.sharing import Sharing, SharingModel

# Rows up to which curves are tables.
_TABLE_ROWS = 4096
# Weight of the newest step in a correction, and steps whose errors the margin looks at.
_CORRECTION_WEIGHT = 0.15
# How much of a correction is left after a step in which nothing of its kind was seen.
_TRUST_PER_STEP = 0.99
_NUM_ERRORS = 256
_NUM_STEPS_PER_MARGIN = 16
_MARGIN_QUANTILE = 0.95
_LEAST_MARGIN, _MOST_MARGIN = 0.02, 0.5

# A profile is to be corrected once steps have taken this much more or less than it says, after as many steps.
_FAR_OFF, _SETTLED_STEPS = 1.15, 500

# Section, the order of magnitude of its rows, and whether windows are among them.
_Kind = tuple[str, int, bool]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds at some numbers of rows, rising; between them as a line, beyond them as the last line continues."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or len(self.rows) < 2 or list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"a curve needs two rising numbers of rows or more, not {self.rows}")

    def at(self, rows: int) -> float:
        if rows <= 0:
            return 0.0
        if rows <= self.rows[0]:
            return self.seconds[0]
        high = min(bisect_right(self.rows, rows), len(self.rows) - 1)
        (r0, r1), (s0, s1) = self.rows[high - 1 : high + 1], self.seconds[high - 1 : high + 1]
        return s0 + (s1 - s0) * (rows - r0) / (r1 - r0)

    def table(self) -> list[float]:
        """Seconds by number of rows, never falling, however noisy the measurements were."""
        values, highest = [], 0.0
        for rows in range(_TABLE_ROWS + 1):
            highest = max(highest, self.at(rows))
            values.append(highest)
        return values


# Of what was not measured.
FREE = Curve(rows=(1, 2), seconds=(0.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a device needs for the pieces of a step of one model.

    forward: rows of requests through all blocks. head: rows through the head, and the likeliest token of each. sample:
    what drawing a token of each row takes more than that, at temperature 1. score: rows through the head to the
    log-probability of the next token of each, as for prompts. loss: trained rows through the head, forward and
    backward. backward: a tasklet of the reference job (`job`), on rows without keys. s_per_pair, backward_s_per_pair:
    attention of a row to a key of its window in all blocks, and in one block backward. s_per_key: a key that a span's
    attention reads. s_per_span: a span more. s_per_bypass: a site of an adapter more. s_per_window_row: what a window's
    row of the reference job costs more than a request's (its bypasses, and saving). s_per_parameter, update_s: an
    optimizer step, by what it moves and at least. sharing: of a device that can be divided.
    """

    model: ModelCounts
    job: JobCounts
    forward: Curve
    head: Curve
    loss: Curve
    backward: Curve
    s_per_pair: float
    backward_s_per_pair: float
    s_per_key: float
    s_per_span: float
    s_per_bypass: float
    s_per_window_row: float
    s_per_parameter: float
    update_s: float
    sample: Curve = FREE
    score: Curve = FREE
    sharing: Sharing | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Profile":
        """The inverse, also for profiles from before there was `sample`, `score` and `sharing`; ValueError, TypeError
        or KeyError for anything else.
        """
        curves = {
            name: Curve(rows=tuple(fields[name]["rows"]), seconds=tuple(fields[name]["seconds"]))
            for name in ("forward", "head", "loss", "backward", "sample", "score")
            if name in fields or name not in ("sample", "score")
        }
        counts = {"model": ModelCounts(**fields["model"]), "job": JobCounts(**fields["job"])}
        sharing = None if fields.get("sharing") is None else Sharing.from_json(fields["sharing"])
        return cls(**{**fields, **curves, **counts, "sharing": sharing})


@dataclass(kw_only=True, slots=True)
class ForwardLoad:
    """What a forward pass is made of; sums that grow as rows are added.

    sampled: rows of which a token is chosen; drawn: of these, by chance. scored: rows of prompts whose next token is
    scored. pairs: of a row and a key in windows and prefill chunks. keys: that are read. bypasses: bypasses that run.
    windows: how many there are. window_rows: theirs, each weighed by its job's cost beside the reference job's.
    """

    rows: int = 0
    sampled: int = 0
    drawn: int = 0
    scored: int = 0
    spans: int = 0
    pairs: float = 0.0
    keys: int = 0
    bypasses: int = 0
    windows: int = 0
    window_rows: float = 0.0
    versions: set[str] = field(default_factory=set)

    def add_decodes(self, requests: Sequence[RequestView]) -> None:
        """One row of each of many requests whose next token can be chosen after it, quickly."""
        num_requests = len(requests)
        self.rows += num_requests
        self.spans += num_requests
        self.sampled += num_requests
        self.drawn += sum([request.draws for request in requests])
        self.keys += num_requests + sum([request.num_past for request in requests])
        for version, num_bypasses in {request.version: request.num_bypasses for request in requests}.items():
            self._add_version(version, num_bypasses)

    def add_request(self, request: RequestView, rows: int) -> None:
        """The next rows of a request."""
        self.rows += rows
        self.spans += 1
        self.keys += request.num_past + rows
        if rows > 1:
            self.pairs += rows * (request.num_past + rows / 2)
        if rows == request.num_rows:
            self.sampled += 1
            self.drawn += request.draws
        self.scored += min(rows, request.num_scored)
        self._add_version(request.version, request.num_bypasses)

    def _add_version(self, version: str, num_bypasses: int) -> None:
        if version and version not in self.versions:
            self.versions.add(version)
            self.bypasses += num_bypasses


class LatencyModel:
    """Seconds of what a plan holds. Arithmetic alone: no clock, no I/O.

    sharing: what these become where the device is divided.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile, self.sharing = profile, SharingModel(profile.sharing)
        self._forward, self._head = profile.forward.table(), profile.head.table()
        self._sample, self._score = profile.sample.table(), profile.score.table()
        self._loss, self._backward = profile.loss.table(), profile.backward.table()
        # For steps of a kind, for a section, and (under "") for all: what predictions are off by, and when it was seen.
        self._seen: dict[_Kind | str, tuple[float, int]] = {}
        self._corrections: dict[_Kind, float] = {}  # worked out from these, until the next step
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)
        self._num_steps = 0
        self.margin = 0.1  # until errors are known
        # For one job, what rows weigh beside the reference job's: (window rows, tasklets).
        self._weights: dict[JobCounts, tuple[float, float, float]] = {}

    # -- questions --------------------------------------------------------------

    def forward_s(self, load: ForwardLoad) -> float:
        """Seconds of a forward pass, with sampling."""
        if not load.rows:
            return 0.0
        return self._raw_forward_s(load) * self.forward_correction(load)

    def forward_correction(self, load: ForwardLoad) -> float:
        """Of these seconds, over those of the profile."""
        return self._correction("forward", load.rows, load.windows > 0)

    def decode_s(self, *, num_requests: int, context: int) -> float:
        """Seconds of a step that decodes requests with this many tokens in the cache, and does nothing else."""
        return self.forward_s(
            ForwardLoad(rows=num_requests, sampled=num_requests, spans=num_requests, keys=num_requests * (context + 1))
        )

    def prompt_s(self, rows: int, num_past: int = 0) -> float:
        """Seconds of as many rows of one prompt alone, with attention to one another and to num_past tokens before."""
        if not rows:
            return 0.0
        return self.forward_s(
            ForwardLoad(rows=rows, sampled=1, spans=1, pairs=rows * (num_past + rows / 2), keys=num_past + rows)
        )

    def with_request(self, load: ForwardLoad, request: RequestView) -> Callable[[int], float]:
        """The seconds of a load with some rows of a request's prompt added to it, by their number.

        To be asked before the load changes; a search asks for many numbers.
        """
        p, num_past = self.profile, request.num_past
        others, has_windows = load.rows, load.windows > 0
        raw_s = self._raw_forward_s(load) - _at(self._forward, others)
        whole_s = _at(self._head, load.sampled + 1) - _at(self._head, load.sampled)
        if request.draws:
            whole_s += _at(self._sample, load.drawn + 1) - _at(self._sample, load.drawn)
        is_new = bool(request.version) and request.version not in load.versions
        bypass_s = request.num_bypasses * p.s_per_bypass if is_new else 0.0

        def seconds(rows: int) -> float:
            raw = raw_s + _at(self._forward, others + rows) + (num_past + rows) * p.s_per_key + p.s_per_span
            if rows > 1:
                raw += rows * (num_past + rows / 2) * p.s_per_pair
            if rows == request.num_rows:
                raw += whole_s
            if request.num_scored:
                raw += _at(self._score, load.scored + min(rows, request.num_scored)) - _at(self._score, load.scored)
            return (raw + bypass_s) * self._correction("forward", others + rows, has_windows)

        return seconds

    def with_window(self, load: ForwardLoad, job: JobView) -> Callable[[int], float]:
        """The same for a window of a job."""
        p, others = self.profile, load.rows
        row_s = job.mean_context_len * p.s_per_pair + self._weigh(job.counts)[0] * p.s_per_window_row
        raw_s = self._raw_forward_s(load) - _at(self._forward, others)
        raw_s += p.s_per_span + job.counts.num_bypasses * p.s_per_bypass

        def seconds(rows: int) -> float:
            raw = raw_s + _at(self._forward, others + rows) + rows * row_s
            return raw * self._correction("forward", others + rows, True)

        return seconds

    def add_window(self, load: ForwardLoad, job: JobView, rows: int) -> None:
        """Add a window to a load."""
        load.rows += rows
        load.spans += 1
        load.pairs += rows * job.mean_context_len
        load.bypasses += job.counts.num_bypasses
        load.windows += 1
        load.window_rows += rows * self._weigh(job.counts)[0]

    def loss_s(self, rows: int) -> float:
        """Seconds of some trained rows' way through the loss."""
        return _at(self._loss, rows) * self._correction("loss", rows, False)

    def tasklet_s(self, job: JobView, rows: int) -> float:
        """Seconds of one tasklet."""
        return self.tasklets_s(((job, rows),))

    def tasklets_s(self, windows: Sequence[tuple[JobView, int]]) -> float:
        """Seconds of one tasklet of each job, with its rows, all at the same part of the model, as one batch.

        As in MuxTune's model of a stage (section 3.3), the backbone's share follows from the sum of the rows, and
        attention from each job's own.
        """
        num_rows, weighed, pairs_s = 0, 0.0, 0.0
        for job, rows in windows:
            _, by_row, pair_s = self._weigh(job.counts)
            num_rows += rows
            weighed += rows * by_row
            pairs_s += rows * job.mean_context_len * pair_s
        raw = _at(self._backward, num_rows) * weighed / num_rows + pairs_s
        return raw * self._correction("backward", num_rows, False)

    def backward_weight(self, job: JobView) -> float:
        """What a row of a job's tasklet costs beside the reference job's."""
        return self._weigh(job.counts)[1]

    def batch_s(self, num_rows: int, weighed: float) -> float:
        """Seconds of a tasklet without attention, as profiled: corrections of single sizes would upset a comparison of
        sizes. weighed: the sum of its rows' weights.
        """
        return _at(self._backward, num_rows) * weighed / num_rows

    def pack_s(self, job: JobView) -> float:
        """Seconds of a whole pack alone, forward and backward in one piece."""
        rows = job.num_rows
        forward_s = self.with_window(ForwardLoad(), job)(rows)
        return forward_s + self.loss_s(rows) + job.num_parts_left * self.tasklet_s(job, rows)

    def update_s(self, job: JobView) -> float:
        """Seconds of an optimizer step."""
        raw = self.profile.update_s + job.counts.num_parameters * self.profile.s_per_parameter
        return raw * self._correction("update", job.counts.num_parameters, False)

    # -- what was learned -------------------------------------------------------

    def observe(self, section: str, rows: int, windows: bool, *, predicted_s: float, measured_s: float) -> None:
        """A section ("forward", "loss", "backward", "update") of a step was predicted with its correction, and took so
        long.
        """
        if predicted_s <= 0 or measured_s <= 0:
            return
        kind = (section, rows.bit_length(), windows)
        # What the correction would have had to be. (It was predicted with one that age had moved.)
        right = self._correction(section, rows, windows)
        # One step that was held up by something else must not move it far.
        right *= min(2.0, max(0.5, measured_s / predicted_s))
        found: dict[_Kind | str, float] = {}
        for key in (kind, section, ""):
            old, weight = self._seen[key][0] if key in self._seen else 1.0, _CORRECTION_WEIGHT
            if key == kind and kind not in self._seen:
                old, weight = self._wider(section), 0.5
            found[key] = old * (right / old) ** weight
        self._seen |= {key: (correction, self._num_steps) for key, correction in found.items()}
        self._corrections.clear()

    def observe_step(self, *, predicted_s: float, measured_s: float) -> None:
        """A whole step: what the margin is made of."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        self._errors.append(measured_s / predicted_s - 1)
        self._num_steps += 1
        self.sharing.count_step()
        self._corrections.clear()
        if self._num_steps % _NUM_STEPS_PER_MARGIN == 0:
            late = sorted(self._errors)[int(_MARGIN_QUANTILE * (len(self._errors) - 1))]
            self.margin = min(_MOST_MARGIN, max(_LEAST_MARGIN, late))

    def settled_profile(self) -> Profile | None:
        """The profile as steps have shown it to be, if that is far from what it says, and was seen for long."""
        factors = {section: self._wider(section) for section in ("forward", "loss", "backward", "update")}
        if self._num_steps < _SETTLED_STEPS or all(1 / _FAR_OFF < each < _FAR_OFF for each in factors.values()):
            return None
        p, by = self.profile, factors

        def corrected(section: str, curve: Curve) -> Curve:
            seconds = [s * self._correction(section, n, False) for n, s in zip(curve.rows, curve.seconds, strict=True)]
            return Curve(rows=curve.rows, seconds=tuple(seconds))

        def scaled(curve: Curve) -> Curve:
            return Curve(rows=curve.rows, seconds=tuple([s * by["forward"] for s in curve.seconds]))

        return replace(
            p,
            forward=corrected("forward", p.forward),
            head=scaled(p.head),
            sample=scaled(p.sample),
            score=scaled(p.score),
            loss=corrected("loss", p.loss),
            backward=corrected("backward", p.backward),
            s_per_pair=p.s_per_pair * by["forward"],
            s_per_key=p.s_per_key * by["forward"],
            s_per_span=p.s_per_span * by["forward"],
            s_per_bypass=p.s_per_bypass * by["forward"],
            s_per_window_row=p.s_per_window_row * by["forward"],
            backward_s_per_pair=p.backward_s_per_pair * by["backward"],
            s_per_parameter=p.s_per_parameter * by["update"],
            update_s=p.update_s * by["update"],
        )

    def recent_errors(self) -> Sequence[float]:
        """|measured - predicted| / measured of recent steps, sorted."""
        return sorted(abs(error) / (1 + error) for error in self._errors)

    # -- arithmetic -------------------------------------------------------------

    def _raw_forward_s(self, load: ForwardLoad) -> float:
        p = self.profile
        return (
            _at(self._forward, load.rows)
            + _at(self._head, load.sampled)
            + (_at(self._sample, load.drawn) if load.drawn else 0.0)
            + (_at(self._score, load.scored) if load.scored else 0.0)
            + load.pairs * p.s_per_pair
            + load.keys * p.s_per_key
            + load.spans * p.s_per_span
            + load.bypasses * p.s_per_bypass
            + load.window_rows * p.s_per_window_row
        )

    def _weigh(self, counts: JobCounts) -> tuple[float, float, float]:
        """Of a job beside the reference job: a window's row, a tasklet's rows; and seconds of a pair backward."""
        weights = self._weights.get(counts)
        if weights is None:
            job, p = self.profile.job, self.profile
            pair = counts.backward_flops_per_pair / max(1.0, job.backward_flops_per_pair)
            weights = self._weights[counts] = (
                counts.flops_per_row / max(1.0, job.flops_per_row),
                counts.backward_flops_per_row / max(1.0, job.backward_flops_per_row),
                pair * p.backward_s_per_pair,
            )
        return weights

    def _correction(self, section: str, rows: int, windows: bool) -> float:
        kind = (section, rows.bit_length(), windows)
        found = self._corrections.get(kind)
        if found is None:
            found = self._corrections[kind] = self._aged(kind, self._wider(section))
        return found

    def _wider(self, section: str) -> float:
        """The correction of a section, or ("") of all."""
        every = self._aged("", 1.0)
        return self._aged(section, every) if section else every

    def _aged(self, key: _Kind | str, wider: float) -> float:
        """A correction that gives way to the wider one the longer it was not seen: a kind of step that once took very
        long would never be tried again.
        """
        if key not in self._seen:
            return wider
        correction, step = self._seen[key]
        trust = _TRUST_PER_STEP ** (self._num_steps - step)
        found: float = wider * (correction / wider) ** trust
        return found


def _at(table: list[float], rows: int) -> float:
    if rows <= _TABLE_ROWS:
        return table[rows]
    return table[-1] + (table[-1] - table[_TABLE_ROWS // 2]) / (_TABLE_ROWS // 2) * (rows - _TABLE_ROWS)
