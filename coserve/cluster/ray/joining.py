"""What a machine's command waits for when the machine joins a cluster, and when it leaves: by what
the front says, which may be another front meanwhile.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from coserve.errors import ClusterError, FrontSilentError

_POLL_S = 0.5
# Until a front has read the model, or a node its weights.
START_S = 300.0
# What checkpoints of nodes' jobs may take.
MOVE_S = 120.0

_Found = TypeVar("_Found")


class FrontCalls(Protocol):
    """The front as commands see it. Each call raises FrontSilentError if none answers now, and
    ClusterError if there is none.
    """

    def status(self) -> dict[str, Any]:
        """What `FrontApplication.describe` returns."""
        ...

    def drain(self, names: Sequence[str], limit_s: float) -> None:
        """Have nodes get nothing more, and their jobs continue on others; ClusterError if they have
        not within this time.
        """


def wait_until_served(
    ask: Callable[[], _Found | None], address: str, limit_s: float = START_S
) -> _Found:
    """What is served at an address, as soon as something is. ClusterError if nothing is within this
    time.
    """
    until_s = time.monotonic() + limit_s
    while (found := ask()) is None:
        if time.monotonic() >= until_s:
            raise ClusterError(
                f"the cluster at {address} has served nothing for {limit_s:g} s: see that its "
                f"first coserve cluster up "
                f"runs, or serve from here with coserve cluster up MODEL --address {address} "
                f"--nodes 0"
            )
        time.sleep(_POLL_S)
    return found


def wait_for_nodes(
    front: FrontCalls,
    machine: str | None,
    num_devices: Callable[[], int],
    is_ended: Callable[[], bool],
    limit_s: float = START_S,
) -> int | None:
    """Until every device of a machine is a node that is ready, or drains already, or it is ended
    (None); how many nodes of the cluster are ready then. machine: Ray's id (None: all machines,
    whose nodes that cannot be used are left to them, as long as there are others).

    Raises:
        ClusterError: a node cannot be used, or is not ready within this time; there is no front any
            more.
    """
    until_s = time.monotonic() + limit_s
    while not is_ended():
        try:
            nodes = front.status()["nodes"]
        except FrontSilentError as error:  # another one takes over
            left = str(error)
        else:
            own = [each for each in nodes if machine is None or each["machine"] == machine]
            refused = [each for each in own if each["refused"]]
            used = [
                each
                for each in own
                if each["state"] in ("ready", "draining") and not each["refused"]
            ]
            number = num_devices()
            if refused and (machine is not None or len(refused) >= number):
                raise ClusterError(
                    f"the node {refused[0]['name']} cannot be used: {refused[0]['refused']}"
                )
            if len(used) + len(refused) >= number:
                return len([each for each in nodes if each["state"] == "ready"])
            problems = [f"{each['name']}: {each['problem']}" for each in own if each["problem"]]
            left = "; ".join([f"{len(used)} of {number} nodes are ready", *problems])
        if time.monotonic() >= until_s:
            raise ClusterError(f"{left}, after {limit_s:g} s")
        time.sleep(_POLL_S)
    return None


def drain_machines(
    front: FrontCalls,
    machines: Collection[str],
    *,
    say: Callable[[str], None] = lambda line: None,
    move_s: float = MOVE_S,
) -> None:
    """Machines are about to leave: all their nodes get nothing more, at once, their jobs continue
    on others, and their requests come to their ends, within the cluster's `--drain`. say: is told
    what is waited for, and what is cut off.

    Raises:
        ClusterError: jobs have not moved within `move_s`. Requests have been waited for all the
            same.
    """
    begin_s = time.monotonic()
    wrong: ClusterError | None = None
    has_said = False
    while True:
        spent_s = time.monotonic() - begin_s
        try:
            found = front.status()
            own = [each for each in found["nodes"] if each["machine"] in machines]
            if wrong is None and any(each["state"] != "draining" or each["jobs"] for each in own):
                wrong = _move(front, [each["name"] for each in own], move_s - spent_s)
            elif not (num_open := sum(each["requests"] for each in own)):
                break
            elif spent_s >= found["drain_s"]:
                say(
                    f"{_requests(num_open)} not over after {found['drain_s']:g} s: what is left of "
                    f"them is cut off"
                )
                break
            elif not has_said:
                has_said = True
                say(f"{_requests(num_open)} waited for, {found['drain_s']:g} s at most")
        except FrontSilentError as error:  # another one takes over, and is to be told the same
            if spent_s >= move_s:
                raise wrong or error from None
        except ClusterError:  # there is no front any more, and nothing that its nodes do
            break
        time.sleep(_POLL_S)
    if wrong is not None:
        raise wrong


def _move(front: FrontCalls, names: Sequence[str], left_s: float) -> ClusterError | None:
    """What is wrong, if anything; FrontSilentError."""
    if left_s <= 0:
        return ClusterError(
            f"jobs of {', '.join(names)} have not moved in time: they resume from their checkpoints"
        )
    try:
        front.drain(names, left_s)
    except FrontSilentError:
        raise
    except ClusterError as error:
        return error
    return None


def _requests(number: int) -> str:
    return "1 open request is" if number == 1 else f"{number} open requests are"
