"""The states of a job, and what is to be done with one: two tables, without a clock, a store or an engine.

What a job is (`JobStatus`) is in the store. What should be (`Wish`) follows from that, unless a client asks for a
change. What the engine has of it (`Holding`) is known to this process alone, and ends with either. `next_action`
compares the three; the reconciler does what it says, and asks again, until there is nothing left to do.
"""

from typing import Literal

from coserve.jobs.records import OVER, JobStatus

# As clients want it: run when it can, rest until it is resumed, or end as cancelled.
Wish = Literal["run", "rest", "end"]
# The engine's part: it does not have the job, runs it, has paused it, or has ended it and what came of that is still
# to be reported.
Holding = Literal["nothing", "running", "paused", "ended"]
# "tell_…" is a command to the engine, "write_…" a change in the store; "start" is both.
# fmt: off
Action = Literal[
    "read_files", "start", "tell_pause", "tell_resume", "tell_cancel",
    "write_validating", "write_queued", "write_running", "write_paused", "write_cancelled",
]
# fmt: on

TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    "validating_files": frozenset(("queued", "paused", "failed", "cancelled")),
    "queued": frozenset(("running", "paused", "succeeded", "failed", "cancelled")),
    "running": frozenset(("queued", "paused", "succeeded", "failed", "cancelled")),
    "paused": frozenset(("validating_files", "queued", "running", "succeeded", "failed", "cancelled")),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}

_ANY_STATUS: frozenset[JobStatus] = frozenset(TRANSITIONS) - OVER
_ANY_HOLDING: frozenset[Holding] = frozenset(("nothing", "running", "paused", "ended"))
_Rule = tuple[Wish, frozenset[JobStatus], frozenset[Holding], Action | None]


def _rule(wish: Wish, status: JobStatus | None, holding: Holding | None, action: Action | None) -> _Rule:
    """None: any status, or any holding."""
    return (
        wish,
        _ANY_STATUS if status is None else frozenset((status,)),
        _ANY_HOLDING if holding is None else frozenset((holding,)),
        action,
    )


# The first that fits decides. Of a job whose files have not been validated, "paused" means "write_validating".
_RULES: tuple[_Rule, ...] = (
    _rule("end", None, "running", "tell_cancel"),
    _rule("end", None, "paused", "tell_cancel"),
    _rule("end", None, None, "write_cancelled"),
    _rule("rest", None, "running", "tell_pause"),
    _rule("rest", "paused", None, None),
    _rule("rest", None, None, "write_paused"),
    _rule("run", "validating_files", None, "read_files"),
    _rule("run", None, "paused", "tell_resume"),
    _rule("run", "running", "nothing", "write_queued"),
    _rule("run", "running", None, None),
    _rule("run", None, "running", "write_running"),
    _rule("run", "queued", "nothing", "start"),
    _rule("run", "queued", "ended", None),
    _rule("run", "paused", None, "write_queued"),
)


def is_legal(old: JobStatus, new: JobStatus) -> bool:
    """Whether a job may go from one state to another; staying is always legal."""
    return old == new or new in TRANSITIONS[old]


def wish_of(status: JobStatus) -> Wish:
    """What should be, if no client asks for anything else."""
    return "rest" if status == "paused" else "run"


def next_action(status: JobStatus, *, wish: Wish, holding: Holding, is_validated: bool) -> Action | None:
    """What brings a job one step nearer to what should be; None: there is nothing to do, or only to wait."""
    if status in OVER:
        return None
    if status == "paused" and wish == "run" and not is_validated:
        return "write_validating"
    for wanted, statuses, holdings, action in _RULES:
        if wish == wanted and status in statuses and holding in holdings:
            return action
    raise AssertionError(f"no rule for {wish}, {status}, {holding}")
