"""Jobs on the page."""

import time
from dataclasses import dataclass

from coserve.jobs.manager import JobManager
from coserve.jobs.metrics.results import by_step
from coserve.jobs.records import JobRecord
from coserve.jobs.settings import JobSettings
from coserve.jobs.sql.transaction import Transaction
from coserve.server.page.curves import Chart, LossCurve, loss_curve, step_curve
from coserve.server.page.words import seconds, share

# Maximum number of points of a curve; a job of more steps shows each n-th.
_MAX_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job on the page, and the actions that are possible."""

    job: JobRecord
    """The job."""
    file: str
    """Name of its training file."""
    validation_file: str
    """Name of its validation file; "" without one."""
    method: str
    """Its method, as OpenAI's API names methods."""
    state: str
    """Its status in words."""
    progress: float
    """Share of its steps that are done."""
    left: str
    """Time until it is done, in words; "" if unknown."""
    tokens_per_s: float | None
    """Training speed; None if it is not running."""
    curve: LossCurve | None
    """Its losses; None before the first step."""
    more_curves: tuple[Chart, ...]
    """Learning rate and gradient norm."""
    checkpoint: str
    """Name of the newest checkpoint; "" before there is one."""
    talk: str
    """Name of the model to chat with now; "" before there is one."""
    actions: tuple[str, ...]
    """Actions of OpenAI's API that are possible."""

    @property
    def title(self) -> str:
        """Name of the job: its suffix, or else one that tells it from others."""
        return self.job.suffix or self.job.id.removeprefix("ftjob-")[:8]

    @property
    def error(self) -> str:
        """Reason of its failure; "" if it has not failed."""
        return (
            str((self.job.error or {}).get("message") or "") if self.job.status == "failed" else ""
        )


@dataclass(frozen=True, kw_only=True)
class JobList:
    """The newest jobs of a tenant."""

    jobs: tuple[JobView, ...]
    """The jobs, the newest first."""
    has_more: bool
    """Whether there are older ones."""


def newest_jobs(manager: JobManager, tenant: str, most: int) -> JobList:
    """Return at most `most` jobs. Blocks."""
    with manager.store.read() as transaction:
        page = transaction.jobs(tenant, after=None, limit=most)
        return JobList(
            jobs=tuple(_view(manager, transaction, job) for job in page.items),
            has_more=page.has_more,
        )


def _view(manager: JobManager, transaction: Transaction, job: JobRecord) -> JobView:
    every = max(1, job.num_steps_done // _MAX_POINTS)
    metrics = by_step(transaction.metrics(job.id, every=every))
    finish = manager.estimated_finish(job)
    is_served = job.base == manager.models.served.name
    checkpoints = transaction.checkpoints(job.tenant, job.id, after=None, limit=1).items
    checkpoint = checkpoints[0].name if checkpoints else ""
    speeds = [
        data["tokens_per_s"] for data in metrics.values() if data.get("tokens_per_s") is not None
    ]
    curves = (
        step_curve(metrics, job.num_steps, "learning_rate", "learning rate"),
        step_curve(metrics, job.num_steps, "gradient_norm", "gradient norm"),
    )
    return JobView(
        job=job,
        file=_name(transaction, job.tenant, job.training_file),
        validation_file=""
        if job.validation_file is None
        else _name(transaction, job.tenant, job.validation_file),
        method=JobSettings.from_data(job.settings).objective.replace("-", "_"),
        state=_state(manager, job),
        progress=job.num_steps_done / job.num_steps if job.num_steps else 0.0,
        left="" if finish is None else f"about {seconds(max(1.0, finish - time.time()))} left",
        tokens_per_s=speeds[-1] if speeds and job.status == "running" else None,
        curve=loss_curve(metrics, job.num_steps),
        more_curves=tuple(curve for curve in curves if curve is not None),
        checkpoint=checkpoint,
        talk=(_talk(manager, transaction, job) or checkpoint) if is_served else "",
        actions=_actions(job),
    )


def _name(transaction: Transaction, tenant: str, id: str) -> str:
    """Return a file's name; its id if the file was deleted."""
    file = transaction.file(tenant, id)
    return id if file is None else file.filename


def _state(manager: JobManager, job: JobRecord) -> str:
    if job.status == "validating_files":
        return f"reading its files, {share(manager.share_validated(job) or 0.0)}"
    position = manager.queue_position(job) if job.status == "queued" else None
    return job.status if position is None else f"queued, number {position}"


def _talk(manager: JobManager, transaction: Transaction, job: JobRecord) -> str:
    """Return the name of a job's model, if it can be asked for; else ""."""
    is_there = (
        manager.adapters.is_live(job.tenant, job.name)
        or transaction.adapter(job.tenant, job.name) is not None
    )
    return job.name if is_there else ""


def _actions(job: JobRecord) -> tuple[str, ...]:
    if job.is_terminal:
        return ()
    return ("resume" if job.status == "paused" else "pause", "cancel")
