"""Jobs as the page shows them."""

import time
from dataclasses import dataclass

from coserve.jobs.manager import JobManager
from coserve.jobs.records import JobRecord
from coserve.jobs.results import by_step
from coserve.jobs.transaction import Transaction
from coserve.server.page.curves import LossCurve, loss_curve
from coserve.server.page.words import seconds, share

# Of a curve; a job of many steps shows each n-th.
_MOST_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What there is to see of a job, and to do.

    state: its status in words. progress: share of its steps. left: how long it will take, in words; "" if not known.
    checkpoint: the newest one's name. talk: the name to chat with it by, as it is now. Both "" before there is one.
    actions: of OpenAI's routes.
    """

    job: JobRecord
    file: str
    state: str
    progress: float
    left: str
    tokens_per_s: float | None
    curve: LossCurve | None
    checkpoint: str
    talk: str
    actions: tuple[str, ...]

    @property
    def title(self) -> str:
        """As it was named, or else as the page can tell it from others."""
        return self.job.suffix or self.job.id.removeprefix("ftjob-")[:8]

    @property
    def error(self) -> str:
        """Why it failed."""
        return str((self.job.error or {}).get("message") or "") if self.job.status == "failed" else ""


@dataclass(frozen=True, kw_only=True)
class JobList:
    """The newest jobs of a tenant."""

    jobs: tuple[JobView, ...]
    has_more: bool


def newest_jobs(manager: JobManager, tenant: str, most: int) -> JobList:
    """As many as `most`. Blocks."""
    with manager.store.read() as transaction:
        page = transaction.jobs(tenant, after=None, limit=most)
        return JobList(
            jobs=tuple(_view(manager, transaction, job) for job in page.items),
            has_more=page.has_more,
        )


def _view(manager: JobManager, transaction: Transaction, job: JobRecord) -> JobView:
    every = max(1, job.num_steps_done // _MOST_POINTS)
    metrics = by_step(transaction.metrics(job.id, every=every))
    file = transaction.file(job.tenant, job.training_file)
    finish = manager.estimated_finish(job)
    is_served = job.base == manager.models.served.name
    checkpoints = transaction.checkpoints(job.tenant, job.id, after=None, limit=1).items
    checkpoint = checkpoints[0].name if checkpoints else ""
    speeds = [data["tokens_per_s"] for data in metrics.values() if data.get("tokens_per_s") is not None]
    return JobView(
        job=job,
        file=job.training_file if file is None else file.filename,
        state=_state(manager, job),
        progress=job.num_steps_done / job.num_steps if job.num_steps else 0.0,
        left="" if finish is None else f"about {seconds(max(1.0, finish - time.time()))} left",
        tokens_per_s=speeds[-1] if speeds and job.status == "running" else None,
        curve=loss_curve(metrics, job.num_steps),
        checkpoint=checkpoint,
        talk=(_talk(manager, transaction, job) or checkpoint) if is_served else "",
        actions=_actions(job),
    )


def _state(manager: JobManager, job: JobRecord) -> str:
    if job.status == "validating_files":
        return f"reading its files, {share(manager.share_validated(job) or 0.0)}"
    position = manager.queue_position(job) if job.status == "queued" else None
    return job.status if position is None else f"queued, number {position}"


def _talk(manager: JobManager, transaction: Transaction, job: JobRecord) -> str:
    """The name of its model, if that is there."""
    is_there = manager.adapters.is_live(job.tenant, job.name) or transaction.adapter(job.tenant, job.name) is not None
    return job.name if is_there else ""


def _actions(job: JobRecord) -> tuple[str, ...]:
    if job.is_terminal:
        return ()
    return ("resume" if job.status == "paused" else "pause", "cancel")
