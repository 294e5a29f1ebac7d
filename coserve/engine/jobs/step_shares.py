"""What a step was to each of its jobs: the rows of its pieces, its company, its share of the time."""

from collections.abc import Sequence

from coserve.devices.step_messages import StepBatch, StepResult


def largest_pieces(batch: StepBatch) -> dict[str, int]:
    """The jobs whose packs move on in a step, and the rows of the largest piece of each."""
    found: dict[str, int] = {}
    for pieces in (batch.windows, batch.losses, batch.tasklets):
        for piece in pieces:
            found[piece.job] = max(piece.num_rows, found.get(piece.job, 0))
    return found


def joined_jobs(batch: StepBatch, result: StepResult) -> dict[str, frozenset[str]]:
    """The jobs whose tasklets have run, and with which ones, themselves included, these were one batch of rows."""
    groups: dict[int | str, list[str]] = {}
    for each in batch.tasklets:
        if result.num_tasklets[each.job]:
            groups.setdefault(each.job if each.group is None else each.group, []).append(each.job)
    return {job: frozenset(group) for group in groups.values() for job in group}


def shares_of_time(batch: StepBatch, result: StepResult) -> dict[str, dict[str, float]]:
    """Each job's share of the step by rows: seconds by the job, and by section (fields of `StepSeconds`)."""
    found: dict[str, dict[str, float]] = {}
    # What ran beside the forward pass counts as what most of it is.
    loss_s, backward_s = (0.0, result.beside_s) if batch.tasklets else (result.beside_s, 0.0)
    if batch.windows:
        num_others = sum([len(rows.tokens) for rows in batch.requests])
        num_rows = [(piece.job, piece.num_rows) for piece in batch.windows]
        _share(found, "forward_s", num_rows, result.forward_s, num_others)
    if batch.losses:
        num_rows = [(piece.job, piece.num_rows) for piece in batch.losses]
        _share(found, "loss_s", num_rows, result.loss_s + loss_s)
    if batch.tasklets:
        num_rows = [(each.job, each.num_rows * result.num_tasklets[each.job]) for each in batch.tasklets]
        _share(found, "backward_s", num_rows, result.backward_s + backward_s)
    if batch.updates:
        _share(found, "update_s", [(update.job, 1) for update in batch.updates], result.update_s)
    return found


def _share(
    found: dict[str, dict[str, float]], name: str, num_rows: Sequence[tuple[str, int]], seconds: float, others: int = 0
) -> None:
    """Seconds of a section go to its jobs by their rows; others: rows of nobody."""
    whole = max(1, others + sum([number for _, number in num_rows]))
    for job, number in num_rows:
        found.setdefault(job, {})[name] = seconds * number / whole
