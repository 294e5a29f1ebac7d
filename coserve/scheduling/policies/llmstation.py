"""LLMStation's scheduler (sections 4 and 5): before every decode step a planner decides how many
tuning tasklets run with it.

Algorithm 1: requests that arrive are prefilled at once, all of them, and tuning is suspended
meanwhile, unless their prompts are short. Otherwise a decode step is planned: while a job goes
forward, it is fused with as many of the job's tokens as keep the TPOT SLO; while it goes backward,
with as many tasklets of a layer as the planner allows, beside it where the device can be divided,
after it where not. Deferred continuous batching: while no request runs, those that arrive wait for
others for a share of the TTFT SLO.

The planner has the objective and the constraints of section 4.2, not all of the freedom of its
inequality (1), by which some of a decode step's N_d,all tasklets may run beside tuning and the
others alone. There both sides contend for the whole device, here each has units of its own until
the forward pass ends: a decode step runs beside tuning as a whole (N_d = N_d,all) or not at all.
What is chosen in place of N_d is the partition, and with it l_d: of those on which N_d,all l_d <=
SLO_d, the one with the largest N_p <= N_d,all l_d / l_p. Where decoding beside tuning would pass
SLO_d on all of them, (1) would still have part of it beside tuning; here tasklets then follow the
step, as on a device that cannot be divided. There a tasklet takes all of its time from decoding,
and (1) is N_p <= (SLO_d - N_d,all l_d0) / l_p.

Latencies are those that were recorded of steps like this, or a linear model's
(`scheduling.records`). For steps on a partition that were not recorded, the profile's speeds of its
parts stand in for the linear model; and records of them give way to it with age: a partition that
was too slow once would not be planned, and so not recorded, again. Of the two ways to fuse a
forward pass that section 5.2 has, this is the one by tokens: windows here go through all layers.
Where not even one layer of a whole sequence fits, tasklets are cut by rows, as operators of a layer
are there.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from typing import ClassVar

from msgspec import structs

from coserve.scheduling.building import MIN_WINDOW_ROWS, PlanBuilder
from coserve.scheduling.history import History, StepView
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.plan import JobProgress, Partition, Plan, RequestProgress, View
from coserve.scheduling.policies._sides import divided
from coserve.scheduling.policies._turns import next_job, slo_s
from coserve.scheduling.policies.base import Policy, setting
from coserve.scheduling.records import Key, LatencyRecords, PieceWork, forward_work, tasklet_work

# Sizes that windows may have, so that steps recur and records are found again.
WINDOWS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def most_beside(slo_s: float, beside_s: float, tasklet_s: float) -> int:
    """Return the largest N_p with N_d,all l_d <= SLO_d and N_p l_p <= N_d,all l_d.

    Args:
        slo_s: SLO_d.
        beside_s: Time of the decode step, all of it beside tuning: N_d,all l_d.
        tasklet_s: Time of a tuning tasklet beside decoding: l_p.
    """
    return int(beside_s / tasklet_s) if beside_s <= slo_s else 0


def _size(rows: int) -> int:
    """Return the size under which a window or a tasklet is recorded."""
    return next((size for size in WINDOWS if size >= rows), WINDOWS[-1])


def _units(partition: Partition) -> tuple[int, int]:
    """Return the units under which a partition is recorded."""
    return partition.forward_units, partition.backward_units


def _adapters(job: JobProgress | None, requests: Sequence[RequestProgress]) -> Hashable:
    """Return the group of records: what the job trains, and the bypasses of the requests'
    adapters.
    """
    used = {request.info.version: request.info.num_bypasses for request in requests}
    return None if job is None else job.info.counts, tuple(sorted(used.values()))


def _load(requests: Sequence[RequestProgress]) -> ForwardLoad:
    load = ForwardLoad()
    decoding = [request for request in requests if request.num_rows == 1]
    load.add_decodes(decoding)
    if len(decoding) < len(requests):
        for request in requests:
            if request.num_rows != 1:
                load.add_request(request, request.num_rows)
    return load


def _fused_work(load: ForwardLoad, job: JobProgress, rows: int, latency: LatencyModel) -> PieceWork:
    more = structs.replace(load)
    latency.add_window(more, job, rows)
    return forward_work(more, latency)


@dataclass
class _Records(LatencyRecords, History):
    """Records of several kinds of step: "decode" alone; "forward" with a window; "backward", a
    tasklet after decoding. On a partition of the device: "beside", a tasklet beside decoding, and
    "divided", decoding beside tasklets.
    """

    def add(self, step: StepView) -> None:
        ids = {rows.item: rows.rows for rows in step.plan.rows if rows.kind != "window"}
        requests = [each for each in (*step.view.requests, *step.view.waiting) if each.id in ids]
        if any(request.num_rows > 1 for request in requests) or len(requests) != len(ids):
            return
        load, batch, latency = _load(requests), len(requests), step.latency
        jobs = {job.id: job for job in step.view.jobs}
        windows = [rows for rows in step.plan.rows if rows.kind == "window" and rows.item in jobs]
        tasklets = [part for part in step.plan.tasklets if part.job in jobs]
        group = _adapters(None, requests)
        if windows:
            job, rows = jobs[windows[0].item], windows[0].rows
            work = _fused_work(load, job, rows, latency)
            self.record(
                _adapters(job, requests), Key("forward", batch, _size(rows)), work, step.forward_s
            )
        elif step.plan.partition is None:
            self.record(group, Key("decode", batch, 0), forward_work(load, latency), step.forward_s)
        if not tasklets:
            return
        job, part, group = (
            jobs[tasklets[0].job],
            tasklets[0],
            _adapters(jobs[tasklets[0].job], requests),
        )
        work, size = tasklet_work(job, part.rows, latency), _size(part.rows)
        beside = step.num_beside.get(job.id, 0)
        after = step.num_tasklets.get(job.id, 0) - beside
        if after and step.plan.partition is None:
            self.record(group, Key("backward", batch, size), work, step.backward_s / after)
        if beside and (partition := step.plan.partition) is not None:
            planned, tasklet_s = step.plan.prediction, latency.tasklet_s(job, part.rows)
            for kind, seconds, predicted_s in (
                ("beside", step.beside_s / beside, tasklet_s / planned.backward_speed),
                ("divided", step.forward_s, planned.forward_s / planned.forward_speed),
            ):
                self.renew(
                    group,
                    Key(kind, batch, size, _units(partition)),
                    seconds,
                    predicted_s=predicted_s,
                )


@dataclass(frozen=True, kw_only=True)
class Llmstation(Policy):
    """LLMStation's scheduler: with every decode step as many tuning tasklets as a planner
    allows.
    """

    summary: ClassVar[str] = (
        "with every decode step, as many tuning tasklets as a planner allows (LLMStation)"
    )

    short_prompt: int = setting(
        64, "Prompts of no more tokens, all together, do not suspend tuning."
    )
    decode_share: float = setting(
        0.75, "SLO_d, as a share of the TPOT SLO: the rest is for prefills in between.", most=1
    )
    deferral: float = setting(
        0.5, "Share of the TTFT SLO for which requests are deferred while none runs.", most=1
    )

    def make_history(self) -> History:
        return _Records()

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        memory = MemoryPlan(view)
        memory.grow()
        defers = self.defers(view)
        if not defers:
            memory.admit_waiting()
        job = next_job(view, memory, requests_first=not defers)
        if defers and job is None:
            memory.admit_waiting()
        build = PlanBuilder(view, latency, memory)
        decoding = [request for request in memory.requests if request.num_rows == 1]
        prompts = (
            [request for request in memory.requests if request.num_rows > 1]
            if len(decoding) < len(memory.requests)
            else []
        )
        if sum([prompt.num_rows for prompt in prompts]) > self.short_prompt:
            build.prefill(prompts, inf)
            return build.build()
        build.decode(decoding)
        build.prefill(prompts, inf)
        if job is None:
            return build.build()
        step = _Step(
            build=build,
            requests=memory.requests,
            job=job,
            view=view,
            latency=latency,
            records=view.history or _Records(),
            budget_s=self.decode_share * slo_s(view, memory),
        )
        sides = step.add_tuning()
        if build.runs_nothing:  # an idle device makes the smallest step
            build.take(job, 0)
        return divided(build.build(), *sides) if sides else build.build()

    def defers(self, view: View) -> bool:
        """Return whether waiting requests are to wait for others."""
        return not view.requests and all(
            view.now_s < request.info.arrival_s + self.deferral * request.info.ttft_s
            for request in view.waiting
        )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step with its requests' rows, to which the planner adds work of a job."""

    build: PlanBuilder
    """Plan of the step."""
    requests: Sequence[RequestProgress]
    """Requests that run in it."""
    job: JobProgress
    """Job whose work is added."""
    view: View
    """View that it is planned from."""
    latency: LatencyModel
    """Latency model, for what the records do not hold."""
    records: LatencyRecords
    """Recorded latencies."""
    budget_s: float
    """Maximum time of the decode step (SLO_d)."""

    def add_tuning(self) -> tuple[Partition, float, float] | None:
        """Add as much of the job as fits. Returns the division of the device with the sides'
        speeds, if it is divided.
        """
        if self.job.phase == "forward":
            self._add_window()
        elif self.job.phase == "backward":
            return self._add_tasklets()
        elif self.build.seconds < self.budget_s:
            self.build.tune([self.job], self.budget_s)
        return None

    def _add_window(self) -> None:
        """Add as many tokens as can be fused with the step."""
        load, group, batch = _load(self.requests), self._group, self.build.num_rows
        most = min(_size(self.job.num_rows_left), max(WINDOWS[0], self.view.max_rows - batch))
        for size in [size for size in reversed(WINDOWS) if size <= most]:
            rows = min(size, self.job.num_rows_left)
            work = partial(_fused_work, load, self.job, rows, self.latency)
            if self.records.seconds(group, Key("forward", batch, size), work) <= self.budget_s:
                self.build.take(self.job, rows)
                return

    def _add_tasklets(self) -> tuple[Partition, float, float] | None:
        """Add tasklets beside the step, if the device can be divided so that this pays and the SLO
        is kept; otherwise after it.
        """
        decode_s, rows = self._decode_s(), self.job.num_rows
        while rows > MIN_WINDOW_ROWS and self._tasklet_s(rows) > self.budget_s - decode_s:
            rows = max(MIN_WINDOW_ROWS, rows // 2)
        tasklet_s = self._tasklet_s(rows)
        if self.build.num_rows and self.view.num_units > 1:
            number, division = self._most_beside(rows, decode_s, tasklet_s)
            if division is not None:
                self.build.take(self.job, rows, number)
                return division
        # In turns a tuning tasklet takes all of its time from decoding: l_d - l_d0 = l_p, and (1)
        # is what fits.
        self.build.take(self.job, rows, max(0, int((self.budget_s - decode_s) / tasklet_s)))
        return None

    def _most_beside(
        self, rows: int, decode_s: float, tasklet_s: float
    ) -> tuple[int, tuple[Partition, float, float] | None]:
        """Return the number of tasklets, and the partition beside which they run, with its speeds:
        of those that pay, the one with most tasklets; of several, where decoding is fastest.
        """
        sharing, batch, group = self.latency.sharing, self.build.num_rows, self._group
        best: tuple[Partition, float, float] | None = None
        most = 0
        for partition in sharing.partitions:
            speeds = sharing.speeds(partition, forward_rows=batch, tasklet_rows=rows)
            if sum(speeds) <= 1:
                continue
            key = Key("divided", batch, _size(rows), _units(partition))
            beside_s = self.records.aged(group, key, decode_s / speeds[0])
            side_s = self.records.aged(group, key._replace(kind="beside"), tasklet_s / speeds[1])
            number = most_beside(self.budget_s, beside_s, side_s)
            if number > most or (best is not None and number == most and speeds[0] > best[1]):
                best, most = (partition, *speeds), number
        return most, best

    def _decode_s(self) -> float:
        if not self.build.num_rows:
            return 0.0

        def work() -> PieceWork:
            return forward_work(_load(self.requests), self.latency)

        return self.records.seconds(
            _adapters(None, self.requests), Key("decode", self.build.num_rows, 0), work
        )

    def _tasklet_s(self, rows: int) -> float:
        key = Key("backward", self.build.num_rows, _size(rows))
        work = partial(tasklet_work, self.job, rows, self.latency)
        return self.records.seconds(self._group, key, work)

    @cached_property
    def _group(self) -> Hashable:
        """Return the group of records with the job, which is needed for each size of a tasklet."""
        return _adapters(self.job, self.requests)
