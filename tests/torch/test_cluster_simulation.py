"""Clusters in virtual time: the coarse model of a node against the engine, a day in cells, and the
experiment."""

import json
from collections import Counter
from math import isfinite

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from coserve.bench.places import ModelledPlace
from coserve.cluster.nodes.profiler import profile_of
from coserve.cluster.nodes.tracker import NodeTracker
from coserve.cluster.placement import make_placement, placement_names
from coserve.cluster.view import ClusterTask, ClusterView, Placed
from coserve.engine.config import EngineConfig
from coserve.errors import DataError
from coserve.models.backbone import load_backbone
from coserve.protocol.messages import Ready, StepRecord, StepReport
from coserve.scheduling.latency import LatencyModel
from coserve.simulate.hardware import H100
from coserve.workloads.arrivals import poisson
from coserve.workloads.traces import TracedJob, read_jobs
from experiments.cluster import lemix as cluster
from experiments.cluster.__main__ import app as cluster_app
from experiments.cluster.loss_curve import POINTS, loss_after
from experiments.cluster_simulation.engine import EngineNode
from experiments.cluster_simulation.fluid import FluidNode
from experiments.cluster_simulation.node import ModelledNode
from experiments.cluster_simulation.simulation import ClusterSimulation, TaskOutcome
from experiments.simulate_cluster import at_scale
from experiments.simulate_cluster.__main__ import app as scale_app

SECONDS = 6.0


@pytest.fixture(scope="module")
def place() -> ModelledPlace:
    return ModelledPlace.of_hardware(
        load_backbone("dummy:llama-3.1-8b", dtype="bfloat16", device="meta"), H100
    )


def tasks(rate: float, *, training_tokens: int = 0) -> list[ClusterTask]:
    trace = poisson(rate=rate, seconds=SECONDS, seed=1)
    found = at_scale._tasks(trace, ttft_s=2.0, tpot_s=0.025)
    if training_tokens:
        found.append(
            ClusterTask(id="job", kind="training", arrival_s=0.0, num_tokens=training_tokens)
        )
    return found


def fluid(place: ModelledPlace, name: str = "n") -> FluidNode:
    kind = at_scale._kind(place)
    return FluidNode(
        name, kind.node, LatencyModel(kind.profile), num_pages=kind.num_pages, tpot_s=kind.tpot_s
    )


def test_the_coarse_node_serves_and_trains_as_much_as_the_engine(place):
    given = tasks(2.0, training_tokens=10**6)
    kind = at_scale._kind(place)
    engine = EngineNode("n", place.open(EngineConfig()), kind.node)
    coarse = fluid(place)
    nodes: dict[str, ModelledNode] = {"fine": engine, "coarse": coarse}
    ran = {
        name: ClusterSimulation([node], make_placement("slack-affinity")).run(
            given, until_s=SECONDS
        )
        for name, node in nodes.items()
    }
    ended = {
        name: sum(one.end_s is not None for one in each.requests) for name, each in ran.items()
    }
    assert ended["fine"] >= 8 and abs(ended["coarse"] - ended["fine"]) <= 2
    trained = engine.engine.jobs.num_tokens_trained
    assert coarse.num_tokens_trained == pytest.approx(trained, rel=0.15)
    assert all(
        isfinite(one.response_s) for each in ran.values() for one in each.requests if one.end_s
    )


def test_a_node_of_a_cluster_tells_placements_what_a_modelled_one_does(place):
    kind, nodes, told = at_scale._kind(place), [], []
    for index, rate in enumerate((0.0, 0.5, 3.0)):
        node = EngineNode(
            f"n{index}", place.open(EngineConfig()), kind.node, hardware=kind.hardware
        )
        for task in tasks(rate, training_tokens=10**6 * (index == 1)) if rate else ():
            node.advance(task.arrival_s)
            node.add(task, Placed(node.id), task.arrival_s)
        node.advance(SECONDS)
        nodes.append(node.report(SECONDS))
        info = node.engine.device.info
        counts = {
            name: getattr(info, name)
            for name in ("num_pages", "page_bytes", "block_tokens", "vocab_size")
        }
        ready = Ready(
            model=info.model,
            dtype=info.dtype,
            device="cuda:0",
            threads=1,
            slo=node.engine.slo,
            max_positions=info.max_positions,
            weight_bytes=info.weight_bytes,
            hardware=kind.hardware,
            profile=node.engine.latency.profile,
            **counts,
        )
        tracker = NodeTracker(node.id, ready, profile_of(ready))
        step = StepRecord(
            end_s=SECONDS,
            step_s=index,
            predicted_s=0,
            decode_rows=0,
            prefill_rows=0,
            window_rows=0,
            backward_rows=0,
        )
        tracker.take(StepReport(steps=[step], stats=node.engine.stats()), SECONDS)
        told.append(tracker.view(SECONDS, jobs=tuple(node.engine.jobs), is_draining=False))
    assert [replace(each, utilisation=0.0) for each in told] == [
        replace(each, utilisation=0.0) for each in nodes
    ]
    assert nodes[0].slack == 1 > nodes[1].slack > nodes[2].slack > 0
    assert nodes[1].jobs == ("job",)
    for name in placement_names():
        for task in (
            tasks(2.0)[0],
            ClusterTask(id="job", kind="training", arrival_s=SECONDS, num_tokens=4096),
        ):
            modelled, real = (
                ClusterView(now_s=SECONDS, nodes=tuple(each)) for each in (nodes, told)
            )
            assert make_placement(name).place(real, task) == make_placement(name).place(
                modelled, task
            )


def test_a_cluster_learns_of_a_first_token_when_its_step_has_ended_and_the_message_has_come(place):
    def run(messages_s: float = 0.0) -> list[TaskOutcome]:
        node = EngineNode("n", place.open(EngineConfig()), at_scale._kind(place).node)
        tasks = [
            ClusterTask(
                id=f"r{index}", kind="request", arrival_s=at_s, num_tokens=2000, num_output_tokens=4
            )
            for index, at_s in enumerate((1.0, 1.04))
        ]
        placement = make_placement("slack-affinity", {"most_prompts": 1})
        ran = ClusterSimulation([node], placement, messages_s=messages_s).run(tasks)
        return list(ran.outcomes.values())

    first, second = run()
    assert 1.04 < first.first_token_s == second.placed_s, (
        "until then a task waits on the node, and no other may"
    )
    late_first, late_second = run(messages_s=0.005)
    assert (
        late_first.first_token_s
        == late_second.placed_s
        == pytest.approx(first.first_token_s + 0.005)
    )


def test_requests_of_a_cluster_hold_their_slos_beside_a_batch_that_came_before_them(place):
    kind, given = at_scale._kind(place), tasks(20.0)
    batch = [
        ClusterTask(
            id=f"batch-{number}",
            kind="request",
            arrival_s=0.0,
            num_tokens=1000,
            num_output_tokens=20,
            ttft_s=2.0,
            tpot_s=0.025,
            batch_due_s=1e6,
        )
        for number in range(400)
    ]
    found = {}
    for name, more in (("alone", []), ("beside", batch)):
        nodes = [
            EngineNode(f"n{index}", place.open(EngineConfig()), kind.node) for index in range(2)
        ]
        found[name] = ClusterSimulation(nodes, make_placement("slack-affinity")).run(
            [*given, *more], until_s=SECONDS
        )
    response_s = {
        name: max(one.response_s for one in ran.requests if not one.task.is_batch)
        for name, ran in found.items()
    }
    assert response_s["alone"] < response_s["beside"] < 2.0 * 0.25
    done = Counter(
        one.node for one in found["beside"].requests if one.task.is_batch and one.end_s is not None
    )
    assert min(done["n0"], done["n1"]) > 20, "in what requests leave, on both"


def test_a_coarse_node_alone_takes_what_the_latency_model_says(place):
    node, task = (
        fluid(place),
        ClusterTask(id="r", kind="request", arrival_s=1.0, num_tokens=500, num_output_tokens=101),
    )
    ran = ClusterSimulation([node], make_placement("round-robin")).run([task])
    latency, outcome = LatencyModel(place.profile), ran.outcomes["r"]
    assert outcome.response_s == pytest.approx(latency.prompt_s(500))
    decode_s = latency.decode_s(num_requests=1, context=550)
    assert outcome.end_s - outcome.first_token_s == pytest.approx(100 * decode_s, rel=0.02)
    job = ClusterTask(id="j", kind="training", arrival_s=0.0, num_tokens=10_000)
    node = fluid(place)
    ran = ClusterSimulation([node], make_placement("round-robin")).run([job])
    assert ran.outcomes["j"].end_s == pytest.approx(10_000 * node.trained_token_s)
    assert node.num_tokens_trained == pytest.approx(10_000)


def test_a_balancer_gives_every_request_to_one_cell():
    trace = poisson(rate=5, seconds=20, seed=2)
    parts = [
        at_scale.requests_of_cell(trace, rate=8, seconds=60, cell=cell, num_cells=3)
        for cell in range(3)
    ]
    assert sum(map(len, parts)) == 480, "played again from its start"
    times = sorted(request.at_s for part in parts for request in part)
    assert times[0] >= 0 and times[-1] == pytest.approx(60, rel=0.05)


def test_a_day_of_jobs_begins_with_the_median():
    jobs = [TracedJob(float(at_s), 1, 10.0) for at_s in (0, 1, 100, 120, 300)]
    assert [job.at_s for job in at_scale.jobs_of_day(jobs, 50.0)] == [0.0, 20.0]
    with pytest.raises(DataError, match="no jobs"):
        at_scale.jobs_of_day([], 50.0)


def test_losses_fall_with_examples():
    assert loss_after(0) == POINTS[0][1] and loss_after(10**6) == POINTS[-1][1]
    values = [loss_after(number) for number in range(0, 1200, 7)]
    assert values == sorted(values, reverse=True)


def test_the_experiment_says_what_each_placement_comes_to():
    config = cluster.ClusterConfig(
        models=("gpt-400m",), rates=(60.0,), training_shares=(0.5,), num_tasks=40
    )
    found = cluster.run(config)
    json.dumps(found)
    assert [row["placement"] for row in found["rows"]] == list(cluster.PLACEMENTS)
    for row in found["rows"]:
        assert row["throughput"] > 0 and 0 < row["utilisation"] <= 1 and 0 <= row["attainment"] <= 1
        assert POINTS[-1][1] <= row["inference_loss"] <= POINTS[0][1]
    for cell in found["cells"]:
        sides = cell["utilisation_training"], cell["utilisation_serving"]
        if cell["placement"] == "separate":
            assert sum(sides) / 2 == pytest.approx(cell["utilisation"], abs=2e-4), "two nodes each"
    assert (
        set(found["scheduling_ms"])
        == set(found["scheduling_overload_ms"])
        == set(cluster.PLACEMENTS)
    )
    again = cluster.run(config)
    assert found["cells"] == again["cells"], "the same seed gives the same"


@pytest.mark.parametrize("bound", [None, 1])
def test_no_placement_is_faster_than_nodes_that_never_idle(bound):
    model = cluster.MODELS["llama-8b"]
    given = cluster.tasks(model, rate=200, training_share=0.35, number=200, seed=0)
    least_s = cluster.least_s(model, given, num_nodes=4, training_in_flight=bound)
    work_s = sum(
        cluster.play(model, "round-robin", 0.35, given, training_in_flight=bound)[0].busy_s.values()
    )
    assert least_s >= work_s / 4 * (1 - 1e-9)
    for name in cluster.PLACEMENTS:
        assert cluster.play(model, name, 0.35, given, training_in_flight=bound)[0].end_s >= least_s
    one_s, many_s = (
        cluster.play(model, "separate", 0.35, given, training_in_flight=each)[0].end_s
        for each in (1, None)
    )
    assert one_s > 1.5 * many_s, "the node that trains stands idle for half of the time"


def test_separate_nodes_load_trained_weights_after_every_hundred_tasks():
    model = cluster.MODELS["gpt-400m"]
    few = cluster.tasks(model, rate=60, training_share=0.5, number=100, seed=0)
    _, stale = cluster.play(model, "separate", 0.5, few)
    assert stale == POINTS[0][1], "fewer than a hundred: nothing was loaded"
    _, fresh = cluster.play(model, "round-robin", 0.5, few)
    assert fresh < stale


@pytest.mark.parametrize(
    ("placement", "name", "rate"),
    [("lemix", "llama-8b", 80.0), ("slack-affinity", "llama-70b", 80.0)],
)
def test_in_overload_lemix_and_ours_do_more_than_round_robin(placement, name, rate):
    model = cluster.MODELS[name]
    given = cluster.tasks(model, rate=rate, training_share=0.1, number=1000, seed=0)
    ran, in_turns = (
        cluster.play(model, each, 0.1, given)[0] for each in (placement, "round-robin")
    )
    assert ran.throughput > 1.05 * in_turns.throughput


def test_jobs_are_read_from_a_trace(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("submit_s,num_gpus,duration_s,virtual_cluster\n5,2,60,a\n9,1,0,a\n")
    assert read_jobs(path) == [TracedJob(5.0, 2, 60.0)]
    path.write_text("submit_s,num_gpus,duration_s\nx,2,60\n")
    with pytest.raises(
        DataError, match="line 2: x, 2, 60 are not a time, a number of GPUs and seconds"
    ):
        read_jobs(path)


@pytest.mark.parametrize(
    ("app", "arguments", "words"),
    [
        (cluster_app, ["--models", "gpt-9"], "'gpt-9' is not one of gpt-400m"),
        (cluster_app, ["--rates", "fast"], "'fast' must be numbers above 0"),
        (
            cluster_app,
            ["--training-rates", "0.5,2"],
            "'0.5,2' must be numbers above 0, up to 1",
        ),
        (
            scale_app,
            ["--trace", "x.csv", "--placement", "best"],
            "'best' is not one of lemix",
        ),
        (
            scale_app,
            ["--trace", "x.csv", "--nodes", "9"],
            "9 nodes are not a multiple of the cells of 8",
        ),
        (scale_app, ["--trace", "x.csv"], "x.csv cannot be read"),
        (
            scale_app,
            ["--trace", "azure.csv", "--hardware", "a100,h100"],
            "only one kind of device is possible here",
        ),
        (
            scale_app,
            ["--trace", "azure.csv", "--rate", "inf"],
            "less than or equal to 1000000000",
        ),
        (
            scale_app,
            ["--trace", "azure.csv", "--hours", "inf"],
            "less than or equal to 1000000",
        ),
    ],
)
def test_bad_input_is_named(app, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{second},374,44" for second in ("46.68", "50.99")]
    (tmp_path / "azure.csv").write_text("\n".join(lines))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    told = " ".join((result.output + str(result.exception or "")).replace("│", " ").split())
    assert words in told
