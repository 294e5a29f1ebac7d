"""A device is measured once for each model, dtype and state of the code; what lies on disk is used
again.

However busy the machine is at the first start, what is found is near to what steps take; what is
not is corrected.
"""

from dataclasses import replace
from random import Random

import pytest
import torch
from engines import examples_of
from support import make_backbone

from coserve import EngineConfig, LoraConfig, SamplingParams, TuningConfig
from coserve.devices.profiles import kept as kept_profiles
from coserve.devices.profiles import pieces as profiled_pieces
from coserve.devices.profiles import profiling
from coserve.devices.profiles.stopwatch import Stopwatch, Timing, finish, rising
from coserve.devices.profiles.store import correct_profile, read_profile, write_profile
from coserve.engine.engine import Engine
from coserve.kernels.cpu import CpuBackend
from coserve.kernels.trace import MAX_PROMPT_PAIRS
from coserve.models import load_backbone
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.slo import default_tpot_s
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.worker.refinement import ProfileRefinement


def test_a_profile_is_measured_once_for_each_model_and_state_of_the_code(tmp_path, monkeypatch):
    measured = []

    def measure(backbone, progress):
        measured.append(backbone)
        return roofline_profile(
            backbone, Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
        )

    monkeypatch.setattr(kept_profiles, "measure_profile", measure)
    llama, qwen = make_backbone("llama"), make_backbone("qwen2")
    first = kept_profiles.load_profile(llama, tmp_path)
    assert kept_profiles.load_profile(llama, tmp_path) == first and measured == [llama]
    kept_profiles.load_profile(qwen, tmp_path)
    assert measured == [llama, qwen]
    monkeypatch.setattr(kept_profiles, "_code", lambda: "another")
    assert kept_profiles.load_profile(llama, tmp_path) == first
    assert measured == [llama, qwen, llama], "other code may be faster"
    for path in tmp_path.iterdir():
        path.write_text("{")
    assert kept_profiles.load_profile(llama, tmp_path) == first and len(measured) == 4, (
        "what is broken is measured again"
    )
    assert kept_profiles.load_profile(llama, tmp_path) == first and len(measured) == 4
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0
        path.chmod(0o666)
    kept_profiles.load_profile(llama, tmp_path)
    assert len(measured) == 5, "and what others can write"


def test_the_state_of_the_code_is_that_of_what_is_measured(tmp_path, monkeypatch):
    for name in ("kernels/weights.py", "kernels/cpu/common/rows.cpp", "server/app.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(kept_profiles, "_PACKAGE", tmp_path)
    states = []
    for name in (None, "server/app.py", "kernels/weights.py", "kernels/cpu/common/rows.cpp"):
        if name is not None:
            (tmp_path / name).write_text("2")
        kept_profiles._code.cache_clear()
        states.append(kept_profiles._code())
    kept_profiles._code.cache_clear()
    assert states[0] == states[1] and len(set(states)) == 3


# -- noise ----------------------------------------------------------------------------------


class NoisyClock:
    """Clock by which work between two readings takes 80 ms, but often several times as long: first
    touches, other processes, for seconds on end.
    """

    def __init__(self, seed: int) -> None:
        self._random, self._now_s, self._busy_until_s = Random(seed), 0.0, 3.0

    def __call__(self) -> float:
        rng = self._random
        if rng.random() < 0.03:
            self._busy_until_s = self._now_s + rng.uniform(0.1, 1.0)
        slow = (
            rng.uniform(2.0, 24.0)
            if self._now_s < self._busy_until_s or rng.random() < 0.2
            else 1.0
        )
        self._now_s += 0.08 * slow * rng.lognormvariate(0, 0.02)
        return self._now_s


def test_three_noisy_first_starts_find_the_same_default():
    """The decode step sets the default TPOT: 114, 184 and 1,140 ms were measured for the same 47
    ms.
    """
    backbone = make_backbone("llama")
    found = []
    for seed in range(3):
        profile = profiling.measure_profile(backbone, time_s=NoisyClock(seed))
        found.append(default_tpot_s(LatencyModel(profile)))
        for curve in (profile.forward, profile.head, profile.loss, profile.backward):
            assert list(curve.seconds) == sorted(curve.seconds)
        assert profile.joining >= 1, (
            "several packs side by side cost no less than one of as many rows"
        )
    assert max(found) < 1.1 * min(found), found


class BusyClock:
    """Clock by which work between two readings takes 80 ms; after some readings, by number, twice
    as long.
    """

    def __init__(self, busy: range = range(0)) -> None:
        self._busy, self._now_s, self.num_readings = busy, 0.0, 0

    def __call__(self) -> float:
        self._now_s += 0.08 * (2 if self.num_readings in self._busy else 1)
        self.num_readings += 1
        return self._now_s


@pytest.mark.long
def test_a_machine_that_becomes_busy_while_it_is_measured_is_measured_again():
    backbone, quiet = make_backbone("llama"), BusyClock()
    expected = profiling.measure_profile(backbone, time_s=quiet)
    late = BusyClock(range(quiet.num_readings // 2, quiet.num_readings + quiet.num_readings // 4))
    found = profiling.measure_profile(backbone, time_s=late)
    for curve in ("forward", "head", "loss", "backward"):
        assert getattr(found, curve).seconds == pytest.approx(
            getattr(expected, curve).seconds, rel=0.01
        ), curve
    assert found.s_per_parameter == pytest.approx(expected.s_per_parameter, rel=0.01)


@pytest.mark.skipif(
    not CpuBackend.is_available(torch.device("cpu")), reason="needs compiled kernels"
)
def test_which_steps_run_as_one_call_is_told():
    traced = profiling.measure_profile(load_backbone("tiny", weights="int8"), time_s=BusyClock())
    plain = profiling.measure_profile(make_backbone("opt"), time_s=BusyClock())
    assert traced.one_call.rows > 1 and traced.one_call.prompt_pairs >= MAX_PROMPT_PAIRS
    assert plain.one_call.rows == 0


def test_a_piece_is_run_until_its_fastest_runs_agree():
    times, runs = iter([9.0, 5.0, 3.0, 1.3, 1.0, 7.0, 1.01, 8.0]), []
    now_s = 0.0

    def time_s() -> float:
        return now_s

    def measure() -> Timing:
        nonlocal now_s
        yield
        runs.append(next(times))
        now_s += runs[-1] / 100
        return runs[-1] / 100

    assert finish(Stopwatch(time_s).stable_s(measure)) == pytest.approx(0.01005)
    assert len(runs) == 7


def test_who_is_shown_no_progress_is_told_what_is_waited_for(tmp_path, monkeypatch, caplog):
    profile = roofline_profile(
        make_backbone("llama"),
        Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5),
    )
    monkeypatch.setattr(kept_profiles, "measure_profile", lambda backbone, progress: profile)
    kept_profiles.load_profile(make_backbone("llama"), tmp_path / "a", lambda done, total: None)
    assert not caplog.messages, "it is shown"
    kept_profiles.load_profile(make_backbone("llama"), tmp_path / "b")
    assert (
        len(caplog.messages) == 1
        and "measuring how fast" in caplog.messages[0]
        and "once" in caplog.messages[0]
    )
    kept_profiles.load_profile(make_backbone("llama"), tmp_path / "b")
    assert len(caplog.messages) == 1, "it is kept"


def test_what_more_rows_did_faster_was_held_up():
    assert rising({1: 5.0, 4: 2.0, 8: 9.0, 16: 3.0, 32: 4.0}) == {
        1: 2.0,
        4: 2.0,
        8: 3.0,
        16: 3.0,
        32: 4.0,
    }


@pytest.mark.long
def test_a_cpu_that_can_be_divided_is_measured_in_parts_too(monkeypatch):
    """The rest of the profile is hardly measured: threads that meet wait long where other processes
    compute."""
    cpu = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)

    def modelled(self):
        yield
        return roofline_profile(self.backbone, cpu)

    def joins_for_nothing(self, rows, pair_s):
        yield
        return 1.0

    monkeypatch.setattr(profiling, "WHOLE", replace(profiling.QUICK, is_whole=True))
    monkeypatch.setattr(profiled_pieces.ProfiledPieces, "joining", joins_for_nothing)
    monkeypatch.setattr(profiling._Measurement, "_round", modelled)
    backbone, before = make_backbone("llama"), torch.get_num_threads()
    assert profiling.measure_profile(backbone).sharing is None, "of one thread"
    torch.set_num_threads(2)
    try:
        profile = profiling.measure_profile(backbone)
        assert torch.get_num_threads() == 2
        assert profiling.measure_profile(backbone.deterministic()).sharing is None
    finally:
        torch.set_num_threads(before)
    assert profile.sharing is not None and profile.sharing.num_units == 2
    (share,) = profile.sharing.shares
    assert share.units == 1 and all(0 < speed <= 1 for speed in (*share.forward, *share.backward))
    assert min(profile.sharing.forward_interference, profile.sharing.backward_interference) >= 0


# -- corrections -----------------------------------------------------------------------------


def taught(factor: float, steps: int) -> LatencyModel:
    """A model after steps that took this many times what the profile says."""
    profile = roofline_profile(
        make_backbone("llama"), Hardware(name="cpu", flops_per_s=6e9, bytes_per_s=1e8, call_s=1e-4)
    )
    latency, truth = LatencyModel(profile), LatencyModel(profile)
    for step in range(steps):
        load = ForwardLoad(rows=1 + step % 8, sampled=1 + step % 8, spans=1 + step % 8, keys=100)
        predicted_s, measured_s = latency.forward_s(load), factor * truth.forward_s(load)
        latency.corrections.observe(
            "forward", load.rows, False, predicted_s=predicted_s, measured_s=measured_s
        )
        latency.observe_step(predicted_s=predicted_s, measured_s=measured_s)
    return latency


def test_the_default_follows_what_steps_really_take():
    wrong, right = taught(10.0, 1), taught(10.0, 600)
    assert default_tpot_s(right) > 1.5 * default_tpot_s(wrong)
    step_s = LatencyModel(right.profile).decode_s(num_requests=1, context=512)
    assert default_tpot_s(right) == pytest.approx(2.5 * 10 * step_s, rel=0.1)


def test_a_model_of_this_device_holds_for_true_what_steps_took_however_long_ago():
    latency, load = taught(1.12, 60), ForwardLoad(rows=4, sampled=4, spans=4, keys=100)
    untaught = LatencyModel(latency.profile)
    for _ in range(3000):  # steps of other kinds
        latency.observe_step(predicted_s=1.0, measured_s=1.0)
    aged_s = latency.forward_s(load)
    assert aged_s == pytest.approx(untaught.forward_s(load), rel=0.02)
    seen = latency.as_seen()
    assert seen.forward_s(load) == pytest.approx(1.12 * untaught.forward_s(load), rel=0.02)
    assert seen.loss_s(64) > 1.05 * untaught.loss_s(64), "what was not seen follows the others"
    assert latency.forward_s(load) == aged_s, "the model that learned is as it was"


def test_a_profile_far_from_what_steps_take_is_corrected_on_disk(tmp_path):
    def settled(latency):
        return latency.corrections.settled(latency.profile)

    assert settled(taught(3.0, 100)) is None, "too early to say"
    assert settled(taught(1.05, 600)) is None, "near enough"
    latency = taught(3.0, 600)
    profile = settled(latency)
    assert profile is not None
    path = tmp_path / "profile.json"
    write_profile(path, {"device": "cpu"}, latency.profile)
    correct_profile(path, profile)
    again = read_profile(path)
    assert again == profile
    load = ForwardLoad(rows=4, sampled=4, spans=4, keys=100)
    assert LatencyModel(again).forward_s(load) == pytest.approx(latency.forward_s(load), rel=0.05)
    assert settled(LatencyModel(again)) is None
    path.unlink()
    correct_profile(path, profile)
    assert not path.exists(), "there is nothing to correct"


def test_profiles_from_before_sampling_was_measured_are_read(tmp_path):
    profile = taught(1.0, 0).profile
    fields = profile.to_json()
    del fields["sample"], fields["score"], fields["mask"]
    read = type(profile).from_json(fields)
    assert read.forward == profile.forward and read.sample.at(64) == 0.0


def test_what_is_slow_around_a_measurement_is_not_repeated():
    """Packs are made and run forward before a tasklet is measured: that time counts, too."""
    now_s, num_measured = 0.0, 0

    def measure() -> Timing:
        nonlocal now_s, num_measured
        now_s, num_measured = now_s + 5.0, num_measured + 1
        yield
        return 0.01 * num_measured  # never the same

    assert finish(Stopwatch(lambda: now_s).stable_s(measure)) == 0.01
    assert num_measured == 1


# -- a start without a profile ---------------------------------------------------------------


def test_what_runs_between_two_pieces_is_not_part_of_the_measurement():
    now_s, num_measured = 0.0, 0

    def measure() -> Timing:
        nonlocal now_s, num_measured
        now_s, num_measured = now_s + 0.1, num_measured + 1
        yield
        return 0.1 if num_measured > 2 else 0.1 * num_measured + 1

    measurement = Stopwatch(lambda: now_s).stable_s(measure)
    for _ in measurement:
        now_s += 60.0  # requests, say
    assert num_measured == 4, "the time for measuring had not run out"


def test_a_quick_profile_takes_few_runs_and_is_cautious():
    backbone, quick_clock, whole_clock = make_backbone("llama"), BusyClock(), BusyClock()
    quick = profiling.quick_profile(backbone, time_s=quick_clock)
    whole = profiling.measure_profile(backbone, time_s=whole_clock)
    assert quick_clock.num_readings < whole_clock.num_readings / 3
    for curve in ("head", "loss"):
        assert getattr(quick, curve).at(8) == pytest.approx(
            1.3 * getattr(whole, curve).at(8), rel=0.01
        ), curve
    assert default_tpot_s(LatencyModel(quick)) > 1.1 * default_tpot_s(LatencyModel(whole))
    assert type(quick).from_json(quick.to_json()) == quick


@pytest.fixture
def provisional(monkeypatch, tmp_path):
    """An engine on a device that was never measured."""
    monkeypatch.setenv("COSERVE_CACHE", str(tmp_path))
    config = EngineConfig(memory_bytes=1 << 24)
    return Engine.from_backbone(make_backbone("llama"), config, may_be_provisional=True)


def test_an_engine_serves_while_its_device_is_measured(provisional, tmp_path):
    """Every few pieces a request comes; its tokens are those of an engine that was measured
    first."""
    params = SamplingParams(max_tokens=4, temperature=0.0)
    cautious = provisional.latency.profile
    assert provisional.calibration.is_provisional and not list(tmp_path.glob("profiles/*.json"))
    answers, shares, number = [], [], 0
    while provisional.calibration.is_provisional:
        done, total = provisional.calibration.run_piece()
        shares.append(done / total)
        if number % 50 == 0:
            answers += [each.tokens for each in provisional.generate([[1, 2, 3]], params)]
        number += 1
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert len(answers) > 2 and len(set(answers)) == 1
    measured = provisional.latency.profile
    assert measured != cautious, "it is what steps are predicted by"
    [path] = tmp_path.glob("profiles/*.json")
    assert read_profile(path) == measured, "the next start finds it"
    again = Engine.from_backbone(
        make_backbone("llama"), EngineConfig(memory_bytes=1 << 24), may_be_provisional=True
    )
    assert not again.calibration.is_provisional and again.latency.profile == measured
    assert [each.tokens for each in again.generate([[1, 2, 3]], params)] == answers[:1]
    provisional.check_integrity()


def test_the_default_slo_follows_the_measured_profile(provisional):
    while provisional.calibration.is_provisional:
        provisional.calibration.run_piece()
    expected = default_tpot_s(LatencyModel(provisional.latency.profile))
    assert provisional.slo.tpot_s == pytest.approx(expected, rel=0.06)


def test_pieces_run_while_no_request_is_there_and_jobs_take_turns_with_them(provisional):
    now_s = 0.0
    refinement = ProfileRefinement(provisional, time_s=lambda: now_s)
    assert refinement.progress == 0.0 and refinement.wait_s == 0.0
    provisional.add([1, 2, 3], SamplingParams(max_tokens=2))
    assert not refinement.run_piece() and refinement.progress == 0.0
    while provisional.has_requests:
        provisional.step()
    assert refinement.wait_s == 0.25, "others often come just after one"
    now_s += 0.25
    provisional.submit_examples(
        examples_of([9, 12]), TuningConfig(num_epochs=200), adapter=LoraConfig(r=2)
    )
    steps = 0
    while not refinement.run_piece():
        if provisional.has_work:  # the job may end before the measurement does
            provisional.step()
            steps += 1
    assert steps > 10 and refinement.progress is None and refinement.wait_s is None
    assert not refinement.run_piece()


def test_an_engine_serves_on_where_its_device_cannot_be_measured(provisional, monkeypatch, caplog):
    def fail(*_):
        yield
        raise RuntimeError("no memory for it")

    monkeypatch.setattr("coserve.devices.profiles.own_measurement.measurement", fail)
    refinement = ProfileRefinement(provisional)
    assert [refinement.run_piece() for _ in range(4)] == [False] * 4
    assert refinement.progress is None and refinement.wait_s is None
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is tried once"
    assert provisional.generate([[1, 2, 3]], SamplingParams(max_tokens=2))


def test_a_library_and_an_experiment_measure_first(monkeypatch, tmp_path):
    monkeypatch.setenv("COSERVE_CACHE", str(tmp_path))
    engine = Engine.from_backbone(make_backbone("llama"), EngineConfig(memory_bytes=1 << 24))
    assert not engine.calibration.is_provisional and list(tmp_path.glob("profiles/*.json"))
