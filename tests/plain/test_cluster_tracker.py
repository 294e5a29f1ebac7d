"""Statistics that a front makes of its nodes' reports."""

import dataclasses
from pathlib import Path

import pytest
from cluster_nodes import PROFILE, READY, make_request, make_stats, make_step
from msgspec.structs import replace

from coserve.cluster.nodes.prefixes import SentPrefixes, prefix_keys
from coserve.cluster.nodes.profiler import profile_of, write_node_profile
from coserve.cluster.nodes.registry import node_names
from coserve.cluster.nodes.tracker import NodeTracker, Totals, joined_ready
from coserve.cluster.tasks import task_of_request
from coserve.cluster.view import ClusterTask, NodeView
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import AdapterRef
from coserve.protocol.messages import StepReport
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.profile import Curve
from coserve.scheduling.slo import Slo


def test_stats_are_summed_but_for_the_worst():
    one = make_stats(
        num_running=1, num_pages=10, num_pages_by_owner={"requests": 4}, margin=1.5, slack=0.5
    )
    two = make_stats(
        num_running=2,
        num_pages=10,
        num_pages_by_owner={"requests": 1, "jobs": 2},
        slo=Slo(ttft_s=2, tpot_s=1),
    )
    found = Totals().of({"one": one, "two": two})
    assert (found.num_running, found.num_pages, found.margin, found.slo.tpot_s, found.slack) == (
        3,
        20,
        1.5,
        1,
        0.5,
    )
    assert found.num_pages_by_owner == {"requests": 5, "jobs": 2}
    assert Totals().of({}) is None


def test_counts_begin_anew_when_an_engine_is_lost():
    totals = Totals()
    assert (
        totals.of({"one": make_stats(num_steps=5), "two": make_stats(num_steps=7)}).num_steps == 12
    )
    totals.restart({"two": make_stats(num_steps=7)})
    assert totals.of({"two": make_stats(num_steps=9)}).num_steps == 2
    assert (
        totals.of({"two": make_stats(num_steps=9), "one": make_stats(num_steps=1)}).num_steps == 3
    )


def test_a_view_holds_what_a_node_told():
    tracker = NodeTracker("one", READY, profile_of(READY))
    steps = [make_step(end_s, 0.5) for end_s in range(100, 110)]
    counts = {"num_running": 2, "num_waiting": 1, "num_batch_running": 7, "num_batch_waiting": 5}
    told = make_stats(**counts, num_pages_free=1, num_pages_for_requests=3, slack=0.25)
    tracker.take(StepReport(steps=steps, stats=told), 100.0)
    tracker.adapters.add("a@3")
    view = tracker.view(110.0, jobs=("a",), is_draining=False)
    assert (view.utilisation, view.num_pages, view.num_free_pages, view.jobs) == (
        0.5,
        10,
        3,
        ("a",),
    )
    assert (view.num_running, view.num_waiting, view.slack, view.adapters) == (
        2,
        1,
        0.25,
        frozenset({"a@3"}),
    )
    assert (view.num_batch_running, view.num_batch_waiting) == (7, 5)
    later = tracker.view(1000.0, jobs=(), is_draining=True)
    assert (later.utilisation, later.slack) == (0, 1), "it has told nothing because it does nothing"


def test_a_node_is_planned_with_what_it_measured(tmp_path: Path):
    view = NodeTracker("one", READY, profile_of(READY, tmp_path)).view(
        0.0, jobs=(), is_draining=False
    )
    latency = LatencyModel(PROFILE)
    for length in (64, 512):
        assert view.profile.forward.seconds(length) == pytest.approx(
            latency.prompt_s(length), rel=0.1
        )
    assert view.profile.backward.seconds(512) > view.profile.forward.seconds(512) / 2
    assert view.profile.decode_s == pytest.approx(latency.decode_s(num_requests=1, context=512))
    assert (view.hardware, view.profile.block_tokens, view.profile.training_yields) == (
        "slow one",
        16,
        True,
    )
    (path,) = (tmp_path / "profiles").iterdir()
    write_node_profile(path, replace(view.profile, memory_share=0.5))
    assert profile_of(READY, tmp_path).memory_share == 0.5, (
        "as an operator has set it for this kind of device"
    )


def test_memory_and_wait_limits_follow_from_what_a_node_measured():
    measured = replace(READY, page_bytes=16_000, num_pages=10_000)
    usual = profile_of(measured)
    assert usual.pages_per_trained_token == 0.0, "what training keeps is not known"
    assert usual.memory_share == 0.95 and usual.longest_wait_s > 0
    known = replace(measured, profile=dataclasses.replace(PROFILE, saved_bytes_per_token=32_000))
    made = profile_of(known)
    assert made.pages_per_trained_token == 2.0
    assert made.memory_share == pytest.approx(1 - 1024 * 2 / 10_000), (
        "a pack finds room beside requests"
    )
    slow = dataclasses.replace(PROFILE, forward=Curve(rows=(1, 1001), seconds=(0.5, 0.6)))
    assert profile_of(replace(measured, profile=slow)).longest_wait_s > 2 * usual.longest_wait_s, (
        "memory comes later"
    )
    small = profile_of(replace(known, num_pages=100))
    assert small.memory_share == 0.5 and small.longest_wait_s > made.longest_wait_s
    job = ClusterTask(id="job", kind="training", arrival_s=0.0, num_tokens=2048, batch_size=8)
    empty = NodeView(id="n", hardware="", profile=small, num_pages=100, num_free_pages=100)
    assert empty.num_pages_of(job) == 50 and empty.has_memory(job), (
        "an engine trains in packs that find room"
    )
    assert not replace(empty, num_free_pages=40).has_memory(job)


def test_requests_with_states_need_their_pages_too():
    measured = replace(READY, page_bytes=16_000, num_pages=10_000)
    without, made = profile_of(measured), profile_of(replace(measured, num_state_pages=40))
    assert made.longest_wait_s != without.longest_wait_s, "fewer requests run at once"
    request = ClusterTask(
        id="r", kind="request", arrival_s=0.0, num_tokens=100, num_output_tokens=20, batch_size=3
    )
    pages = [
        NodeView(id="n", hardware="", profile=each).num_pages_of(request)
        for each in (without, made)
    ]
    assert pages == [23, 23 + 3 * 40]


def test_nodes_of_a_kind_have_the_limits_of_the_first(tmp_path: Path):
    measured = replace(READY, page_bytes=16_000, num_pages=10_000)
    first = profile_of(measured, tmp_path)
    slow = dataclasses.replace(PROFILE, forward=Curve(rows=(1, 1001), seconds=(0.5, 0.6)))
    second = profile_of(replace(measured, profile=slow, num_pages=10_020), tmp_path)
    assert second.longest_wait_s == first.longest_wait_s, (
        "as much memory is free there, but for a little"
    )
    other = profile_of(replace(measured, profile=slow, hardware="another"), tmp_path)
    assert other.longest_wait_s > first.longest_wait_s
    assert len(list((tmp_path / "profiles").iterdir())) == 2


def test_limits_of_a_small_pool_are_not_those_of_a_large_one(tmp_path: Path):
    keeping = dataclasses.replace(PROFILE, saved_bytes_per_token=32_000)
    tried = replace(
        READY, page_bytes=16_000, profile=keeping, num_pages=1_000
    )  # a first run with --memory 16MB, say
    large = replace(tried, num_pages=2_500_000)
    assert profile_of(tried, tmp_path).memory_share == 0.5, "a pack needs more"
    for _ in range(2):
        found = profile_of(large, tmp_path)
        assert (found.memory_share, found.longest_wait_s) == (
            profile_of(large).memory_share,
            profile_of(large).longest_wait_s,
        )
    assert found.memory_share == 0.95
    (path,) = (each for each in (tmp_path / "profiles").iterdir() if each.stem.endswith("-40GB"))
    write_node_profile(path, replace(found, memory_share=0.7))
    assert profile_of(large, tmp_path).memory_share == 0.7, "as an operator has set it"
    assert profile_of(tried, tmp_path).memory_share == 0.5


def test_a_front_uses_the_nodes_that_there_are_whatever_their_numbers():
    assert node_names([], 2) == ["node-0", "node-1"]
    assert node_names(["node-1", "node-3"], 2) == ["node-1", "node-3"], (
        "node-0 and node-2 would have no device"
    )
    assert node_names(["node-1", "node-3"], 4) == ["node-1", "node-3", "node-0", "node-2"]
    assert node_names(["node-0", "node-1"], 1) == ["node-0", "node-1"], (
        "which of them has the device is Ray's affair"
    )


def test_a_front_remembers_what_it_sent_where():
    sent = SentPrefixes(num_pages=4)
    salted = SamplingParams(max_tokens=4, cache_salt="mine")
    adapter = AdapterRef(name="a", directory="/step-1")
    same, longer = list(range(40)), list(range(64))
    keys = prefix_keys(make_request("r", prompt=same), 16)
    assert len(keys) == 2 and prefix_keys(make_request("r", prompt=longer), 16)[:2] == keys
    for settings in ({"params": salted}, {"adapter": adapter}, {"prompt": [7, *same]}):
        assert not set(keys) & set(
            prefix_keys(make_request("r", **{"prompt": same, **settings}), 16)
        )
    scored = SamplingParams(max_tokens=4, prompt_logprobs=1)
    assert prefix_keys(make_request("r", prompt=same, params=scored), 16) == ()
    sent.use(keys)
    other = prefix_keys(make_request("r", prompt=list(range(100, 150))), 16)
    sent.use(other)
    assert sent.keys == {keys[0], *other}, (
        "no more than the pool has pages, and beginnings stay longest"
    )


def test_a_task_has_the_priority_of_its_request_and_when_batch_work_is_due():
    task = task_of_request(
        make_request("r", priority=-3, batch_due_s=7.0), prefix=(), excluded=frozenset()
    )
    assert (task.priority, task.batch_due_s, task.is_batch) == (-3, 7.0, True)
    plain = task_of_request(make_request("r"), prefix=(), excluded=frozenset())
    assert (plain.priority, plain.batch_due_s, plain.is_batch) == (0, None, False)


def test_times_of_a_request_are_those_of_the_clock_of_its_node():
    found = make_request("r", arrival_s=10.0, batch_due_s=70.0).by_clock(-4.0)
    assert (found.arrival_s, found.batch_due_s) == (6.0, 66.0)
    assert make_request("r", arrival_s=10.0).by_clock(5.0) == make_request("r", arrival_s=15.0)


def test_what_one_takes_any_takes():
    found = joined_ready(
        [READY, replace(READY, num_pages=5, max_positions=32, slo=Slo(ttft_s=2.0, tpot_s=0.5))]
    )
    assert (found.num_pages, found.max_positions, found.slo.tpot_s) == (5, 32, 0.5)
