"""Plans of policies that have a bug: what is wrong is said, with the policy and the item."""

from collections.abc import Callable

import pytest
from engines import (
    drain,
    examples_of,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
)
from msgspec import structs
from random_plans import PlannedBy

from coserve.adapters import LoraConfig
from coserve.engine.engine import Engine
from coserve.errors import PolicyError
from coserve.scheduling import (
    LatencyModel,
    Partition,
    Plan,
    PlannedLoss,
    PlannedRows,
    PlannedTasklets,
    View,
)
from coserve.tuning.config import TuningConfig

LORA = LoraConfig(r=2)


def change_plans(engine: Engine, change: Callable[[Plan], Plan]) -> None:
    policy = engine.policy

    def plan(view: View, latency: LatencyModel) -> Plan:
        return change(policy.plan(view, latency))

    engine.policy = PlannedBy(function=plan)


def until_it_fails(engine: Engine) -> str:
    for _ in range(200):
        try:
            engine.step()
        except PolicyError as error:
            return str(error)
    raise AssertionError("no plan was refused")


def twice(field: str) -> Callable[[Plan], Plan]:
    return lambda plan: structs.replace(plan, **{field: getattr(plan, field) * 2})


def test_requests_have_their_rows_once():
    engine = make_engine()
    one = engine.add(prompts_of((9,))[0], greedy())
    change_plans(engine, twice("rows"))
    message = until_it_fails(engine)
    assert (
        message
        == f"policy slack plans rows of request '{one}/0' 2 times in one step; once is right"
    )


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("rows", "a window of job 'job-0' 2 times"),
        ("losses", "a piece of the loss of job 'job-0' 2 times"),
        ("tasklets", "tasklets of job 'job-0' 2 times"),
        ("updates", "an optimizer step of job 'job-0' 2 times"),
    ],
)
def test_jobs_have_each_piece_once(field, what):
    engine = make_engine()
    engine.submit(examples_of((9, 5)), adapter=LORA)
    change_plans(engine, twice(field))
    assert what in until_it_fails(engine)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (
            {"losses": (PlannedLoss("job-0", 3),)},
            "a piece of the loss of job 'job-0', which is at 'forward', not 'loss'",
        ),
        (
            {"tasklets": (PlannedTasklets("job-0", 3, 1),)},
            "tasklets of job 'job-0', which is at 'forward'",
        ),
        ({"rows": (PlannedRows("job-0", "window", 0, 0),)}, "a piece of 'job-0' without rows"),
    ],
)
def test_pieces_are_of_what_a_job_is_at(pieces, message):
    engine = make_engine()
    engine.submit(examples_of((9, 5)), TuningConfig(batch_size=2), adapter=LORA)
    change_plans(engine, lambda plan: structs.replace(Plan(begin=plan.begin), **pieces))
    assert message in until_it_fails(engine)


def test_a_window_of_a_pack_that_has_been_forward_is_refused():
    engine = make_engine()
    engine.submit(examples_of((9, 5)), TuningConfig(batch_size=2), adapter=LORA)
    window = PlannedRows("job-0", "window", 0, 14)
    change_plans(engine, lambda plan: structs.replace(Plan(begin=plan.begin), rows=(window,)))
    assert "a window of job 'job-0', which is at 'loss', not 'forward'" in until_it_fails(engine)


def test_a_device_is_divided_among_as_many_units_as_it_has():
    engine = make_engine()
    engine.submit(examples_of((9, 5)), adapter=LORA)
    engine.add(prompts_of((9,))[0], greedy(64))
    change_plans(engine, lambda plan: structs.replace(plan, partition=Partition(2, 1)))
    assert (
        "plans 2 units for the forward pass and 1 for jobs beside it on a device that has 1"
        in until_it_fails(engine)
    )


def test_what_is_not_there_is_left_out():
    engine = make_engine()
    nobody = {
        "preempt": ("nobody/0",),
        "drop": ("nobody",),
        "admit": ("nobody/0",),
        "begin": ("nobody",),
        "updates": ("nobody",),
        "rows": (PlannedRows("nobody/0", "decode", 0, 1), PlannedRows("nobody", "window", 0, 1)),
        "losses": (PlannedLoss("nobody", 1),),
        "tasklets": (PlannedTasklets("nobody", 1, 1),),
    }
    change_plans(
        engine,
        lambda plan: structs.replace(
            plan, **{name: getattr(plan, name) + more for name, more in nobody.items()}
        ),
    )
    (prompt,) = prompts_of((9,))
    one = engine.add(prompt, greedy(8))
    assert tokens_by_request(drain(engine))[one] == expected_tokens(prompt, 8)
    assert engine.num_preemptions == engine.stats().num_preemptions == 0, (
        "nobody's pages were taken"
    )
