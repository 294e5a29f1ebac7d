"""What this process alone knows of a job that has not ended, beside what the store says of it."""

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from coserve.errors import CoserveError
from coserve.jobs.deaths import MOST_DEATHS
from coserve.jobs.estimate import ProgressMeter
from coserve.jobs.records import JobRecord
from coserve.jobs.state import Action, Holding, Wish


@dataclass(frozen=True, kw_only=True, eq=False)
class Told:
    """A command to the engine that it has not answered yet. life: which engine, by `Lives`."""

    job: str
    action: Action
    life: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a command; error: None if it was done."""

    told: Told
    error: Exception | None


@dataclass(frozen=True, kw_only=True)
class Gone:
    """An engine has died. under_way: the jobs that it may have died of; None: any of those that it had. jobs: those
    that it had; None: all, since there is no other engine.
    """

    under_way: Collection[str] | None = None
    jobs: Collection[str] | None = None

    def had(self, job: str) -> bool:
        """Whether it had a job."""
        return self.jobs is None or job in self.jobs


class Lives:
    """How many engines have died that had a job: what was told to an earlier one counts no more."""

    def __init__(self) -> None:
        self._of_all, self._of = 0, Counter[str]()

    def end(self, gone: Gone) -> None:
        """One has died."""
        if gone.jobs is None:
            self._of_all += 1
        else:
            self._of.update(gone.jobs)

    def of(self, job: str) -> int:
        """Which one has it, or would have it: 0 for the first."""
        return self._of_all + self._of[job]


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What a client wants of a job. done: the job when it is so, or when it has ended; or a JobError."""

    wish: Wish
    done: asyncio.Future[JobRecord]


@dataclass
class JobMachine:
    """Of one job."""

    holding: Holding = "nothing"
    has_succeeded: bool = False  # in the engine
    failure: dict[str, Any] | None = None  # why it is to end as failed: code, message, param
    meter: ProgressMeter | None = None  # while it runs
    resumed_step: int = 0  # where the engine began
    was_resumed: bool = False  # by a client, since it was last written down
    told: Told | None = None
    asked: Asked | None = None
    _ran_s: float = 0.0  # before now
    _runs_since_s: float | None = None

    @property
    def wish(self) -> Wish | None:
        """What should be, other than what follows from its status."""
        if self.failure is not None:
            return "end"
        return None if self.asked is None else self.asked.wish

    def run(self, now_s: float) -> None:
        """It runs in the engine from now on."""
        self.rest(now_s)
        self._runs_since_s = now_s

    def rest(self, now_s: float) -> None:
        """It does not."""
        self._ran_s, self._runs_since_s = self.ran_s(now_s), None

    def ran_s(self, now_s: float) -> float:
        """Seconds that it has run so far, in this process."""
        return self._ran_s + (0.0 if self._runs_since_s is None else now_s - self._runs_since_s)

    @property
    def has_ended(self) -> bool:
        """Whether it is to end as what has become of it in the engine."""
        return self.has_succeeded or self.failure is not None

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for what was asked for."""
        return self.asked is not None and not self.asked.done.done()

    def left(self, error: str | None, *, is_terminal: bool) -> None:
        """The engine does not run it any more. is_terminal: it has succeeded there, or failed with an error."""
        self.holding, self.has_succeeded = "ended" if is_terminal else "nothing", is_terminal and error is None
        if error is not None:
            self.failure = {"code": "training_failed", "message": error, "param": None}

    def done(self, action: Action) -> None:
        """The engine has done what it was told to do with it."""
        if self.holding == "ended":  # and more than that
            return
        if action == "tell_pause":
            self.holding = "paused"
        elif action == "tell_resume":
            self.holding, self.was_resumed = "running", True
        else:
            self.holding = "ended"

    def set_aside(self) -> None:
        """Too many engines have died of it."""
        message = f"the engine died, or stood still, {MOST_DEATHS} times while it worked for this job alone"
        self.failure = {"code": "engine_died", "message": message, "param": None}

    def grant(self, job: JobRecord) -> None:
        """All that can be done now for the client that asked for something has been."""
        asked, self.asked = self.asked, None
        if asked is not None and not asked.done.done():
            asked.done.set_result(job)

    def put_off(self, error: CoserveError) -> None:
        """What was asked for cannot be written down now: who waits for it is told. An end that the engine has been told
        of stands, since it cannot be taken back; anything else is as if it had not been asked for.
        """
        asked = self.asked
        is_told = self.holding == "ended" or (self.told is not None and self.told.action == "tell_cancel")
        self.refuse(error)
        if asked is not None and asked.wish == "end" and is_told:
            self.asked = asked

    def refuse(self, error: CoserveError) -> None:
        """What was asked for cannot be done."""
        asked, self.asked = self.asked, None
        if asked is not None and not asked.done.done():
            asked.done.set_exception(error)
