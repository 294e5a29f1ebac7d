"""A latency model: counted costs times measured curves, corrected by what steps really took.

LLMStation section 4.2 and HARLI section 5 predict from linear models of counted work, and trust
records over models once there are some. So here: a `Profile` holds seconds by number of rows,
measured once (or modelled), for the pieces that a step is made of; the counts of
`scheduling.counts` carry it over to other adapters and lengths; and every measured step moves a
correction for steps of its kind. The margin follows the errors of recent predictions.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from math import inf

import msgspec
from msgspec import structs

from coserve.scheduling.corrections import Corrections, StepOverhead
from coserve.scheduling.counts import JobCounts
from coserve.scheduling.plan import JobProgress, RequestInfo, RequestProgress
from coserve.scheduling.profile import Profile, seconds_at
from coserve.scheduling.sharing import SharingModel

# Answers that follow from the profile alone, and are kept.
_MAX_REMEMBERED = 256


class ForwardLoad(msgspec.Struct, kw_only=True):
    """The load of a forward pass: sums that grow as rows are added."""

    rows: int = 0
    """Number of rows."""
    sampled: int = 0
    """Rows for which a token is chosen."""
    drawn: int = 0
    """Those of them whose token is sampled."""
    masked: int = 0
    """Those of them whose token a grammar restricts."""
    scored: int = 0
    """Rows of prompts whose next token is scored."""
    spans: int = 0
    """Runs of consecutive rows of one work item."""
    pairs: float = 0.0
    """Pairs of a row and a key in windows and prefill chunks."""
    keys: int = 0
    """Keys that are read from the cache."""
    bypasses: int = 0
    """Bypasses that run."""
    windows: int = 0
    """Number of windows."""
    window_rows: float = 0.0
    """Rows of windows, each weighted by its job's cost relative to the reference job's."""
    window_pairs: float = 0.0
    """Pairs of windows."""
    window_bypasses: int = 0
    """Bypasses of windows."""
    windows_apart: int = 0
    """Windows of jobs that prevent a forward pass from running as one call."""
    versions: set[str] = msgspec.field(default_factory=set)
    """Adapter versions of requests."""

    def add_decodes(self, requests: Sequence[RequestProgress]) -> float:
        """Add one row of each of many requests that have their next token after it. Returns the sum
        of their paces (1 / TPOT), in tokens per second.
        """
        num_requests, num_past, drawn, masked = len(requests), 0, 0, 0
        paces, versions = 0.0, self.versions
        # Some hundred requests come by in each plan: one loop, with nothing looked up twice.
        for request in requests:
            info = request.info
            num_past += request.num_past
            paces += 1 / info.tpot_s
            if info.draws:
                drawn += 1
            if info.is_masked:
                masked += 1
            version = info.version
            if version and version not in versions:
                self._add_version(info)
        self.rows += num_requests
        self.spans += num_requests
        self.sampled += num_requests
        self.drawn += drawn
        self.masked += masked
        self.keys += num_requests + num_past
        return paces

    def add_request(self, request: RequestProgress, rows: int) -> None:
        """Add the next rows of a request."""
        self.rows += rows
        self.spans += 1
        self.keys += request.num_past + rows
        # A row sees the past, and on average half of the rows that run with it.
        if rows > 1:
            self.pairs += rows * (request.num_past + rows / 2)
        # A token is sampled only after the last row of the prompt.
        if rows == request.num_rows:
            self.sampled += 1
            self.drawn += request.info.draws
            self.masked += request.info.is_masked
        self.scored += min(rows, request.num_scored)
        self._add_version(request.info)

    def _add_version(self, info: RequestInfo) -> None:
        if info.version and info.version not in self.versions:
            self.versions.add(info.version)
            self.bypasses += info.num_bypasses


def tasklet_section(model: str) -> str:
    """Return the section of corrections for tasklets of a model; "" is the model that serves.

    A model that does not serve has its own: its weights may differ from the reference job's in any
    way, and take time to load.
    """
    return f"backward {model}" if model else "backward"


class LatencyModel:
    """Predicted seconds of a plan's pieces. Arithmetic alone: no clock, no I/O."""

    def __init__(self, profile: Profile) -> None:
        """Predict by a profile.

        `corrections` holds the learned errors of its pieces, `sharing` their speeds on a divided
        device, and `overhead` the time of steps outside all of them.
        """
        self.use_profile(profile)

    def use_profile(self, profile: Profile) -> None:
        """Replace the profile; what steps have taught about the last one is forgotten."""
        self.profile, self.sharing = profile, SharingModel(profile.sharing)
        self._forward, self._head = profile.forward.table(), profile.head.table()
        self._sample, self._score, self._mask = (
            each.table() for each in (profile.sample, profile.score, profile.mask)
        )
        self._loss, self._backward = profile.loss.table(), profile.backward.table()
        self.corrections, self.overhead = Corrections(), StepOverhead()
        # Costs by job, relative to the reference job's (`_weigh`).
        self._weights: dict[JobCounts, tuple[float, float, float]] = {}
        self._remembered: dict[Hashable, tuple[int, ...]] = {}

    # -- questions --------------------------------------------------------------

    def forward_s(self, load: ForwardLoad) -> float:
        """Return the seconds of a forward pass, with sampling."""
        if not load.rows:
            return 0.0
        return self._raw_forward_s(load) * self.forward_correction(load)

    def forward_correction(self, load: ForwardLoad) -> float:
        """Return the ratio of these seconds to the profile's."""
        return self.corrections.of("forward", load.rows, load.windows > 0)

    def decode_s(self, *, num_requests: int, context: int) -> float:
        """Return the seconds of a step that does nothing but decode requests with this many tokens
        in the cache.
        """
        if not num_requests:
            return 0.0
        # As `forward_s` of such a load, which would take longer to make: some plans call it often.
        p = self.profile
        raw = seconds_at(self._forward, num_requests) + seconds_at(self._head, num_requests)
        raw += num_requests * (context + 1) * p.s_per_key
        raw += num_requests * p.s_per_span
        if num_requests <= p.one_call.rows:
            raw -= p.one_call.saved_s
        return raw * self.corrections.of("forward", num_requests, False)

    def prompt_s(self, rows: int, num_past: int = 0) -> float:
        """Return the seconds of rows of one prompt alone, with attention to one another and to
        num_past earlier tokens.
        """
        if not rows:
            return 0.0
        # As `forward_s` of such a load, which would take longer to make: plans call it for each
        # prompt.
        p, pairs = self.profile, rows * (num_past + rows / 2)
        raw = seconds_at(self._forward, rows) + seconds_at(self._head, 1)
        raw += pairs * p.s_per_pair
        raw += (num_past + rows) * p.s_per_key
        raw += p.s_per_span
        if rows <= p.one_call.rows and pairs <= p.one_call.prompt_pairs:
            raw -= p.one_call.saved_s
        return raw * self.corrections.of("forward", rows, False)

    def with_decodes(
        self, load: ForwardLoad, requests: Sequence[RequestProgress]
    ) -> Callable[[int], float]:
        """Return a function from a number to the seconds of a load with the next token of the first
        of these requests added, as many as the number.
        """

        def seconds(number: int) -> float:
            # A copy with a set of its own: the load itself must not grow.
            more = structs.replace(load, versions=set(load.versions))
            more.add_decodes(requests[:number])
            return self.forward_s(more)

        return seconds

    def with_request(self, load: ForwardLoad, request: RequestProgress) -> Callable[[int], float]:
        """Return a function from a number of rows to the seconds of a load with this many of a
        request's prompt added.

        It holds until the load changes. It is made for searches, which call it for many numbers.
        """
        p, info, num_past = self.profile, request.info, request.num_past
        others, has_windows = load.rows, load.windows > 0
        one_call_s = self._one_call_saved_s(load.windows, load.window_rows, load.window_bypasses)
        others_pairs, most_rows = (
            load.pairs - load.window_pairs,
            0 if load.windows_apart else p.one_call.rows,
        )
        # Everything that does not depend on the number of rows.
        raw_s = self._sum_s(load) - seconds_at(self._forward, others)
        # Added if the prompt ends with this step, so that a token is sampled.
        whole_s = seconds_at(self._head, load.sampled + 1) - seconds_at(self._head, load.sampled)
        if info.draws:
            whole_s += seconds_at(self._sample, load.drawn + 1) - seconds_at(
                self._sample, load.drawn
            )
        if info.is_masked:
            whole_s += seconds_at(self._mask, load.masked + 1) - seconds_at(self._mask, load.masked)
        scored_s = seconds_at(self._score, load.scored)
        is_new = bool(info.version) and info.version not in load.versions
        bypass_s = info.num_bypasses * p.s_per_bypass if is_new else 0.0

        def seconds(rows: int) -> float:
            raw = (
                raw_s
                + seconds_at(self._forward, others + rows)
                + (num_past + rows) * p.s_per_key
                + p.s_per_span
            )
            pairs = rows * (num_past + rows / 2) if rows > 1 else 0.0
            raw += pairs * p.s_per_pair
            if others + rows <= most_rows and others_pairs + pairs <= p.one_call.prompt_pairs:
                raw -= one_call_s
            if rows == request.num_rows:
                raw += whole_s
            if request.num_scored:
                raw += (
                    seconds_at(self._score, load.scored + min(rows, request.num_scored)) - scored_s
                )
            return (raw + bypass_s) * self.corrections.of("forward", others + rows, has_windows)

        return seconds

    def with_window(self, load: ForwardLoad, job: JobProgress) -> Callable[[int], float]:
        """Return a function from a number of rows to the seconds of a load with a window of a job
        added.
        """
        p, others = self.profile, load.rows
        weight = self._weigh(job.info.counts)[0]
        most_rows = self._most_rows_at_once(load) if job.info.counts.runs_at_once else 0
        row_s = job.mean_context_len * p.s_per_pair + weight * p.s_per_window_row
        num_bypasses, saved_s_per_row = (
            job.info.counts.num_bypasses,
            weight * p.one_call.saved_s_per_window_row,
        )
        saved_s = (
            self._one_call_saved_s(1, load.window_rows, load.window_bypasses + num_bypasses)
            if most_rows
            else 0.0
        )
        raw_s = self._sum_s(load) - seconds_at(self._forward, others) if others else 0.0
        raw_s += p.s_per_span + num_bypasses * (p.s_per_bypass + p.s_per_window_bypass)

        def seconds(rows: int) -> float:
            raw = raw_s + seconds_at(self._forward, others + rows) + rows * row_s
            if others + rows <= most_rows:
                raw -= saved_s + rows * saved_s_per_row
            return raw * self.corrections.of("forward", others + rows, True)

        return seconds

    def add_window(self, load: ForwardLoad, job: JobProgress, rows: int) -> None:
        """Add a window to a load."""
        load.rows += rows
        load.spans += 1
        load.pairs += rows * job.mean_context_len
        load.window_pairs += rows * job.mean_context_len
        load.bypasses += job.info.counts.num_bypasses
        load.window_bypasses += job.info.counts.num_bypasses
        load.windows += 1
        load.windows_apart += not job.info.counts.runs_at_once
        load.window_rows += rows * self._weigh(job.info.counts)[0]

    def loss_s(self, rows: int) -> float:
        """Return the seconds of trained rows through the loss."""
        return seconds_at(self._loss, rows) * self.corrections.of("loss", rows, False)

    def tasklet_s(self, job: JobProgress, rows: int) -> float:
        """Return the seconds of one tasklet: `tasklets_s` for one job, which plans call most
        often.
        """
        _, by_row, pair_s = self._weigh(job.info.counts)
        raw = (
            # Computed as in `tasklets_s`, so that both round to the same number.
            seconds_at(self._backward, rows) * (rows * by_row) / rows
            + rows * job.mean_context_len * pair_s
        )
        return raw * self.corrections.of(tasklet_section(job.info.counts.model), rows, False)

    def tasklets_s(self, windows: Sequence[tuple[JobProgress, int]]) -> float:
        """Return the seconds of one tasklet of each job, all at the same part of the model, as one
        batch.

        As in MuxTune's model of a stage (section 3.3), the backbone's share follows from the sum of
        the rows, and attention from each job's own.

        Args:
            windows: Jobs with the rows of their tasklets.
        """
        num_rows, weighed, pairs_s = 0, 0.0, 0.0
        for job, rows in windows:
            _, by_row, pair_s = self._weigh(job.info.counts)
            num_rows += rows
            weighed += rows * by_row
            pairs_s += rows * job.mean_context_len * pair_s
        raw = seconds_at(self._backward, num_rows) * weighed / num_rows + pairs_s
        return raw * self.corrections.of(
            tasklet_section(windows[0][0].info.counts.model), num_rows, False
        )

    def backward_weight(self, job: JobProgress) -> float:
        """Return the cost of a row of a job's tasklet relative to the reference job's."""
        return self._weigh(job.info.counts)[1]

    def batch_s(self, num_rows: int, weighed: float) -> float:
        """Return the seconds of a tasklet without attention, as profiled: corrections of single
        sizes would upset a comparison of sizes.

        Args:
            num_rows: Rows of the tasklet.
            weighed: Sum of their weights.
        """
        return seconds_at(self._backward, num_rows) * weighed / num_rows

    def pack_s(self, job: JobProgress) -> float:
        """Return the seconds of a whole pack alone, forward and backward in one piece."""
        rows = job.num_rows
        if job.info.counts.model:
            return job.num_parts_left * self.tasklet_s(job, rows)
        forward_s = self.with_window(ForwardLoad(), job)(rows)
        return forward_s + self.loss_s(rows) + job.num_parts_left * self.tasklet_s(job, rows)

    def remember(self, key: Hashable, work_out: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Return a cached answer, worked out on the first call; it must follow from the key and the
        profile alone.
        """
        answer = self._remembered.get(key)
        if answer is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            answer = self._remembered[key] = work_out()
        return answer

    def update_s(self, counts: JobCounts) -> float:
        """Return the seconds of an optimizer step."""
        raw = self.profile.update_s + counts.num_parameters * self.profile.s_per_parameter
        return raw * self.corrections.of("update", counts.num_parameters, False)

    def rerun_s(self, num_tokens: int) -> float:
        """Return the additional seconds of a request's next row if the tokens before it must be run
        again.

        The weights are read in either case. Both are corrected alike: corrections of single sizes
        would upset the difference.
        """
        keys = num_tokens + 1
        whole = ForwardLoad(rows=keys, sampled=1, spans=1, pairs=keys * keys / 2, keys=keys)
        alone = ForwardLoad(rows=1, sampled=1, spans=1, keys=keys)
        return (self._raw_forward_s(whole) - self._raw_forward_s(alone)) * self.forward_correction(
            whole
        )

    def copy_s(self, num_bytes: int) -> float:
        """Return the seconds of copying pages from or to the host; inf if unknown."""
        s_per_byte = self.profile.s_per_copied_byte
        return inf if s_per_byte is None else num_bytes * s_per_byte

    def observe_step(self, *, predicted_s: float, measured_s: float) -> None:
        """Record a whole step, whose sections `corrections` have seen."""
        if predicted_s > 0 and measured_s > 0:
            self.corrections.observe_step(predicted_s=predicted_s, measured_s=measured_s)
            self.sharing.count_step()

    def as_seen(self) -> "LatencyModel":
        """Return a copy that takes everything learned as seen just now."""
        copy = deepcopy(self)
        copy.corrections.refresh()
        copy.sharing.refresh()
        return copy

    # -- arithmetic -------------------------------------------------------------

    def _raw_forward_s(self, load: ForwardLoad) -> float:
        seconds = self._sum_s(load)
        if load.rows <= self._most_rows_at_once(load):
            seconds -= self._one_call_saved_s(load.windows, load.window_rows, load.window_bypasses)
        return seconds

    def _most_rows_at_once(self, load: ForwardLoad) -> int:
        """Return the maximum number of rows with which a load runs as one call, if no more rows of
        prompts are added; 0 for never.
        """
        one_call = self.profile.one_call
        # Rows of requests must be among them, with few enough pairs of prompts.
        may = (
            not load.windows_apart
            and load.spans > load.windows
            and load.pairs - load.window_pairs <= one_call.prompt_pairs
        )
        return one_call.rows if may else 0

    def _one_call_saved_s(self, windows: int, window_rows: float, window_bypasses: int) -> float:
        p, one_call = self.profile, self.profile.one_call
        if not windows:
            return one_call.saved_s
        bypasses_s = window_bypasses * p.s_per_window_bypass
        return one_call.window_saved_s + window_rows * one_call.saved_s_per_window_row + bypasses_s

    def _sum_s(self, load: ForwardLoad) -> float:
        """Return the seconds of a forward pass that runs block by block."""
        p = self.profile
        return (
            seconds_at(self._forward, load.rows)
            + seconds_at(self._head, load.sampled)
            + (seconds_at(self._sample, load.drawn) if load.drawn else 0.0)
            + (seconds_at(self._mask, load.masked) if load.masked else 0.0)
            + (seconds_at(self._score, load.scored) if load.scored else 0.0)
            + load.pairs * p.s_per_pair
            + load.keys * p.s_per_key
            + load.spans * p.s_per_span
            + load.bypasses * p.s_per_bypass
            + load.window_bypasses * p.s_per_window_bypass
            + load.window_rows * p.s_per_window_row
        )

    def _weigh(self, counts: JobCounts) -> tuple[float, float, float]:
        """Return a job's costs relative to the reference job's: of a window's row and of a
        tasklet's row; and the seconds of a backward pair.
        """
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
