"""Order in which jobs get training slots."""

from job_states import make_state

from coserve.jobs.lifecycle.live_jobs import LiveJobs
from coserve.jobs.lifecycle.slots import TenantLimit, TrainingSlots
from coserve.jobs.records import JobRecord


class Queue:
    """Jobs that ask for slots; a job's tenant is the first letter of its id."""

    def __init__(
        self, max_running: int | None, max_running_of: TenantLimit = lambda tenant: None
    ) -> None:
        self.jobs = LiveJobs(TrainingSlots(max_running, max_running_of))

    def ask(self, id: str) -> bool:
        """Request a slot; return whether the job has one at once."""
        self.jobs.add(make_state(id, record={"tenant": id[0]}, slot="none"))
        self.jobs.request_slot(id)
        return self.jobs[id].slot == "held"

    def leave(self, id: str) -> None:
        self.jobs.end(self.job(id))

    def job(self, id: str) -> JobRecord:
        return self.jobs[id].job


def test_tenants_take_turns_and_each_of_their_jobs_comes_in_order():
    queue = Queue(2)
    assert queue.ask("a1") and queue.ask("a2")
    for job in ("a3", "a4", "b1", "b2", "c1"):
        assert not queue.ask(job)
    assert [queue.jobs.slot_position(job) for job in ("a3", "a4", "b1", "b2", "c1", "a1")] == [
        4,
        5,
        1,
        3,
        2,
        None,
    ]
    order: list[str] = []
    for _ in range(5):
        queue.leave("a1" if not order else order[-1])
        (first,) = [state.id for state in queue.jobs if queue.jobs.slot_position(state.id) == 1]
        assert queue.jobs.grant_next_slot() == first and queue.jobs.grant_next_slot() is None
        order.append(first)
    assert order == ["b1", "c1", "b2", "a3", "a4"]


def test_a_tenant_at_its_own_limit_holds_up_no_other():
    queue = Queue(3, {"a": 1, "b": None}.get)
    assert queue.ask("a1")
    assert not queue.ask("a2")
    assert queue.ask("b1") and queue.ask("b2")
    queue.leave("b1")
    assert queue.jobs.grant_next_slot() is None, "the slot is free, but not for this tenant"
    queue.leave("a1")
    assert queue.jobs.grant_next_slot() == "a2"


def test_a_job_that_stops_waiting_is_not_granted_a_slot():
    queue = Queue(1)
    assert queue.ask("a")
    assert not queue.ask("b")
    queue.leave("b")
    queue.leave("a")
    assert queue.jobs.grant_next_slot() is None and queue.jobs.slot_position("b") is None
