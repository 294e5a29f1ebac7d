"""LeMix's plan, score and priorities by hand-made nodes; what every placement holds, on nodes of
chance."""

from itertools import product
from random import Random

import pytest
from cluster_views import PROFILE, make_node, make_task
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coserve.cluster.nodes.profiler import (
    fit_latency,
    node_profile_path,
    read_node_profile,
    with_stored_limits,
    write_node_profile,
)
from coserve.cluster.paths import plan_path
from coserve.cluster.placement import make_placement, placement_names
from coserve.cluster.placement.lemix import length_consistency
from coserve.cluster.placement.separate import split
from coserve.cluster.scheduler import ClusterScheduler
from coserve.cluster.view import (
    ClusterTask,
    ClusterView,
    Latency,
    LengthStats,
    NodeView,
    Placed,
    PlannedTask,
    TaskKind,
    Waits,
)
from experiments.cluster_simulation.pipeline import PipelineNode
from experiments.cluster_simulation.simulation import ClusterSimulation, SimulationResult

# A pass of any length: forward 1 s, backward 2 s in each of two stages.
SIMPLE = replace(PROFILE, forward=Latency(fixed_s=1.0), backward=Latency(fixed_s=2.0))


def two_stages(**fields) -> NodeView:
    return make_node("n", profile=SIMPLE, num_stages=2, **fields)


def after(node: NodeView, path: PlannedTask) -> NodeView:
    return replace(
        node, queue=(*node.queue, path), last=path, lengths=node.lengths.add(100), num_tasks=1
    )


# -- execution planning (algorithm 1) -----------------------------------------------------


def test_an_empty_node_runs_a_task_at_once():
    path = plan_path(two_stages(), make_task("a", "training", arrival_s=3.0), 5.0)
    assert path.task.forward_start_s == (5.0, 6.0) and path.task.forward_end_s == (6.0, 7.0)
    assert path.task.backward_start_s == (9.0, 7.0) and path.task.backward_end_s == (11.0, 9.0)
    assert (path.idleness_s, path.response_s, path.task.end_s) == (0.0, 4.0, 11.0)


def test_a_forward_pass_uses_the_gap_before_a_backward_pass():
    node = after(two_stages(), plan_path(two_stages(), make_task("a", "training"), 0.0).task)
    # Stage 0 is free from 1 to 4; stage 1 runs the backward pass from 2 to 4, so the forward pass
    # waits there.
    path = plan_path(node, make_task("b"), 0.0)
    assert path.task.forward_start_s == (1.0, 4.0)
    assert path.idleness_s == 0.0, "the backward pass between the two is work"
    assert path.response_s == 5.0
    late = plan_path(node, make_task("b"), 3.5)
    assert late.task.forward_start_s[0] == 6.0, (
        "it would not have ended when the backward pass begins"
    )
    assert late.idleness_s == 3.0 + (7.0 - 2.0 - 2.0)


def test_idleness_is_the_time_that_no_pass_fills():
    node = after(two_stages(), plan_path(two_stages(), make_task("a"), 0.0).task)
    path = plan_path(node, make_task("b"), 10.0)
    assert path.task.forward_start_s == (10.0, 11.0) and path.idleness_s == (10 - 1) + (11 - 2)


def test_backward_passes_keep_their_order():
    node = after(two_stages(), plan_path(two_stages(), make_task("a", "training"), 0.0).task)
    second = plan_path(node, make_task("b", "training"), 0.0).task
    assert (
        second.backward_start_s[1] >= 4.0
        and second.backward_start_s[0] >= node.queue[0].backward_end_s[0]
    )


def test_a_training_task_waits_for_the_one_before_and_requests_pass_it():
    node = two_stages(training_in_flight=1)
    for name in ("a", "b"):
        node = after(node, plan_path(node, make_task(name, "training"), 0.0).task)
    assert node.queue[1].forward_start_s == (6.0, 7.0), "when all of the first one has run"
    request = plan_path(node, make_task("r"), 0.0)
    assert request.task.forward_start_s == (1.0, 4.0), "as if the second one were not there"
    between = plan_path(node, make_task("r"), 4.5)
    assert between.task.forward_start_s == (7.0, 10.0), "it would not have ended when that begins"
    assert between.idleness_s == (7 - 1 - 2 - 1) + (10 - 2 - 2 - 1 - 2), (
        "but for the passes of both"
    )


@pytest.mark.parametrize("bound", [None, 1])
def test_plans_are_what_the_node_then_does(bound):
    kinds: tuple[TaskKind, ...] = ("training", "request")
    for drawn in product(kinds, repeat=6):
        node, plans = (
            PipelineNode("n", SIMPLE, num_stages=2, training_in_flight=bound),
            list[PlannedTask](),
        )
        for index, kind in enumerate(drawn):
            task = make_task(f"t{index}", kind)
            view = replace(node.report(0.0), queue=tuple(plans), last=plans[-1] if plans else None)
            plans.append(plan_path(view, task, 0.0).task)
            node.add(task, Placed("n"), 0.0)
        ran = {
            progress.task: progress.path
            for said in node.advance(100.0)
            for progress in said.progress
        }
        assert ran == {plan.task: plan for plan in plans}


# -- the score -----------------------------------------------------------------------------


def test_lengths_that_fit_score_higher():
    short = make_node("s", lengths=LengthStats().add(50).add(60).add(55))
    long = make_node("l", lengths=LengthStats().add(500).add(600).add(550))
    assert length_consistency(short, 55) > length_consistency(long, 55)
    assert length_consistency(long, 580) > length_consistency(short, 580)
    assert length_consistency(make_node("new"), 100) == pytest.approx(0.3989 / 100, rel=1e-3)


def place(name, view: ClusterView, task: ClusterTask, **settings):
    return make_placement(name, settings).place(view, task)


def test_few_tasks_are_consolidated_on_the_node_that_is_used():
    cluster = ClusterScheduler(make_placement("lemix"))
    for index in range(4):
        cluster.report(make_node(f"n{index}"))
    nodes = set()
    for index in range(40):
        cluster.submit(make_task(f"t{index}", arrival_s=0.5 * index))
        for task, placed in cluster.place(0.5 * index):
            nodes.add(placed.node)
            cluster.finish(task.id)
    assert len(nodes) == 1


def test_many_tasks_use_all_nodes():
    cluster = ClusterScheduler(make_placement("lemix"))
    for index in range(4):
        cluster.report(make_node(f"n{index}"))
    nodes = []
    for index in range(40):
        cluster.submit(make_task(f"t{index}", arrival_s=0.001 * index))
        nodes += [placed.node for _, placed in cluster.place(0.001 * index)]
    assert len(set(nodes)) == 4


# -- queue-level priorities ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lemix", "slack-affinity"])
def test_training_waits_while_requests_would_miss_their_slo(name):
    busy = plan_path(make_node("n"), make_task("x", num_tokens=9000), 0.0).task
    view = ClusterView(now_s=0.0, nodes=(after(make_node("n"), busy),), request_rate=1.0)
    assert isinstance(place(name, view, make_task("t", "training")), Waits)
    late = replace(view, now_s=61.0)
    assert isinstance(place(name, late, make_task("t", "training")), Placed), "but not for ever"


def test_requests_go_before_training():
    tasks = (make_task("t", "training"), make_task("r"))
    view = ClusterView(now_s=0.0, nodes=(make_node("n"),), requests=tasks[1:], training=tasks[:1])
    for name in ("lemix", "slack-affinity"):
        assert [task.id for task in make_placement(name).order(view)] == ["r", "t"]


def test_ours_serves_by_deadline_and_late_requests_last():
    tasks = (
        make_task("lost", arrival_s=-9.0, ttft_s=1.0),
        make_task("later", ttft_s=3.0),
        make_task("soon", ttft_s=2.0),
        make_task("train", "training"),
    )
    view = ClusterView(now_s=0.0, nodes=(make_node("n"),), requests=tasks[:-1], training=tasks[-1:])
    assert [task.id for task in make_placement("slack-affinity").order(view)] == [
        "soon",
        "later",
        "train",
        "lost",
    ]


def test_ours_sends_late_requests_on_while_a_later_stage_is_busy():
    # Stage 0 is free from 1 on, stage 1 has a long request until 30.
    long = plan_path(two_stages(), make_task("long"), 0.0).task
    node = after(two_stages(), replace(long, forward_end_s=(1.0, 30.0)))
    view = ClusterView(now_s=2.0, nodes=(node,))
    assert isinstance(place("slack-affinity", view, make_task("r", ttft_s=90.0)), Waits), (
        "another node may be free first"
    )
    assert isinstance(place("slack-affinity", view, make_task("r", ttft_s=3.0)), Placed)


def test_ours_keeps_a_node_open_for_requests_that_can_be_in_time():
    busy = after(two_stages(), plan_path(two_stages(), make_task("x"), 0.0).task)
    long = make_task("late", arrival_s=-9.0, ttft_s=1.0, num_tokens=100, batch_size=9)
    slow = replace(SIMPLE, forward=Latency(s_per_token=0.01))
    nodes = tuple(replace(busy, id=name, profile=slow) for name in ("n0", "n1"))
    view = ClusterView(now_s=2.0, nodes=nodes, request_rate=0.1)
    assert isinstance(place("slack-affinity", view, long), Placed)
    assert isinstance(place("slack-affinity", replace(view, nodes=nodes[:1]), long), Waits), (
        "the only one"
    )
    assert isinstance(
        place("slack-affinity", replace(view, nodes=nodes[:1], request_rate=0.0), long), Placed
    )


# -- what ours knows of nodes ------------------------------------------------------------------


def test_ours_goes_where_the_prefix_and_the_adapter_are():
    keys = tuple(bytes([index]) for index in range(6))
    cached, plain = make_node("cached", prefixes=frozenset(keys)), make_node("plain")
    view = ClusterView(now_s=0.0, nodes=(plain, cached))
    assert place("slack-affinity", view, make_task("r", prefix=keys)) == Placed(
        "cached", *_path(view, "cached", keys)
    )
    has = replace(plain, id="has", adapters=frozenset({"a@1"}))
    view = ClusterView(now_s=0.0, nodes=(plain, has))
    assert place("slack-affinity", view, make_task("r", adapter="a@1")).node == "has"


def _path(view, name, keys):
    node = next(node for node in view.nodes if node.id == name)
    task = make_task("r", prefix=keys)
    return (plan_path(node, task, 0.0, num_cached=node.num_cached_tokens(task)).task,)


def test_ours_spares_nodes_without_slack():
    view = ClusterView(now_s=0.0, nodes=(make_node("tight", slack=0.0), make_node("free")))
    assert place("slack-affinity", view, make_task("r")).node == "free"
    assert place("slack-affinity", view, make_task("t", "training")).node == "free"
    tight = ClusterView(now_s=0.0, nodes=(make_node("tight", slack=0.0),))
    assert isinstance(place("slack-affinity", tight, make_task("t", "training")), Waits)


# -- separate ----------------------------------------------------------------------------------


def test_separate_splits_the_nodes():
    assert [split(4, share) for share in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0)] == [1, 1, 1, 2, 3, 3]
    for name, rate, nodes in (
        ("separate", 0, "n2"),
        ("separate-dynamic", 0, "n1"),
        ("separate-dynamic", 60, "n2"),
    ):
        view = ClusterView(
            now_s=0.0, nodes=tuple(make_node(f"n{i}") for i in range(4)), request_rate=rate
        )
        assert place(name, view, make_task("t", "training")).node == nodes
        assert place(name, view, make_task("r")).node == "n0"
    alone = ClusterView(now_s=0.0, nodes=(make_node("n0"),))
    assert place("separate", alone, make_task("t", "training")).node == "n0"
    two = ClusterView(now_s=0.0, nodes=(make_node("n0"), make_node("n1")))
    only_there = make_task("r", adapter="of a job", excluded=frozenset({"n0"}))
    assert place("separate", two, only_there).node == "n1", (
        "what a job makes is asked where it trains"
    )


# -- memory (algorithm 2), and what all hold ------------------------------------------------------


@st.composite
def views(draw) -> tuple[ClusterView, ClusterTask]:
    random = Random(draw(st.integers(0, 10**6)))
    now_s, nodes = 100.0, []
    for index in range(random.randint(1, 6)):
        pages = random.choice([0, 50, 1000])
        node = make_node(
            f"n{index}",
            num_stages=random.choice([1, 2, 4]),
            num_pages=pages,
            num_free_pages=random.randint(0, pages),
            slack=random.random(),
            utilisation=random.random(),
            is_draining=random.random() < 0.2,
        )
        for number in range(random.randint(0, 5)):
            kind: TaskKind = random.choice(("request", "training"))
            task = make_task(f"q{number}", kind, num_tokens=random.randint(1, 3000), arrival_s=99.0)
            node = after(node, plan_path(node, task, 99.0 + random.random()).task)
        nodes.append(node)
    task = make_task(
        "t",
        random.choice(("request", "training")),
        arrival_s=random.choice([0.0, 99.5, 100.0]),
        num_tokens=random.randint(1, 5000),
        num_output_tokens=random.randint(0, 500),
        excluded=frozenset({"n0"} if random.random() < 0.3 else ()),
    )
    return ClusterView(
        now_s=now_s, nodes=tuple(nodes), last_arrival_s=99.4, request_rate=random.choice([0.0, 9.0])
    ), task


@settings(max_examples=150, deadline=None)
@given(views())
def test_what_every_placement_holds(drawn):
    view, task = drawn
    for name in placement_names():
        decision = make_placement(name).place(view, task)
        assert decision == make_placement(name).place(view, task), "pure"
        if isinstance(decision, Waits):
            assert decision.seconds > 0 and decision.reason
            continue
        node = next(node for node in view.nodes if node.id == decision.node)
        assert not node.is_draining and node.id not in task.excluded
        if name in ("lemix", "slack-affinity"):
            waited_s = view.now_s - task.arrival_s
            assert node.has_memory(task) or (
                decision.offloads and waited_s >= node.profile.longest_wait_s
            )
            starts, ends = decision.path.forward_start_s, decision.path.forward_end_s
            assert all(a < b for a, b in zip(starts, ends, strict=True)) and starts[0] >= view.now_s
            assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize("name", ["lemix", "slack-affinity"])
def test_a_task_waits_for_memory_and_then_has_caches_offloaded(name):
    view = ClusterView(now_s=0.5, nodes=(make_node("n", num_pages=100, num_free_pages=12),))
    assert isinstance(place(name, view, make_task("r", num_tokens=64)), Waits)
    assert isinstance(place(name, view, make_task("r", num_tokens=16)), Placed), (
        "a smaller one fits"
    )
    decision = place(name, replace(view, now_s=1.5), make_task("r", num_tokens=64))
    assert isinstance(decision, Placed) and decision.offloads


# -- in virtual time
# -----------------------------------------------------------------------------------


def tasks_of(seed: int, number: int, *, rate: float, training: float) -> list[ClusterTask]:
    random, now_s, tasks = Random(seed), 0.0, []
    for index in range(number):
        now_s += random.expovariate(rate)
        kind: TaskKind = "training" if random.random() < training else "request"
        tasks.append(
            make_task(
                f"t{index}", kind, arrival_s=now_s, num_tokens=random.randint(20, 400), ttft_s=0.25
            )
        )
    return tasks


def run(name: str, tasks: list[ClusterTask], *, num_stages: int = 2, **node) -> SimulationResult:
    profile = node.pop("profile", PROFILE)
    nodes = [PipelineNode(f"n{i}", profile, num_stages=num_stages, **node) for i in range(3)]
    return ClusterSimulation(nodes, make_placement(name)).run(tasks)


@pytest.mark.parametrize("name", placement_names())
def test_every_task_ends_and_the_same_seed_gives_the_same_run(name):
    tasks = tasks_of(1, 120, rate=60, training=0.3)
    ran, again = (run(name, tasks) for _ in range(2))
    assert ran.outcomes == again.outcomes
    assert len(ran.outcomes) == 120
    for outcome in ran.outcomes.values():
        assert outcome.node and outcome.task.arrival_s <= outcome.placed_s <= outcome.end_s
        assert outcome.task.trains == (outcome.first_token_s is None)
    assert 0 < ran.utilisation <= 1 and ran.throughput > 0


def test_separate_never_mixes():
    ran = run("separate", tasks_of(2, 60, rate=60, training=0.5))
    sides = {
        kind: {one.node for one in ran.outcomes.values() if one.task.kind == kind}
        for kind in ("request", "training")
    }
    assert not sides["request"] & sides["training"]


def test_ours_holds_the_most_slos():
    tasks = tasks_of(3, 400, rate=45, training=0.3)
    attained = {
        name: run(name, tasks).attainment(0.25)
        for name in ("slack-affinity", "lemix", "round-robin")
    }
    assert attained["slack-affinity"] > max(attained["lemix"], attained["round-robin"])


def test_a_stage_runs_one_pass_at_a_time_and_backward_passes_go_in_reverse():
    ended = []
    nodes = [PipelineNode("n", SIMPLE, num_stages=2)]
    simulation = ClusterSimulation(
        nodes,
        make_placement("round-robin"),
        on_end=lambda one, at_s: ended.append((one.task.id, at_s)),
    )
    simulation.run([make_task("a", "training"), make_task("b", arrival_s=0.5)])
    # Stage 0: a forward 0-1, b forward 1-2, a backward 4-6; stage 1: a forward 1-2, a backward 2-4,
    # b forward 4-5.
    assert ended == [("b", 5.0), ("a", 6.0)]


def test_a_node_bounds_how_many_training_tasks_are_in_flight():
    tasks = [make_task(f"t{index}", "training") for index in range(3)] + [
        make_task("r", arrival_s=0.5)
    ]
    ends = {}
    for bound in (1, 2, None):
        node = PipelineNode("n", SIMPLE, num_stages=2, training_in_flight=bound)
        assert node.report(0.0).training_in_flight == bound
        ran = ClusterSimulation([node], make_placement("round-robin")).run(tasks)
        ends[bound] = [ran.outcomes[task.id].end_s for task in tasks]
    # Stage 0: a forward 0-1, r forward 1-2, a backward 4-6, b forward 6-7; stage 1: a backward 2-4,
    # r forward 4-5.
    assert ends[1] == [6.0, 12.0, 18.0, 5.0]
    assert ends[None][2] < ends[2][2] < 18.0 and ends[None][3] > 5.0, (
        "without a bound the request is the last"
    )


def test_batches_wait_for_company_but_not_for_long():
    tasks = [make_task(f"t{index}", arrival_s=0.1 * index) for index in range(3)]
    ran = run("round-robin", tasks[:1], profile=SIMPLE, batch_size=2, batch_wait_s=0.5)
    assert ran.outcomes["t0"].first_token_s == 2.5, "T_w, then both stages"
    node = PipelineNode("n", SIMPLE, num_stages=2, batch_size=2, batch_wait_s=0.5)
    ran = ClusterSimulation([node], make_placement("round-robin")).run(tasks)
    assert [ran.outcomes[f"t{i}"].first_token_s for i in range(3)] == [2.1, 2.1, 3.1]


def test_a_node_without_memory_has_tasks_wait_and_then_offloads():
    node = PipelineNode("n", SIMPLE, num_stages=1, num_pages=10, offload_s=0.01)
    ran = ClusterSimulation([node], make_placement("round-robin")).run(
        [make_task("a"), make_task("b")]
    )
    assert ran.outcomes["b"].first_token_s == 2.0 and node.num_offloaded == 0, (
        "a has ended when b's turn comes"
    )
    node = PipelineNode("n", SIMPLE, num_stages=2, num_pages=10, offload_s=0.01)
    ran = ClusterSimulation([node], make_placement("round-robin")).run(
        [make_task("a"), make_task("b")]
    )
    assert node.num_offloaded > 0 and ran.outcomes["b"].end_s > 2.0


# -- the profiler
# ------------------------------------------------------------------------------------


def test_a_latency_is_found_again_from_what_it_says():
    lengths = (16, 64, 256, 1024)
    for truth in (
        Latency(fixed_s=0.01, s_per_token=1e-4, s_per_pair=1e-8),
        Latency(s_per_pair=2e-7),
        Latency(fixed_s=0.02),
    ):
        found = fit_latency(lengths, [truth.seconds(n) for n in lengths])
        for length in (20, 500, 2000):
            assert found.seconds(length) == pytest.approx(truth.seconds(length), rel=1e-3)
    halves = fit_latency(lengths, [truth.seconds(n) for n in lengths], num_stages=2)
    assert halves.seconds(100) == pytest.approx(truth.seconds(100) / 2)


def test_no_coefficient_is_below_zero():
    found = fit_latency((1, 10, 100), (1.0, 0.9, 0.5))
    assert min(found.fixed_s, found.s_per_token, found.s_per_pair) >= 0


def test_profiles_are_kept_by_kind_of_device(tmp_path):
    path = node_profile_path("RTX 6000 Ada", "org/model", "bfloat16", 40_000_000_000, tmp_path)
    assert path.name == "node-RTX_6000_Ada-org_model-bfloat16-40GB.json"
    assert read_node_profile(path) is None
    write_node_profile(path, PROFILE)
    assert read_node_profile(path) == PROFILE
    slower = replace(PROFILE, forward=Latency(fixed_s=9.0))
    write_node_profile(path, replace(PROFILE, memory_share=0.7, longest_wait_s=3.0))
    assert with_stored_limits(path, slower) == replace(slower, memory_share=0.7, longest_wait_s=3.0)
    assert with_stored_limits(tmp_path / "profiles" / "other.json", slower) == slower
    assert read_node_profile(tmp_path / "profiles" / "other.json") == slower
    path.write_text('{"forward": 3}')
    assert read_node_profile(path) is None, "it is made again"
    path.write_text("{}")
    path.chmod(0o666)
    assert read_node_profile(path) is None
