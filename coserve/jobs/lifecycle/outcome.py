"""Outcome of a job that has succeeded: its model, which is its last checkpoint or its best one."""

from collections.abc import Sequence

from coserve.jobs.records import CheckpointRecord, JobRecord, adapter_of, job_event
from coserve.jobs.settings import JobSettings
from coserve.jobs.sql.transaction import Transaction


def add_model(
    transaction: Transaction, job: JobRecord, checkpoints: Sequence[CheckpointRecord]
) -> None:
    """Add the model of a job that has succeeded, and events that say which checkpoint it is.

    Args:
        transaction: Transaction in which the job ends.
        job: The job.
        checkpoints: Checkpoints that are kept, by step; the last one is that of the job's end.
    """
    settings = JobSettings.from_data(job.settings)
    if stops_early(job) and settings.early_stopping is not None:
        patience = settings.early_stopping.patience
        evaluations = "1 evaluation" if patience == 1 else f"{patience} evaluations"
        message = (
            f"Stopped early at step {job.num_steps_done} of {job.num_steps}: "
            f"{settings.best_metric} of the validation "
            f"file has not improved in {evaluations}"
        )
        transaction.add_event(job_event(job, message))
    model = checkpoints[-1]
    if settings.keep_best:
        model = _best(transaction, job, checkpoints)
    transaction.put_adapter(adapter_of(job, job.name, model.directory))
    which = f", the checkpoint of step {model.step}" if settings.keep_best else ""
    transaction.add_event(job_event(job, f"New fine-tuned model created: {job.name}{which}"))


def stops_early(job: JobRecord) -> bool:
    """Return whether a job that has succeeded ended before its last step."""
    return job.num_steps_done < job.num_steps


def num_trained_tokens(transaction: Transaction, job: JobRecord) -> int:
    """Return the number of trained tokens of a job that has succeeded, every use counted."""
    if stops_early(job):
        steps = [event for event in transaction.metrics(job.id) if event.kind == "step"]
        return sum(int(event.data["num_tokens"]) for event in steps)
    num_epochs = (
        JobSettings.from_data(job.settings).tuning_config(max(1, job.num_examples)).num_epochs
    )
    return job.num_tokens * num_epochs


def _best(
    transaction: Transaction, job: JobRecord, checkpoints: Sequence[CheckpointRecord]
) -> CheckpointRecord:
    """Return the checkpoint of the best evaluation; without one, the last, with a warning."""
    best = transaction.best_evaluations([job.id]).get(job.id)
    matching = [each for each in checkpoints if best is not None and each.step == best.step]
    if matching:
        return matching[0]
    reason = (
        "no evaluation gave a number"
        if best is None
        else f"that of step {best.step} could not be written"
    )
    message = f"The best checkpoint is not there: {reason}. The model is the last one."
    transaction.add_event(job_event(job, message, level="warn"))
    return checkpoints[-1]
