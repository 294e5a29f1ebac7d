"""Waits of a machine's command when the machine joins a cluster, and when it leaves: by what the
front reports, which may be another front meanwhile.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from coserve.errors import ClusterError, FrontSilentError

_POLL_S = 0.5
# Time for a front to read the model, or for a node to read its weights.
START_S = 300.0
# Time for the checkpoints of nodes' jobs.
MOVE_S = 120.0

_ServedT = TypeVar("_ServedT")


class FrontCalls(Protocol):
    """The front as commands see it. Each call raises FrontSilentError if no front answers now, and
    ClusterError if there is none.
    """

    def status(self) -> dict[str, Any]:
        """Return `FrontApplication.describe`."""
        ...

    def drain(self, names: Sequence[str], limit_s: float) -> None:
        """Drain nodes: they get nothing more, and their jobs continue on others.

        Raises:
            ClusterError: The jobs have not moved within `limit_s`.
        """


def wait_until_served(
    ask: Callable[[], _ServedT | None], address: str, limit_s: float = START_S
) -> _ServedT:
    """Return what is served at an address, as soon as something is.

    Raises:
        ClusterError: Nothing is served within `limit_s`.
    """
    until_s = time.monotonic() + limit_s
    while (served := ask()) is None:
        if time.monotonic() >= until_s:
            raise ClusterError(
                f"the cluster at {address} has served nothing for {limit_s:g} s: see that its "
                f"first coserve cluster up "
                f"runs, or serve from here with coserve cluster up MODEL --address {address} "
                f"--nodes 0"
            )
        time.sleep(_POLL_S)
    return served


def wait_for_nodes(
    front: FrontCalls,
    machine: str | None,
    num_devices: Callable[[], int],
    is_ended: Callable[[], bool],
    limit_s: float = START_S,
) -> int | None:
    """Wait until every device of a machine is a node that is ready, or drains already.

    Args:
        front: The front.
        machine: Ray's id of the machine; None: all machines, whose unusable nodes are ignored as
            long as there are others.
        num_devices: Returns the number of devices.
        is_ended: Returns whether to stop waiting.
        limit_s: Seconds to wait.

    Returns:
        The number of ready nodes of the cluster; None if the wait was stopped.

    Raises:
        ClusterError: A node cannot be used, or is not ready within this time, or there is no front
            any more.
    """
    until_s = time.monotonic() + limit_s
    while not is_ended():
        try:
            nodes = front.status()["nodes"]
        except FrontSilentError as error:  # another front takes over
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
    """Drain machines that are about to leave: all their nodes get nothing more, at once, their jobs
    continue on others, and their requests come to their ends, within the cluster's `--drain`.

    Args:
        front: The front.
        machines: Ray's ids of the machines.
        say: Called with lines on what is waited for, and what is cut off.
        move_s: Seconds that jobs may take to move.

    Raises:
        ClusterError: Jobs have not moved within `move_s`. Requests have been waited for all the
            same.
    """
    begin_s = time.monotonic()
    problem: ClusterError | None = None
    has_said = False
    while True:
        spent_s = time.monotonic() - begin_s
        try:
            state = front.status()
            own = [each for each in state["nodes"] if each["machine"] in machines]
            # Also after another front has taken over, which does not drain these nodes yet.
            if problem is None and any(each["state"] != "draining" or each["jobs"] for each in own):
                problem = _move(front, [each["name"] for each in own], move_s - spent_s)
            elif not (num_open := sum(each["requests"] for each in own)):
                break
            elif spent_s >= state["drain_s"]:
                say(
                    f"{_requests(num_open)} not over after {state['drain_s']:g} s: what is left of "
                    f"them is cut off"
                )
                break
            elif not has_said:
                has_said = True
                say(f"{_requests(num_open)} waited for, {state['drain_s']:g} s at most")
        except FrontSilentError as error:  # another front takes over, and has to drain them, too
            if spent_s >= move_s:
                raise problem or error from None
        except ClusterError:  # there is no front any more, and nothing that its nodes do
            break
        time.sleep(_POLL_S)
    if problem is not None:
        raise problem


def _move(front: FrontCalls, names: Sequence[str], left_s: float) -> ClusterError | None:
    """Drain nodes, and return the error if jobs have not moved; FrontSilentError is raised."""
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
