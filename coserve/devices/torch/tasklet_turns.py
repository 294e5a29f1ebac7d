"""Order of a step's tasklets, and which of them run together."""

from collections.abc import Callable, Iterator, Sequence

from coserve.devices.messages.steps import Tasklets


def tasklet_turns(
    tasklets: Sequence[Tasklets], num_parts_done: Callable[[str], int]
) -> Iterator[list[Tasklets]]:
    """Yield the jobs that run a tasklet now, turn by turn; each turn must have run before the next
    one is taken.

    Groups come one after the other (temporal); of a group, those that have done the fewest parts
    run at once (spatial; MuxTune section 3.3).

    Args:
        tasklets: The step's tasklets.
        num_parts_done: Returns the number of parts that a job's pack has done so far.
    """
    groups: dict[int | str, list[Tasklets]] = {}
    for piece in tasklets:
        groups.setdefault(piece.job if piece.group is None else piece.group, []).append(piece)
    for group in groups.values():
        if len(group) == 1:
            yield from [group] * group[0].num_tasklets
            continue
        left = {piece.job: piece.num_tasklets for piece in group}
        while going := [piece for piece in group if left[piece.job]]:
            fewest = min([num_parts_done(piece.job) for piece in going])
            turn = [piece for piece in going if num_parts_done(piece.job) == fewest]
            yield turn
            for piece in turn:
                left[piece.job] -= 1
