"""What policies see of a job."""

from coserve.scheduling.plan import JobInfo, JobPhase, JobProgress
from coserve.tuning.cursor import Cursor


def job_progress(
    id: str,
    info: JobInfo,
    *,
    phase: JobPhase,
    cursor: Cursor | None,
    mean_context_len: float,
    waited_s: float,
    num_pages: int,
    num_rows_run: float,
) -> JobProgress:
    """Return how far a job is. cursor: of the pack in memory or of the next one, wherever that will begin; None without
    any.
    """
    num_rows = rows_left = parts_left = done = 0
    begins_at: JobPhase = "forward"
    if cursor is not None:
        num_rows, parts_left = cursor.num_rows, cursor.num_parts - cursor.num_parts_done
        done = cursor.num_forward_rows + cursor.num_loss_rows + cursor.num_parts_done * num_rows
        begins_at = cursor.phase
        if begins_at == "backward":
            rows_left = cursor.num_backward_rows
        elif begins_at == "loss":
            rows_left = cursor.num_trained - cursor.num_loss_rows
        else:
            rows_left = num_rows - cursor.num_forward_rows
    return JobProgress(
        id=id,
        info=info,
        phase=phase,
        num_rows=num_rows,
        num_rows_left=rows_left,
        num_parts_left=parts_left,
        mean_context_len=mean_context_len,
        waited_s=waited_s,
        num_pages=num_pages,
        num_rows_done=done,
        num_rows_run=num_rows_run,
        begins_at=begins_at,
    )
