"""What is true of a job after each event, as one value: histories of jobs, without an engine."""

from coserve.devices.messages.steps import PackSums
from coserve.engine.jobs.checkpoint import JobPosition
from coserve.engine.jobs.progress import Exchange, MemoryFailures, TrainingProgress
from coserve.tuning.early_stopping import BestEvaluation
from coserve.tuning.order import PackMembers
from coserve.tuning.shard import Combination, Shard, Synchronization

FIRST = PackMembers((), first_row=0, num_rows=10, num_trained=8, mean_context_len=5.0)
SECOND = FIRST._replace(first_row=10, num_rows=6, num_trained=5)
SUMS = PackSums(loss=16.0, num_correct=4, num_trained=8)


def after_one_step(progress: TrainingProgress) -> TrainingProgress:
    for _ in progress.packs:
        progress = progress.after_pack(SUMS)
    return progress.after_update(was_finite=True, error=None)


def exchange(synchronization: Synchronization, *, every_steps: int = 1) -> Exchange:
    shard = Shard(
        index=0,
        count=2,
        synchronization=synchronization,
        every_steps=every_steps,
        meet_every_steps=0,
        directory="/none",
    )
    return Exchange(shard=shard, num_steps=4)


def test_the_step_is_due_when_all_of_its_packs_are_done():
    progress = TrainingProgress(packs=(FIRST, SECOND))
    progress = progress.after_pack(SUMS)
    assert not progress.update_due and progress.packs == (SECOND,)
    progress = progress.after_pack(SUMS)
    assert progress.update_due
    assert (progress.sums.loss, progress.num_trained, progress.num_tokens_trained) == (32.0, 16, 16)


def test_a_step_leaves_what_follows_from_it_due():
    progress = after_one_step(TrainingProgress(packs=(FIRST,)))
    assert (progress.stage, progress.update_due, progress.num_steps_done) == (
        "after_step",
        False,
        1,
    )
    assert progress.num_tokens_at_step == 10 and progress.sums.num_trained == 0


def test_a_value_that_was_replaced_stays_as_it_was():
    first = TrainingProgress(packs=(FIRST, SECOND)).after_pack(SUMS)
    first.after_pack(SUMS)
    assert (first.sums.loss, first.packs) == (16.0, (SECOND,))


def test_what_a_reference_measures_is_not_trained():
    reference = FIRST._replace(is_reference=True)
    progress = TrainingProgress(packs=(reference, FIRST))
    assert progress.measures
    progress = progress.after_pack(SUMS)
    assert not progress.measures and (progress.num_tokens_trained, progress.sums.num_trained) == (
        0,
        0,
    )


def test_an_evaluation_ends_with_its_last_pack_and_trains_nothing():
    progress = after_one_step(TrainingProgress(packs=(FIRST,))).evaluating((FIRST, SECOND))
    assert progress.measures and not progress.evaluation_is_done
    progress = progress.after_pack(SUMS)
    assert progress.stage == "evaluation"
    progress = progress.after_pack(SUMS)
    assert (progress.stage, progress.update_due, progress.num_tokens_trained) == (
        "answers",
        False,
        10,
    )
    progress = progress.after_evaluation(BestEvaluation(step=1, value=2.0))
    assert progress.evaluation_is_done and progress.stage == "after_step", (
        "the next step is due, and no evaluation"
    )


def test_a_job_that_has_succeeded_has_nothing_left_to_measure():
    progress = after_one_step(TrainingProgress(packs=(FIRST,)))
    assert not progress.evaluation_is_done
    assert progress.ended("succeeded", None).evaluation_is_done
    assert not progress.ended("cancelled", None).evaluation_is_done


def test_a_pack_that_is_dropped_is_the_next_one_still():
    progress = TrainingProgress(packs=(FIRST,)).after_rows(7.0, now_s=1.0).after_drop()
    assert (progress.packs, progress.num_drops, progress.num_rows_run) == ((FIRST,), 1, 7.0)
    assert progress.after_rows(7.0, now_s=2.0).num_rows_run == 14.0, (
        "its rows are run again, and count again"
    )


def test_gradients_are_contributed_before_the_step_and_once():
    progress = TrainingProgress(packs=(FIRST,), exchange=exchange("synchronous"))
    assert not progress.contribution_due
    progress = progress.after_pack(SUMS)
    assert progress.contribution_due and not progress.update_due
    assert progress.exchange is not None
    waiting = TrainingProgress(exchange=progress.exchange.begin(0), sums=progress.sums)
    assert not waiting.contribution_due and not waiting.update_due
    assert waiting.exchange is not None
    combination = Combination(directories=("a", "b"), num_trained=20)
    combined = waiting.exchange.arrive(combination).end(combination, None)
    ready = TrainingProgress(exchange=combined, sums=progress.sums)
    assert ready.update_due and ready.num_trained == 20 and not ready.contribution_due
    after = ready.after_update(was_finite=True, error=None)
    assert after.exchange is not None and after.exchange.num_trained is None


def test_progress_is_contributed_after_the_step_and_once():
    progress = after_one_step(
        TrainingProgress(packs=(FIRST,), exchange=exchange("local-sgd", every_steps=2))
    )
    assert not progress.contribution_due, "it is due after every second step"
    progress = after_one_step(progress.starting_step((FIRST,)))
    assert progress.contribution_due and progress.exchange is not None
    combination = Combination(directories=("a", "b"), num_trained=0)
    taken = progress.exchange.begin(2).arrive(combination).end(combination, None)
    assert not taken.contributes_after(2), "it was given"


def test_a_job_resumes_with_what_follows_from_its_last_step_and_contributes_nothing_again():
    position = JobPosition(
        num_steps_done=2,
        num_tokens_trained=32,
        num_rows_run=64.0,
        num_bad_steps=0,
        evaluated=True,
        num_steps=4,
        num_examples=2,
        num_tokens=16,
    )
    progress = TrainingProgress(packs=(FIRST,), exchange=exchange("local-sgd")).resumed_from(
        position
    )
    assert (progress.stage, progress.packs, progress.evaluation_is_done) == ("after_step", (), True)
    assert not progress.contribution_due


def test_failures_hold_a_job_back_for_longer_each_time_with_smaller_pieces():
    failures = MemoryFailures()
    turns = []
    for num_rows in (64, 32, 16):
        failures = failures.after_failure(num_rows)
        turns.append(failures.num_turns)
    assert turns == [1, 2, 4] and failures.max_rows == 8
    failures = failures.after_pack()
    assert (failures.num_in_a_row, failures.max_rows) == (0, 10)
    for _ in range(10):
        failures = failures.after_failure()
    assert failures.too_many
