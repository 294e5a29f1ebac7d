"""Building blocks of policies that give the device to requests and to jobs in turns.

An iteration of inference is a step that decodes one token of every running request, with prompts in
chunks. One of tuning is a pack's pass forward, through the loss and backward, in pieces as large as
they can be, with the optimizer step if that is due. Between any two of its steps the device could
turn to requests; these policies do not let it.
"""

from collections.abc import Sequence

from coserve.scheduling.building import PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.plan import JobProgress, Plan, View
from coserve.scheduling.slo.deadlines import AIMED


def has_requests(view: View) -> bool:
    """Return whether there are requests to run or to admit."""
    return bool(view.requests) or any(request.may_start for request in view.waiting)


def serving_step(view: View, latency: LatencyModel) -> tuple[MemoryPlan, PlanBuilder]:
    """Return a step of requests alone, to be built, and the memory that changes hands for it:
    iteration-level scheduling with chunked prefill (FlexLLM section 6.2). Prompts are cut so that
    it lasts no longer than the tightest TPOT SLO.
    """
    memory = MemoryPlan(view)
    memory.grow()
    memory.admit_waiting()
    build = PlanBuilder(view, latency, memory)
    decoding = [request for request in memory.requests if request.num_rows == 1]
    build.decode(decoding)
    if len(decoding) < len(memory.requests):
        prompts = [request for request in memory.requests if request.num_rows > 1]
        build.prefill(prompts, slo_s(view, memory))
    return memory, build


def slo_s(view: View, memory: MemoryPlan) -> float:
    """Return the tightest TPOT SLO of running requests (without any, of the next), less the mean
    lateness of steps at exactly this pace.
    """
    return AIMED * min([request.info.tpot_s for request in memory.requests], default=view.tpot_s)


def under_way(jobs: Sequence[JobProgress]) -> JobProgress | None:
    """Return the job within an iteration of tuning; of several, the one served least."""
    return next((job for job in jobs if job.phase != "pack" and not _not_begun(job)), None)


def next_job(view: View, memory: MemoryPlan, *, requests_first: bool = True) -> JobProgress | None:
    """Return the job under way. Otherwise, of jobs that have a pack in memory or can get one, the
    one served least; the others begin none.
    """
    if (going := under_way(memory.jobs)) is not None:
        return going
    for job in view.jobs:
        memory.begin_packs([job], requests_first=requests_first)
        if (begun := next((each for each in memory.jobs if each.id == job.id), None)) is not None:
            return begun
    return None


def alternate(view: View, latency: LatencyModel, *, serves: bool) -> Plan:
    """Return an iteration of requests or of jobs. One that is under way goes first; then it is the
    turn of requests (`serves`) or of jobs, or of the others where one side has nothing to run.
    """
    turns = [_serve, _tune] if serves and under_way(view.jobs) is None else [_tune, _serve]
    plans = [turns[0](view, latency)]
    if plans[0].runs_nothing:
        plans.append(turns[1](view, latency))
    return next((plan for plan in plans if not plan.runs_nothing), plans[0])


def _serve(view: View, latency: LatencyModel) -> Plan:
    _, build = serving_step(view, latency)
    return build.build()


def _tune(view: View, latency: LatencyModel) -> Plan:
    """Return the next step of the iteration under way, or the first of the next one."""
    memory = MemoryPlan(view)
    build = PlanBuilder(view, latency, memory)
    if (job := next_job(view, memory, requests_first=False)) is not None:
        build.take(job, job.num_rows, job.num_parts_left)
    return build.build()


def _not_begun(job: JobProgress) -> bool:
    return job.phase == "forward" and job.num_rows_left == job.num_rows
