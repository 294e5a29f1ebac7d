"""Fine-tuning jobs, their events and checkpoints in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from coserve.jobs.lifecycle.outcome import stops_early
from coserve.jobs.manager import JobManager
from coserve.jobs.metrics.results import ANSWERS, by_step
from coserve.jobs.names import organization
from coserve.jobs.records import CheckpointRecord, EventRecord, JobRecord
from coserve.jobs.settings import JobSettings


def job_json(manager: JobManager, job: JobRecord) -> dict[str, Any]:
    """Return a job in OpenAI's form. Blocks."""
    [shown] = jobs_json(manager, [job])
    return shown


def jobs_json(manager: JobManager, jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """Return jobs in OpenAI's form. Blocks."""
    with manager.store.read() as transaction:
        losses = transaction.last_losses([job.id for job in jobs])
        best = transaction.best_evaluations(
            [job.id for job in jobs if job.validation_file is not None]
        )
    return [_json(manager, job, losses.get(job.id), best.get(job.id)) for job in jobs]


def _json(
    manager: JobManager, job: JobRecord, loss: float | None, best: EventRecord | None
) -> dict[str, Any]:
    settings = JobSettings.from_data(job.settings)
    hyperparameters, method = (
        settings.hyperparameters(job.num_examples),
        settings.objective.replace("-", "_"),
    )
    return {
        "object": "fine_tuning.job",
        "id": job.id,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "estimated_finish": manager.estimated_finish(job),
        "status": job.status,
        "error": job.error,
        "model": job.model,
        "fine_tuned_model": job.name if job.status == "succeeded" else None,
        "organization_id": f"org-{organization(job.tenant)}",
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "result_files": [] if job.result_file is None else [job.result_file],
        "trained_tokens": job.trained_tokens,
        "hyperparameters": hyperparameters,
        "method": {"type": method, method: {"hyperparameters": hyperparameters}},
        "seed": job.seed,
        "user_provided_suffix": job.suffix,
        "metadata": job.metadata,
        "integrations": list(settings.integrations),
        "coserve": {
            "step": job.num_steps_done,
            "total_steps": job.num_steps or None,
            "train_loss": loss,
            "best_step": None if best is None else best.step,
            "stopped_early": job.status == "succeeded" and stops_early(job),
            "adapter": job.name,
            "queue_position": manager.queue_position(job),
            "share_validated": manager.share_validated(job),
        },
    }


def event_json(event: EventRecord) -> dict[str, Any]:
    """Return OpenAI's `fine_tuning.job.event`."""
    return {
        "object": "fine_tuning.job.event",
        "id": event.id,
        "created_at": event.created_at,
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.kind else "message",
        "data": event.data,
    }


def checkpoint_json(
    checkpoint: CheckpointRecord, events: tuple[EventRecord, ...], best: EventRecord | None
) -> dict[str, Any]:
    """Return OpenAI's `fine_tuning.job.checkpoint`.

    Args:
        checkpoint: What is shown.
        events: The metrics of its step.
        best: The best evaluation of its job.
    """
    known = by_step(events).get(checkpoint.step, {})
    names = [
        f"{kind}_{what}"
        for kind in ("train", "valid", "full_valid")
        for what in ("loss", "mean_token_accuracy")
    ]
    names += ANSWERS
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": checkpoint.id,
        "created_at": checkpoint.created_at,
        "fine_tuned_model_checkpoint": checkpoint.name,
        "fine_tuning_job_id": checkpoint.job,
        "step_number": checkpoint.step,
        "metrics": {
            "step": checkpoint.step,
            **{name: known[name] for name in names if known.get(name) is not None},
        },
        "coserve": {"is_best": best is not None and best.step == checkpoint.step},
    }
