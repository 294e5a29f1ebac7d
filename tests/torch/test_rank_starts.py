"""Ranks start alike: with as many pages, the same profile and the same verdicts, whatever each
finds on its own."""

import json
import threading
from typing import Any, ClassVar

import pytest
import torch
from lengths import long_but
from peft_methods import CASES, config_of
from rank_training import own_copy
from ranks import whole_backbone
from support import model_directory

from coserve.adapters import Adapter, LoraConfig
from coserve.adapters.held_parameters import held_elements
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.methods.full import FullConfig
from coserve.devices import loading
from coserve.devices.counting import trainer_opened
from coserve.devices.messages.commands import DeviceInfo
from coserve.devices.messages.jobs import TrainerOpened
from coserve.devices.profiles import kept as kept_profiles
from coserve.devices.profiles import pieces as profiled_pieces
from coserve.devices.profiles import profiling
from coserve.devices.profiles.own_measurement import OwnMeasurement
from coserve.devices.settings import DeviceSettings
from coserve.devices.torch import adapter_memory, process_memory
from coserve.devices.torch.adapter_memory import AdapterMemory
from coserve.errors import AdapterTooLargeError, BudgetError
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.threads import run_ranks
from coserve.kernels.trace import TracedCalls, TracedStep, UntraceableError
from coserve.memory.tensors.paged_kv import PagedKv, kv_page_bytes
from coserve.models import forward
from coserve.models.dividing import divided_backbone
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning import training_programs

# What belongs to the rank that a thread is.
THREAD = threading.local()
HARDWARE = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)


class Clock:
    """A clock of which what lies between two readings takes 80 ms; a rank's may run faster."""

    def __init__(self, speed: float) -> None:
        self._speed, self._now_s = speed, 0.0

    def __call__(self) -> float:
        self._now_s += 0.08 * self._speed
        return self._now_s


@pytest.mark.parametrize("measure", [profiling.quick_profile, profiling.measure_profile])
def test_ranks_whose_clocks_differ_measure_one_profile(measure):
    """Loops that end by a clock end alike, or ranks would wait for each other in vain."""
    whole = whole_backbone("llama")

    def run(group: RankGroup) -> Profile:
        return measure(divided_backbone(whole, group), time_s=Clock(3.0 if group.rank else 1.0))

    first, second = run_ranks(2, run)
    assert first == second
    assert first.forward.seconds[0] == pytest.approx(
        0.16 * (1.3 if measure is profiling.quick_profile else 1), rel=0.5
    )


def test_rank_0_reads_and_keeps_the_profile_of_all(tmp_path, monkeypatch):
    whole = whole_backbone("llama")
    other = Hardware(name="cpu", flops_per_s=1e10, bytes_per_s=1e9, call_s=1e-4)
    num_measured = 0

    def measure(backbone, progress):
        nonlocal num_measured
        num_measured += 1
        return roofline_profile(whole, other if backbone.ranks.rank else HARDWARE)

    monkeypatch.setattr(kept_profiles, "measure_profile", measure)

    def run(group: RankGroup) -> Profile:
        backbone = divided_backbone(whole, group)
        directory = tmp_path / ("kept" if group.rank == 0 else "elsewhere")
        return kept_profiles.load_profile(backbone, directory)

    first = run_ranks(2, run)
    assert num_measured == 2 and first[0] == first[1]
    assert run_ranks(2, run) == first and num_measured == 2, "other ranks need no file"
    assert not (tmp_path / "elsewhere").exists()
    (path,) = (tmp_path / "kept").iterdir()
    assert json.loads(path.read_text())["of"]["device"].startswith("2 x ")


def test_a_provisional_profile_becomes_one_profile_on_all_ranks(tmp_path, monkeypatch):
    whole = whole_backbone("llama")
    monkeypatch.setattr(kept_profiles, "_directory", lambda: tmp_path)
    quick = lambda backbone, progress: roofline_profile(whole, HARDWARE)  # noqa: E731
    monkeypatch.setattr(kept_profiles, "quick_profile", quick)
    monkeypatch.setattr(profiled_pieces.ProfiledPieces, "_time_s", lambda pieces: THREAD.clock())

    def run(group: RankGroup) -> tuple[Profile, bool, Profile | None]:
        THREAD.clock = Clock(3.0 if group.rank else 1.0)
        backbone = divided_backbone(whole, group)
        start, is_provisional = kept_profiles.profile_to_start_with(backbone)
        measurement = OwnMeasurement(backbone)
        while (measured := measurement.run_piece()).profile is None:
            pass
        return start, is_provisional, measured.profile

    first, second = run_ranks(2, run)
    assert first == second and first[1]
    assert len(list(tmp_path.iterdir())) == 1


# -- memory -----------------------------------------------------------------------------------


def test_ranks_have_as_many_pages_as_the_fullest_device_bears(monkeypatch):
    whole = whole_backbone("llama")
    monkeypatch.setattr(
        process_memory, "_free_memory_bytes", lambda: (16 << 20) // (1 + THREAD.rank)
    )

    def run(group: RankGroup) -> tuple[int, int]:
        THREAD.rank = group.rank
        backbone = divided_backbone(whole, group)
        device = loading.torch_device(backbone, profile=roofline_profile(whole, HARDWARE))
        return device.info.num_pages, device.info.page_bytes

    first, second = run_ranks(2, run)
    num_pages, page_bytes = first
    assert second == first
    # A quarter of what is free, of which each of two ranks has a half: and rank 1 finds half as
    # much free.
    assert num_pages == (8 << 20) // 8 // page_bytes


def test_memory_that_is_asked_for_is_that_of_each_rank():
    whole = whole_backbone("llama")

    def run(group: RankGroup) -> int:
        backbone = divided_backbone(whole, group)
        bytes_ = 7 * kv_page_bytes(backbone, 16)
        profile = roofline_profile(whole, HARDWARE)
        num_pages = loading.torch_device(
            backbone, memory_bytes=bytes_, profile=profile
        ).info.num_pages
        with pytest.raises(BudgetError, match="two pages"):
            loading.torch_device(backbone, memory_bytes=bytes_ // 7, profile=profile)
        return num_pages

    assert run_ranks(2, run) == [7, 7]


def test_open_device_gives_every_rank_the_same_device(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_profiles, "_directory", lambda: tmp_path)
    monkeypatch.setattr(profiled_pieces.ProfiledPieces, "_time_s", lambda pieces: THREAD.clock())
    settings = DeviceSettings(
        model=str(model_directory()), device="cpu", memory_bytes=1 << 20, num_ranks=2
    )

    def run(group: RankGroup) -> DeviceInfo:
        THREAD.clock = Clock(3.0 if group.rank else 1.0)
        return loading.open_device(settings, group=group).info

    first, second = run_ranks(2, run)
    assert first == second


def test_an_adapter_is_too_large_for_all_ranks_or_for_none(monkeypatch):
    layout = AdapterLayout.of(
        LoraConfig(r=4, target_modules="all-linear"), whole_backbone("llama").architecture
    )
    needed = AdapterMemory(torch.device("cpu"), torch.float32).training_bytes(layout)
    # Of two ranks on one CPU each has half of the memory, of which adapters have 0.8.
    monkeypatch.setattr(adapter_memory, "available_bytes", lambda device: THREAD.available)

    def run(group: RankGroup) -> list[bool]:
        memory, found = AdapterMemory(torch.device("cpu"), torch.float32, group=group), []
        for share in (1.0, 1.0 if group.rank else 0.9):
            THREAD.available = int(share * 2 * needed / 0.8) + 16
            try:
                with memory.for_training("it", layout):
                    found.append(True)
            except AdapterTooLargeError:
                found.append(False)
        return found

    assert run_ranks(2, run) == [[True, False]] * 2


def test_a_rank_needs_memory_for_its_pieces_of_a_model_that_is_trained_whole():
    whole, config = whole_backbone("llama"), FullConfig()
    layout = config.sizes(whole.architecture)

    def count(group: RankGroup) -> tuple[int, int]:
        backbone = divided_backbone(own_copy(whole), group)
        return held_elements(backbone, layout).parameters, config.create(
            backbone, seed=0
        ).num_parameters

    for counted, held in run_ranks(2, count):
        assert counted == held < 0.6 * layout.num_parameters


def test_a_rank_needs_memory_for_its_pieces_of_an_adapter():
    """The whole adapter would need more: about half of a LoRA at all linear layers is cut."""
    whole, config = whole_backbone("llama"), LoraConfig(r=4, target_modules="all-linear")
    layout = config.sizes(whole.architecture)

    def count(group: RankGroup) -> tuple[int, int]:
        backbone = divided_backbone(whole, group)
        return held_elements(backbone, layout).parameters, config.create(
            backbone, seed=0
        ).num_parameters

    for counted, held in run_ranks(2, count):
        assert counted == held < 0.8 * layout.num_parameters


# Which need whole weights to begin with; their sizes are those of a LoRA.
PRINCIPAL = ["pissa", "pissa-attention", "olora"]


@pytest.mark.parametrize(
    "case",
    long_but("lora", "dora", "prefix-tuning", of=[case for case in CASES if case not in PRINCIPAL]),
)
def test_a_job_needs_as_much_of_every_rank(case):
    """So that the engine, which has rank 0's answer, counts pages and bytes that every rank has."""
    whole = whole_backbone(CASES[case].families[0])

    def run(group: RankGroup) -> TrainerOpened:
        adapter = Adapter(divided_backbone(whole, group), config_of(case))
        programs = training_programs(adapter)
        return trainer_opened(adapter, programs, programs)

    first, second = run_ranks(2, run)
    assert first == second


# -- traces -----------------------------------------------------------------------------------


class NeverFitting(TracedCalls):
    """Calls that are for no step."""

    max_rows = max_prompt_pairs = 0
    rows_apart = False
    kept: ClassVar[dict[Any, int]] = {}

    def fit(self, step: TracedStep) -> bool:
        return False

    def run(self, step: TracedStep) -> torch.Tensor:
        raise AssertionError("they fit no step")

    def run_timed(self, step: TracedStep) -> tuple[torch.Tensor, dict[str, float]]:
        raise AssertionError("they fit no step")


@pytest.mark.parametrize("num_tracing", [1, 2])
def test_blocks_run_as_one_call_on_all_ranks_or_on_none(num_tracing, monkeypatch):
    whole = whole_backbone("llama")

    def trace(backend, dtype, run):
        if num_tracing <= THREAD.rank:
            raise UntraceableError
        return NeverFitting()

    monkeypatch.setattr(type(whole.backend), "trace", trace)

    def run(group: RankGroup) -> list[bool]:
        THREAD.rank = group.rank
        backbone = divided_backbone(whole, group)
        pages = PagedKv(backbone, num_pages=2, block_tokens=4)
        forward(backbone, [pages.rows([((0,), 0, [3])])])
        return [calls is not None for calls in pages.stores.traces.values()]

    assert run_ranks(2, run) == [[num_tracing == 2]] * 2
