"""A job's states: `apply` and `plan` alone, over all states there can be, and over random
histories."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_states import make_record, make_state

from coserve.errors import DeviceMemoryError, EngineGoneError, JobError, JobOverError
from coserve.jobs.lifecycle.events import (
    CheckpointRecorded,
    ClientAsked,
    CommandSent,
    EngineAnswered,
    EngineEnded,
    EngineLost,
    Event,
    JobFailed,
    PendingCommand,
    ReadingBegan,
    ReadingEnded,
    RecordWritten,
    RequestClosed,
    SlotGranted,
    SlotRequested,
    StepsRecorded,
    StoreRefused,
)
from coserve.jobs.lifecycle.plan import (
    Action,
    ReadFiles,
    RequestSlot,
    SendCommand,
    Start,
    Write,
    event_message,
    plan,
    refusal,
)
from coserve.jobs.lifecycle.state import TRANSITIONS, JobState, apply, is_legal
from coserve.jobs.records import OVER

LIVING = tuple(status for status in TRANSITIONS if status not in OVER)
ENGINES = ("absent", "running", "paused", "ended")
ALL = [
    (status, desired, engine, validated)
    for status, desired, engine, validated in product(
        LIVING, ("run", "rest", "end"), ENGINES, (False, True)
    )
    # The engine is given jobs whose files have been read.
    if validated or (engine == "absent" and status in ("validating_files", "paused"))
]


def state_of(
    status: str, desired: str | None, engine: str, *, validated: bool = True, **fields: Any
) -> JobState:
    record = {"status": status, "is_validated": validated}
    return make_state(record=record, **{"asked": desired, "engine": engine, **fields})


class Obedient:
    """A store and an engine that do at once all that is asked of them."""

    def __init__(self, state: JobState) -> None:
        self.state, self.number = state, 0

    def apply(self, *events: Event) -> None:
        for event in events:
            self.state = apply(self.state, event)

    def do(self, action: Action) -> None:
        match action:
            case ReadFiles():
                self.apply(ReadingBegan())
                self.write(replace(self.state.job, status="queued", num_steps=9))
                self.apply(ReadingEnded())
            case RequestSlot():
                self.apply(SlotRequested(ticket=0), SlotGranted())
            case Start():
                self.answer(self.send("start"))
            case SendCommand(command=command):
                self.answer(self.send(command))
            case Write(status=status):
                self.write(replace(self.state.job, status=status))

    def write(self, record: Any) -> None:
        assert is_legal(self.state.status, record.status), (self.state.status, record.status)
        self.apply(RecordWritten(job=record))

    def send(self, command: Any, now_s: float = 0.0) -> PendingCommand:
        assert self.state.pending is None, "one command at a time"
        assert command != "start" or self.state.engine == "absent", "an engine is given a job once"
        self.number += 1
        pending = PendingCommand(command=command, number=self.number, epoch=self.state.epoch)
        self.apply(CommandSent(command=pending, now_s=now_s))
        return pending

    def answer(self, command: PendingCommand, error: Exception | None = None) -> None:
        self.apply(EngineAnswered(job=self.state.id, command=command, error=error))

    def settle(self, *, can_start: bool = True) -> None:
        """Do what is planned, until there is nothing left."""
        for _ in range(20):
            action = plan(self.state, can_start=can_start)
            if action is None:
                return
            self.do(action)
        raise AssertionError("it turns in a circle")


# -- the plan -------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "desired", "engine", "validated"), ALL)
def test_a_job_comes_to_what_is_desired_from_wherever_it_is(
    status: Any, desired: Any, engine: Any, validated: bool
):
    world = Obedient(state_of(status, desired, engine, validated=validated))
    world.settle()
    state = world.state
    if engine == "ended":  # what came of it is still to be reported
        assert desired == "run" or state.status == {"rest": "paused", "end": "cancelled"}[desired]
        return
    assert state.status == {"run": "running", "rest": "paused", "end": "cancelled"}[desired]
    # An engine that has ended a cancelled job is not asked about it any more.
    assert (
        state.engine
        in {"run": ("running",), "rest": ("paused", "absent"), "end": ("absent", "ended")}[desired]
    )


@pytest.mark.parametrize("status", sorted(OVER))
def test_the_end_is_the_end(status: Any):
    assert TRANSITIONS[status] == frozenset()
    assert plan(state_of(status, None, "running"), can_start=True) is None
    assert [other for other in TRANSITIONS if is_legal(status, other)] == [status]


def test_jobs_whose_engine_died_are_queued_again():
    assert plan(state_of("running", None, "absent"), can_start=False) == Write("queued")
    assert plan(state_of("queued", None, "absent"), can_start=True) == Start()
    assert plan(state_of("queued", None, "absent"), can_start=False) is None
    assert plan(state_of("paused", None, "absent"), can_start=True) is None


def test_an_engine_that_did_not_get_a_pause_is_told_again():
    assert plan(state_of("paused", None, "running"), can_start=True) == SendCommand("pause")
    assert plan(state_of("running", None, "paused"), can_start=True) == SendCommand("resume")


def test_a_job_waits_for_a_slot_before_it_starts_and_before_it_is_resumed():
    for state in (
        state_of("queued", None, "absent", slot="none"),
        state_of("paused", "run", "paused", slot="none"),
    ):
        assert plan(state, can_start=True) == RequestSlot()
        waiting = apply(state, SlotRequested(ticket=3))
        assert plan(waiting, can_start=True) == (
            Write("queued") if state.status == "paused" else None
        )
        assert plan(apply(waiting, SlotGranted()), can_start=True) in (
            Start(),
            SendCommand("resume"),
        )


def test_a_job_of_a_model_that_is_not_here_takes_no_slot():
    state = state_of("queued", None, "absent", slot="none", has_model=False)
    assert plan(state, can_start=True) is None
    unread = state_of("validating_files", None, "absent", validated=False, has_model=False)
    assert plan(unread, can_start=True) is None


def test_a_paused_job_gives_its_slot_back_and_a_report_of_a_paused_job_does_not():
    state = apply(
        state_of("running", "rest", "paused"), RecordWritten(job=make_record(status="paused"))
    )
    assert (state.slot, state.meter) == ("none", None)
    state = apply(
        apply(state, SlotRequested(ticket=1)), RecordWritten(job=make_record(status="paused"))
    )
    assert state.slot == "waiting"


# -- ends -----------------------------------------------------------------------------


def test_a_job_succeeds_when_its_last_checkpoint_is_on_record():
    state = make_state(
        record={"status": "running", "num_steps_done": 9}, engine="running", listed_step=6
    )
    state = apply(state, EngineEnded(outcome="succeeded"))
    assert plan(state, can_start=True) is None
    assert plan(apply(state, CheckpointRecorded(step=9)), can_start=True) == Write("succeeded")


def test_a_job_that_fails_in_the_engine_fails_and_one_that_was_cancelled_there_starts_again():
    running = state_of("running", None, "running")
    failed = apply(running, EngineEnded(outcome="failed", message="why"))
    assert failed.failure == {"code": "training_failed", "message": "why", "param": None}
    assert plan(failed, can_start=True) == Write("failed")
    assert plan(apply(running, EngineEnded(outcome="cancelled")), can_start=True) == Write("queued")


def test_a_job_that_has_to_fail_is_ended_in_the_engine_first():
    world = Obedient(
        apply(
            state_of("running", None, "running"), JobFailed(code="job_timeout", message="too long")
        )
    )
    assert plan(world.state, can_start=True) == SendCommand("cancel")
    world.settle()
    assert world.state.status == "failed"


def test_a_pause_of_a_job_that_is_over_in_the_engine_waits_for_no_second_one():
    world = Obedient(state_of("running", "rest", "running"))
    world.answer(world.send("pause"), JobOverError("it is over"))
    assert world.state.engine == "ended"
    assert plan(world.state, can_start=True) == Write("paused")


# -- answers --------------------------------------------------------------------------


def test_a_late_answer_of_a_dead_engine_does_not_count():
    world = Obedient(state_of("running", "rest", "running"))
    pausing = world.send("pause")
    world.apply(EngineLost(now_s=1.0))
    assert plan(world.state, can_start=True) is None, "a command is under way"
    world.answer(pausing)
    assert (world.state.engine, world.state.pending) == ("absent", None)
    assert plan(world.state, can_start=True) == Write("paused")


def test_an_answer_to_an_earlier_command_changes_nothing():
    world = Obedient(state_of("queued", None, "absent"))
    starting = world.send("start")
    world.answer(starting)  # as a report says
    pausing = world.send("pause")
    world.answer(starting, EngineGoneError("dead"))
    assert (world.state.engine, world.state.pending) == ("running", pausing)


def test_a_refused_start_fails_the_job():
    for error, message in (
        (JobError("no such layer"), "no such layer"),
        (OverflowError("big"), "the job could not be started: OverflowError('big')"),
    ):
        world = Obedient(state_of("queued", None, "absent"))
        starting = world.send("start")
        answer = EngineAnswered(job="j", command=starting, error=error)
        assert refusal(world.state, answer, is_current=True) is None
        world.apply(answer)
        assert world.state.failure == {"code": "job_refused", "message": message, "param": None}
        assert plan(world.state, can_start=True) == Write("failed")


def test_a_client_gets_an_error_if_the_engine_cannot_do_it_or_is_not_there():
    world = Obedient(state_of("running", "rest", "running"))
    pausing = world.send("pause")

    def refused(error: Exception, *, is_current: bool = True) -> Exception | None:
        return refusal(
            world.state,
            EngineAnswered(job="j", command=pausing, error=error),
            is_current=is_current,
        )

    assert "could not do this with job j: full" in str(refused(DeviceMemoryError("full")))
    assert isinstance(refused(EngineGoneError("starting")), EngineGoneError)
    assert refused(EngineGoneError("died"), is_current=False) is None, "what is desired holds"
    assert refused(JobOverError("over")) is None


def test_only_an_end_that_is_certain_stands_when_the_store_cannot_be_written():
    for asked, engine, kept in (
        ("end", "running", None),
        ("end", "ended", "end"),
        ("rest", "ended", None),
    ):
        assert apply(state_of("running", asked, engine), StoreRefused()).asked == kept
    world = Obedient(state_of("running", "end", "running"))
    world.send("cancel")
    assert apply(world.state, StoreRefused()).asked == "end"


# -- time -----------------------------------------------------------------------------


def test_a_job_runs_from_its_start_to_a_pause_and_from_its_resumption_to_its_engines_death():
    world = Obedient(state_of("queued", None, "absent"))
    world.answer(world.send("start", now_s=10.0))
    world.apply(StepsRecorded(num_steps=1, now_s=12.0, last_step_s=5.0))
    assert world.state.meter is not None and world.state.meter.seconds_left(1, 12.0) == 2.0
    world.answer(world.send("pause", now_s=15.0))
    assert world.state.ran_s(100.0) == 5.0
    world.answer(world.send("resume", now_s=100.0))
    assert world.state.meter.seconds_left(1, 100.0) is None and world.state.last_step_s is None
    world.apply(EngineLost(now_s=103.0))
    assert (world.state.ran_s(200.0), world.state.meter) == (8.0, None)


def test_the_text_of_a_status_says_whether_a_job_starts_or_resumes():
    queued = state_of("queued", None, "running")
    assert event_message(queued, "running") == "Fine-tuning job started"
    assert (
        event_message(replace(queued, resumed_step=4), "running")
        == "Fine-tuning resumes from step 4"
    )
    resumed = make_state(record={"num_steps_done": 6}, engine="running", was_resumed=True)
    assert event_message(resumed, "running") == "Fine-tuning resumes from step 6"
    assert (
        event_message(state_of("paused", None, "running", was_resumed=True), "running")
        == "Fine-tuning job resumed"
    )
    assert event_message(state_of("paused", "run", "absent"), "queued") == "Fine-tuning job resumed"
    assert event_message(state_of("running", None, "absent"), "queued") is None


# -- histories ------------------------------------------------------------------------


class History(Obedient):
    """A store that does what it is told at once, and an engine that answers late, dies, and comes
    to an end."""

    def __init__(self) -> None:
        super().__init__(
            make_state(record={"status": "validating_files", "is_validated": False}, slot="none")
        )
        self.unanswered: list[PendingCommand] = []
        self.has_engine = True
        self.engine: str = "absent"  # what the engine really has of the job
        self.wanted: str | None = None  # by the client, last

    def do(self, action: Action) -> None:
        match action:
            case Start():
                assert self.has_engine and self.engine == "absent", (
                    "there is never a second one beside the first"
                )
                self.engine = "running"
                self.unanswered.append(self.send("start"))
            case SendCommand(command=command):
                assert command != "resume" or self.state.slot == "held"
                self.unanswered.append(self.send(command))
            case _:
                super().do(action)

    def settle(self, *, can_start: bool = True) -> None:
        super().settle(can_start=self.has_engine and can_start)
        if self.state.pending is None and self.state.asked is not None:
            self.wanted = None
            self.apply(RequestClosed())

    def ask(self, desired: Any) -> None:
        if self.is_over or self.state.asked is not None:
            return
        if (desired == "run") != (self.state.status == "paused") and desired != "end":
            return
        self.wanted = desired
        self.apply(ClientAsked(desired=desired))

    def answer_next(self) -> None:
        """The engine does, and answers, the oldest command."""
        if not self.unanswered:
            return
        command = self.unanswered.pop(0)
        error: Exception | None = None
        if command.epoch != self.state.epoch:
            error = EngineGoneError("dead")
        elif command.command != "start":
            if self.engine == "absent":
                error = JobOverError("it is over")
            else:
                after = {"pause": "paused", "resume": "running", "cancel": "absent"}
                self.engine = after[command.command]
        self.answer(command, error)

    def die(self) -> None:
        self.engine, self.has_engine = "absent", False
        if not self.is_over:
            self.apply(EngineLost(now_s=0.0))
            if self.state.status != "paused" and self.state.job.validated:
                self.write(replace(self.state.job, status="queued"))

    def end(self) -> None:
        """The job comes to its end in the engine, which reports it."""
        if self.engine == "running" and not self.is_over:
            self.engine = "absent"
            if self.state.pending is not None and self.state.pending.command == "start":
                self.answer(self.state.pending)
            self.write(replace(self.state.job, num_steps_done=9))
            self.apply(CheckpointRecorded(step=9), EngineEnded(outcome="succeeded"))

    def come(self) -> None:
        self.has_engine = True

    @property
    def is_over(self) -> bool:
        return self.state.status in OVER


VERBS = st.lists(
    st.sampled_from(["run", "rest", "end", "answer", "die", "come", "finish", "settle"]),
    max_size=40,
)


@given(verbs=VERBS)
def test_whatever_happens_a_wish_is_granted_and_there_is_one_end(verbs: list[str]):
    history, ends = History(), []
    for verb in [*verbs, "come", *["settle", "answer"] * 6, "settle"]:
        was_over, status = history.is_over, history.state.status
        match verb:
            case "run" | "rest" | "end":
                history.ask(verb)
            case "answer":
                history.answer_next()
            case "die":
                history.die()
            case "come":
                history.come()
            case "finish":
                history.end()
            case "settle":
                history.settle()
        if was_over:
            assert history.state.status == status, "nothing comes after the end"
        elif history.is_over:
            ends.append(history.state.status)
    assert len(ends) <= 1
    assert history.state.pending is None and history.wanted is None
    if not ends:
        assert (history.state.status, history.engine) in (
            ("running", "running"),
            ("paused", "paused"),
            ("paused", "absent"),
        )


@given(verbs=VERBS)
def test_an_end_that_is_asked_for_comes(verbs: list[str]):
    history = History()
    for verb in verbs:
        {
            "answer": history.answer_next,
            "die": history.die,
            "come": history.come,
            "finish": history.end,
        }.get(verb, history.settle)()
    was_over = history.is_over
    history.settle()
    history.ask("end")
    for _ in range(4):
        history.settle()
        history.answer_next()
    history.settle()
    assert history.is_over and (
        was_over or history.engine == "absent" or history.state.status == "succeeded"
    )
