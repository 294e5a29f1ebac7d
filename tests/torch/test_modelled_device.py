"""A modelled device against a real one: the same costs, the same way through a pack; and what it
does when told."""

import json
from dataclasses import replace
from typing import Any

import pytest
from devices import Driver
from msgspec import structs
from support import make_backbone

from coserve.adapters import LoraConfig
from coserve.devices.base import Device
from coserve.devices.loading import torch_device
from coserve.devices.messages.jobs import DropPack, TrainerOpened, group_bytes
from coserve.devices.messages.steps import (
    LossRows,
    RequestRows,
    StepFailure,
    StepResult,
    Tasklets,
    Update,
    WindowRows,
)
from coserve.devices.sampling_params import SamplingParams
from coserve.memory.pages.allocator import PageAllocator
from coserve.memory.pages.pack_pages import OWNER, PackPages
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import load_backbone
from coserve.scheduling import LatencyModel, Partition
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import TuningConfig
from coserve.tuning.cursor import Cursor

CPU = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
TARGETS: list[str | list[str]] = ["all-linear", ["down_proj"], ["q_proj"]]
SEQUENCES = [(tuple(range(n)), (False,) + (True,) * (n - 1)) for n in (9, 5, 13)]
NUM_ROWS, NUM_TRAINED = 27, 24


@pytest.fixture
def both_devices() -> list[Device]:
    backbone = make_backbone("llama")
    profile = roofline_profile(backbone, CPU)
    memory_bytes = 4000 * kv_page_bytes(backbone, 4)
    return [
        torch_device(backbone, memory_bytes=memory_bytes, block_tokens=4, profile=profile),
        ModelledDevice(backbone, profile, num_pages=4000, block_tokens=4),
    ]


def train(driver: Driver, opened: TrainerOpened, *, evaluate: bool) -> list[object]:
    """What a device tells of a pack, piece by piece; the gradients of a second one are in when it
    ends."""
    driver.begin("job", opened, SEQUENCES, evaluate=evaluate)
    results = [driver.step(windows=[WindowRows("job", rows)]) for rows in (10, 10, 7)]
    while not results[-1].packs and len(results) < 3 + -(-NUM_TRAINED // 11):
        results.append(driver.step(losses=[LossRows("job", 11)]))
    while not results[-1].packs:
        results.append(driver.step(tasklets=[Tasklets("job", 11, 1)]))
    sums = results[-1].packs["job"]
    return [*[(result.num_tasklets, result.packs.keys()) for result in results], sums.num_trained]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize(("evaluate", "max_recompute"), [(False, 0.0), (False, 0.3), (True, 0.0)])
def test_a_modelled_pack_costs_and_goes_through_what_a_real_one_does(
    both_devices, targets, evaluate, max_recompute
):
    fields = LoraConfig(r=4, target_modules=targets).to_peft()
    drivers, config = (
        [Driver(device) for device in both_devices],
        TuningConfig(max_recompute=max_recompute),
    )
    real, modelled = (driver.open_trainer("job", config, adapter=fields) for driver in drivers)
    assert modelled == real and len({*real.training}) > 1
    told = [train(driver, real, evaluate=evaluate) for driver in drivers]
    assert told[0] == told[1] and told[0][-1] == NUM_TRAINED
    for driver in drivers:  # one that is dropped is begun again from its first row
        driver.begin("job", real, SEQUENCES)
        driver.step(windows=[WindowRows("job", 10)])
        driver.step(commands=[DropPack("job"), driver.begin_command("job", real, SEQUENCES)])
        driver.step(windows=[WindowRows("job", NUM_ROWS)])


def test_a_real_pass_lets_a_group_go_when_the_engine_takes_its_pages_back(both_devices):
    """What the core does with a pack's pages by its cursor is what the device does with the tensors
    in them."""
    device = both_devices[0]
    driver = Driver(device)
    opened = driver.open_trainer(
        "job", TuningConfig(), adapter=LoraConfig(r=4, target_modules=("q_proj",)).to_peft()
    )
    pool = PageAllocator(4000, device.info.page_bytes)
    sizes = [-(-group_bytes(group, NUM_ROWS) // pool.page_bytes) for group in opened.training]
    pages = PackPages(pool, pool.take_runs(OWNER, sizes), opened.trained_parts)
    cursor = Cursor(num_rows=NUM_ROWS, num_trained=NUM_TRAINED, num_parts=opened.trained_parts)
    driver.begin("job", opened, SEQUENCES)
    training = device._trainers["job"].training_pass

    def held() -> int:
        """Pages of the groups that the device still has."""
        groups = [*training.kept.saved.values()]
        return sum(
            -(-sum(-(-t.nbytes // 64) * 64 for t in group.values()) // pool.page_bytes)
            for group in groups
        )

    assert pages.num_pages - sizes[0] == held()
    driver.step(windows=[WindowRows("job", NUM_ROWS)])
    cursor.advance_forward(NUM_ROWS)
    driver.step(losses=[LossRows("job", NUM_TRAINED)])
    cursor.advance_loss(NUM_TRAINED)
    seen = []
    while not cursor.done:
        pages.follow(cursor)
        seen.append(pages.num_pages - sizes[0])
        assert seen[-1] == held()
        driver.step(tasklets=[Tasklets("job", NUM_ROWS, 1)])
        cursor.advance_backward(NUM_ROWS)
    pages.follow(cursor)
    assert pages.num_pages == held() == 0 and len({*seen}) == len(seen) > 1


def test_modelled_tasklets_of_a_group_and_losses_cost_what_their_rows_cost_together():
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, CPU)
    driver = Driver(ModelledDevice(backbone, profile, num_pages=100_000))
    adapter = LoraConfig(r=16, target_modules="all-linear").to_peft()
    jobs = ("a", "b", "c")
    for job in jobs:
        opened = driver.open_trainer(job, TuningConfig(), adapter=adapter)
        driver.begin(job, opened, [((1,) * 16, (True,) * 16)])
        driver.step(windows=[WindowRows(job, 16)])
    losses = driver.step(losses=[LossRows(job, 15) for job in jobs])
    assert losses.loss_s == pytest.approx(profile.loss.at(45))
    apart = driver.step(tasklets=[Tasklets(job, 16, 2) for job in jobs])
    together = driver.step(tasklets=[Tasklets(job, 16, 2, 0) for job in jobs])
    assert apart.num_tasklets == together.num_tasklets == dict.fromkeys(jobs, 2)
    assert together.backward_s < 0.6 * apart.backward_s, "the weights are read once"
    limited = driver.step(tasklets=[Tasklets(job, 16, 2, 0) for job in jobs], backward_limit_s=0.0)
    assert limited.num_tasklets == dict.fromkeys(jobs, 1)


def test_a_modelled_device_stops_at_the_time_limit_and_fails_when_told():
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    driver = Driver(ModelledDevice(backbone, roofline_profile(backbone, CPU), num_pages=100_000))
    adapter = LoraConfig(r=16, target_modules="all-linear").to_peft()
    driver.open_trainer("other", TuningConfig(), adapter=adapter)
    opened = driver.open_trainer("job", TuningConfig(), adapter=adapter)
    driver.begin("job", opened, [((1,) * 256, (True,) * 256)])
    driver.step(windows=[WindowRows("job", 256)])
    driver.step(losses=[LossRows("job", 255)])
    alone_s = driver.step(tasklets=[Tasklets("job", 256, 1)]).backward_s
    assert driver.step(tasklets=[Tasklets("job", 256, 9)], backward_limit_s=0.0).num_tasklets == {
        "job": 1
    }
    limited = driver.step(tasklets=[Tasklets("job", 256, 9)], backward_limit_s=2.5 * alone_s)
    assert limited.num_tasklets == {"job": 3} and limited.backward_s == pytest.approx(3 * alone_s)
    now_s = driver.device.clock.now()
    device: Any = driver.device
    device.fail_next = StepFailure(message="full", broken_update="job")
    failed = driver.try_step(updates=[Update("other", 1, 1), Update("job", 1, 1)])
    assert failed.failure.broken_update == "job" and failed.norms.keys() == {"other"}
    assert driver.device.clock.now() == now_s


def test_a_divided_step_runs_its_sides_beside_one_another():
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, replace(CPU, num_units=4))
    assert (
        profile.sharing is not None
        and Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    )
    driver = Driver(ModelledDevice(backbone, profile, num_pages=100_000))
    assert driver.device.info.num_units == 4
    opened = driver.open_trainer(
        "job", TuningConfig(), adapter=LoraConfig(r=16, target_modules="all-linear").to_peft()
    )
    driver.begin("job", opened, [((1,) * 256, (True,) * 256)])
    driver.step(windows=[WindowRows("job", 256)])
    driver.open("r", SamplingParams(max_tokens=9, temperature=0.0))
    new_pages = driver.pages_for(99)

    def step(**more: Any) -> StepResult:
        nonlocal new_pages
        rows, new_pages = RequestRows("r", 0, (1,), new_pages, True), ()
        return driver.step(requests=[rows], **more)

    forward_s = step().forward_s
    tasklet_s = driver.step(
        losses=[LossRows("job", 255)], tasklets=[Tasklets("job", 256, 1)]
    ).backward_s
    halves = Partition(2, 2)
    forward, backward = LatencyModel(profile).sharing.speeds(
        halves, forward_rows=1, tasklet_rows=256
    )
    assert forward < 1 and backward < 0.6 and forward + backward > 1, (
        "a decode step waits for the memory"
    )
    now_s = driver.device.clock.now()
    few = step(tasklets=[Tasklets("job", 256, 1)], partition=halves)
    assert few.num_tasklets == few.num_beside == {"job": 1} and few.backward_s == 0
    assert few.beside_s == pytest.approx(tasklet_s / backward) and few.forward_s == pytest.approx(
        forward_s / forward
    )
    assert (
        driver.device.clock.now() - now_s
        == pytest.approx(few.seconds)
        == max(few.beside_s, few.forward_s)
    )
    many = step(tasklets=[Tasklets("job", 256, 9)], partition=halves)
    assert many.num_tasklets == {"job": 9} and 0 < many.num_beside["job"] < 9
    whole_s = 9 * tasklet_s - backward * many.forward_s
    assert many.seconds == pytest.approx(many.forward_s + whole_s)
    assert many.seconds < forward_s + 9 * tasklet_s, "than one after the other"
    stopped = step(tasklets=[Tasklets("job", 256, 9)], partition=halves._replace(stops=True))
    assert stopped.num_tasklets == stopped.num_beside == many.num_beside and stopped.backward_s == 0
    limited = step(tasklets=[Tasklets("job", 256, 9)], partition=halves, backward_limit_s=0.0)
    assert limited.num_beside == {"job": 1}


def test_tasklets_take_as_long_in_one_step_as_in_several():
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    driver = Driver(ModelledDevice(backbone, roofline_profile(backbone, CPU), num_pages=100_000))
    opened = driver.open_trainer(
        "job", TuningConfig(), adapter=LoraConfig(r=16, target_modules="all-linear").to_peft()
    )

    def seconds(length: int, *numbers: int) -> float:
        driver.begin("job", opened, [((1,) * length, (True,) * length)])
        driver.step(windows=[WindowRows("job", length)])
        driver.step(losses=[LossRows("job", length - 1)])
        return sum(
            driver.step(tasklets=[Tasklets("job", 100, number)]).backward_s for number in numbers
        )

    assert seconds(256, 2, 1, 3) == pytest.approx(seconds(256, 6))
    assert seconds(512, 6) > seconds(256, 6), "each row sees more keys"


def test_a_step_takes_what_was_learned_beside_its_sections_and_a_failed_one_nothing():
    backbone = make_backbone("llama")
    latency = LatencyModel(roofline_profile(backbone, CPU))
    for _ in range(100):
        latency.overhead.observe(0.5, begins=False)
    devices = [
        ModelledDevice(backbone, latency.profile, num_pages=4000, block_tokens=4, latency=known)
        for known in (None, latency)
    ]
    took_s = []
    for device in devices:
        driver = Driver(device)
        driver.open("r", SamplingParams(max_tokens=1))
        rows = RequestRows("r", 0, tuple(range(9)), driver.pages_for(9), samples=True)
        device.fail_next = StepFailure(message="full")
        assert driver.try_step(requests=[rows]).failure is not None and device.clock.now() == 0
        driver.step(requests=[structs.replace(rows, new_pages=())])
        took_s.append(device.clock.now())
    assert (
        took_s[1] - took_s[0] == pytest.approx(latency.overhead.seconds(begins=False))
        and took_s[0] > 0
    )


def test_what_is_modelled_does_not_depend_on_the_kernels_of_this_machine(monkeypatch):
    backbone = make_backbone("llama")
    plain = roofline_profile(backbone, CPU)
    monkeypatch.setattr(backbone.backend, "fused", {"linear_beside_low_rank": None})
    assert roofline_profile(backbone, CPU) == plain
