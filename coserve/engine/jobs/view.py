"""What policies see of a job."""

from coserve.scheduling.counts import JobCounts
from coserve.scheduling.plan import JobPhase, JobView
from coserve.tuning.cursor import Cursor


def job_view(
    id: str,
    counts: JobCounts,
    *,
    phase: JobPhase,
    cursor: Cursor | None,
    mean_context_len: float,
    waited_s: float,
    tenant: str,
    num_pages: int,
    num_rows_run: float,
) -> JobView:
    """See `JobView`. cursor: of the pack in memory or of the next one, wherever that will begin; None without any."""
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
    return JobView(
        id,
        phase,
        num_rows,
        rows_left,
        parts_left,
        mean_context_len,
        counts,
        waited_s,
        tenant,
        num_pages,
        done,
        num_rows_run,
        begins_at,
    )
