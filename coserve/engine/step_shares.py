"""What a step was to each of its jobs: the rows of its pieces, its company, its share of the time."""

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
    windows, losses = {w.job: w.num_rows for w in batch.windows}, {x.job: x.num_rows for x in batch.losses}
    num_rows = sum([len(rows.tokens) for rows in batch.requests]) + sum(windows.values())
    tasklets = {each.job: each.num_rows * result.num_tasklets[each.job] for each in batch.tasklets}
    updates = {update.job: 1 for update in batch.updates}
    # What ran beside the forward pass counts as what most of it is.
    loss_s, backward_s = (0.0, result.beside_s) if tasklets else (result.beside_s, 0.0)
    for name, shares, whole, seconds in (
        ("forward_s", windows, num_rows, result.forward_s),
        ("loss_s", losses, sum(losses.values()), result.loss_s + loss_s),
        ("backward_s", tasklets, sum(tasklets.values()), result.backward_s + backward_s),
        ("update_s", updates, len(updates), result.update_s),
    ):
        for job, share in shares.items():
            found.setdefault(job, {})[name] = seconds * share / max(1, whole)
    return found
