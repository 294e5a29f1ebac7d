"""States of all jobs that have not ended, and the clients that wait for their requests."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

from coserve.errors import CoserveError
from coserve.jobs.lifecycle.events import (
    ClientAsked,
    DesiredState,
    EngineLost,
    EngineReady,
    Event,
    PendingCommand,
    RequestClosed,
    SlotGranted,
    SlotRequested,
    StoreRefused,
)
from coserve.jobs.lifecycle.slots import TrainingSlots
from coserve.jobs.lifecycle.state import JobState, apply
from coserve.jobs.records import JobRecord

Waiter = asyncio.Future[JobRecord]


class LiveJobs:
    """States of all jobs that have not ended.

    One task changes them; `get` and `slot_position` may be called from any thread.
    """

    def __init__(self, slots: TrainingSlots) -> None:
        self._slots = slots
        self._states: dict[str, JobState] = {}  # by id, the oldest first
        self._waiters: dict[str, Waiter] = {}
        self._tickets = count()
        self._announced: list[EngineLost | EngineReady] = []
        self._is_engine_up = False

    def __iter__(self) -> Iterator[JobState]:
        return iter(list(self._states.values()))

    def __contains__(self, id: str) -> bool:
        return id in self._states

    def __getitem__(self, id: str) -> JobState:
        return self._states[id]

    def get(self, id: str) -> JobState | None:
        """Return the state of a job; None if it has ended."""
        return self._states.get(id)

    def add(self, state: JobState) -> None:
        """Add a job."""
        self._states[state.id] = state

    def apply(self, id: str, event: Event) -> None:
        """Apply an event to a job."""
        self._states[id] = apply(self._states[id], event)

    def end(self, job: JobRecord) -> None:
        """Remove a job that has ended, and answer the client that waits for it with the record."""
        del self._states[job.id]
        self._answer(job.id, lambda waiter: waiter.set_result(job))

    # -- engines --------------------------------------------------------------------

    def announce(self, event: EngineLost | EngineReady) -> None:
        """Note that an engine has died or is ready; the event is applied once the store has
        recorded all that came before.
        """
        self._announced.append(event)
        # Named jobs mean that one of several engines was lost; the others still accept starts.
        is_other_left = (
            isinstance(event, EngineLost) and self._is_engine_up and event.jobs is not None
        )
        self._is_engine_up = isinstance(event, EngineReady) or is_other_left

    def apply_ready(self, event: EngineReady) -> None:
        """Allow jobs to start on an engine that was announced."""
        self._announced.remove(event)

    def apply_loss(self, event: EngineLost) -> None:
        """Apply the announced death of an engine to the jobs that it had."""
        self._announced.remove(event)
        for state in self:
            if event.had(state.id):
                self.apply(state.id, event)

    def can_start(self, id: str) -> bool:
        """Return whether an engine is up and all announced events about a job have been applied."""
        return self._is_engine_up and not any(
            isinstance(each, EngineReady) or each.had(id) for each in self._announced
        )

    def is_current(self, id: str, command: PendingCommand) -> bool:
        """Return whether no engine that had the job has died since a command was planned."""
        state = self.get(id)
        if state is None or command.epoch != state.epoch:
            return False
        return not any(isinstance(each, EngineLost) and each.had(id) for each in self._announced)

    # -- slots ----------------------------------------------------------------------

    def request_slot(self, id: str) -> None:
        """Queue a job for a training slot, which is granted at once if the job is the next."""
        self.apply(id, SlotRequested(ticket=next(self._tickets)))
        first = self._slots.next(self._states.values())
        if first is not None and first.id == id:
            self._grant_slot(first)

    def grant_next_slot(self) -> str | None:
        """Grant a free slot, and return the job that has it now; None if there is none to grant."""
        state = self._slots.next(self._states.values())
        if state is None:
            return None
        self._grant_slot(state)
        return state.id

    def slot_position(self, id: str) -> int | None:
        """Return how many slots must come free until a job has one: 1 is the next. None if the job
        does not wait.
        """
        return self._slots.position(tuple(self._states.values()), id)

    def _grant_slot(self, state: JobState) -> None:
        self._slots.note_granted(state.job.tenant)
        self.apply(state.id, SlotGranted())

    # -- clients --------------------------------------------------------------------

    def waiter(self, id: str) -> Waiter | None:
        """Return the future of the client that waits for a job; None if no client waits."""
        waiter = self._waiters.get(id)
        return None if waiter is None or waiter.done() else waiter

    def ask(self, id: str, desired: DesiredState) -> Waiter:
        """Record a client's request about a job that has no other open request."""
        assert self.waiter(id) is None, "one request at a time"
        self.apply(id, ClientAsked(desired=desired))
        waiter = self._waiters[id] = asyncio.get_running_loop().create_future()
        return waiter

    def take_back(self, id: str, before: DesiredState | None) -> None:
        """Undo `ask`.

        Args:
            id: Id of the job.
            before: Request that was open until then.
        """
        self._waiters.pop(id, None)
        if id in self._states:
            self.apply(id, RequestClosed() if before is None else ClientAsked(desired=before))

    def grant(self, id: str) -> None:
        """Answer the client that all that can be done now has been done."""
        self.apply(id, RequestClosed())
        job = self._states[id].job
        self._answer(id, lambda waiter: waiter.set_result(job))

    def refuse(self, id: str, error: CoserveError) -> None:
        """Answer the client that its request cannot be fulfilled."""
        if id in self._states:
            self.apply(id, RequestClosed())
        self._answer(id, lambda waiter: waiter.set_exception(error))

    def put_off(self, id: str, error: CoserveError) -> None:
        """Answer the client that its request cannot be written now."""
        if id in self._states:
            self.apply(id, StoreRefused())
        self._answer(id, lambda waiter: waiter.set_exception(error))

    def refuse_all(self, error: CoserveError) -> None:
        """Answer every waiting client with an error."""
        for id in list(self._waiters):
            self.refuse(id, error)

    def _answer(self, id: str, answer: Callable[[Waiter], None]) -> None:
        waiter = self._waiters.pop(id, None)
        if waiter is not None and not waiter.done():
            answer(waiter)
