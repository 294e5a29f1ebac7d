"""A GPU that is divided: the forward pass beside losses and tasklets, each on multiprocessors of
its own."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import Driver
from engines import examples_of, greedy, prompts_of
from steps_at_once import Steps, wide_directory
from support import random_sequences, random_tokens

import coserve.devices.torch.step as torch_step
from coserve import models
from coserve.adapters import LoraConfig
from coserve.devices.loading import torch_device
from coserve.devices.messages.steps import LossRows, RequestRows, Tasklets, Update, WindowRows
from coserve.devices.sides.base import Sides
from coserve.devices.sides.dividing import sides_of
from coserve.devices.torch.device import TorchDevice
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import load_backbone
from coserve.models.backbone import Backbone
from coserve.scheduling import Partition
from coserve.scheduling.sharing import Share, Sharing
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

triton = pytest.importorskip("triton", reason="needs a GPU")
tl = pytest.importorskip("triton.language")

HARDWARE = Hardware(name="here", flops_per_s=1e12, bytes_per_s=1e12, call_s=1e-4)
SHARES = tuple(
    Share(units=units, rows=(1,), forward=(0.95,), backward=(0.95,)) for units in (1, 2, 3)
)
SEQUENCES = random_sequences((9, 14, 6))
NUM_ROWS = 29
NUM_TRAINED = sum(sum(trained[1:]) for _, trained in SEQUENCES)
LORA = LoraConfig(r=4, alpha=8, target_modules="all-linear")
CONFIG = TuningConfig(seed=3, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-6))
PROMPT = tuple(random_tokens(11, 0).tolist())


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def backbone() -> Backbone:
    return load_backbone(str(wide_directory("llama")), dtype="float32", device="cuda")


def sides_for(backbone: Backbone) -> Sides:
    found = sides_of(backbone)
    assert found is not None, "this GPU's driver, or its Python bindings, cannot divide it"
    return found


@triton.jit
def note(places):
    place = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(places + tl.program_id(0), place)


def processors_used(num_programs: int = 4096) -> set[int]:
    """The multiprocessors that the current stream's programs run on."""
    places = torch.full((num_programs,), -1, dtype=torch.int32, device="cuda")
    note[(num_programs,)](places)
    return set(places.tolist())


def test_each_side_has_multiprocessors_of_its_own(backbone):
    sides = sides_for(backbone)
    found = {}
    for side in ("forward", "backward"):
        for units in range(1, sides.num_units):
            with sides.alone(side, units):
                found[side, units] = processors_used()
    for units in range(1, sides.num_units):
        assert not found["forward", units] & found["backward", sides.num_units - units]
        assert (
            len(found["forward", units])
            == len(found["backward", units])
            == units * len(found["forward", 1])
        )
    sides.close()


def test_captured_steps_run_where_they_are_called(backbone):
    """On one part of the device and on another, after each other, with the answers of the whole."""
    sides, found = sides_for(backbone), []
    with torch.inference_mode():
        for places in ([None] * 6, [None, 1, 2, 1, None, 3]):
            steps, rows = Steps(backbone), []
            for units in places:
                if units is None:
                    rows.append(steps.step().clone())
                else:
                    with sides.alone("forward", units):
                        rows.append(steps.step().clone())
            found.append(torch.cat(rows))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    sides.close()


def make_driver(backbone: Backbone) -> Driver:
    profile = replace(
        roofline_profile(backbone, HARDWARE), sharing=Sharing(num_units=4, shares=SHARES)
    )
    memory_bytes = 3000 * kv_page_bytes(backbone, 4)
    return Driver(
        torch_device(backbone, memory_bytes=memory_bytes, block_tokens=4, profile=profile)
    )


def device_of(driver: Driver) -> TorchDevice:
    assert isinstance(driver.device, TorchDevice)
    return driver.device


def ready(driver: Driver, *jobs: str) -> None:
    """Packs up to their losses, and a request."""
    for job in jobs:
        opened = driver.open_trainer(job, CONFIG, adapter=LORA.to_peft())
        driver.begin(job, opened, SEQUENCES)
        driver.step(windows=[WindowRows(job, NUM_ROWS)])
    driver.open("r", greedy(1))


def rows(driver: Driver) -> list[RequestRows]:
    return [RequestRows("r", 0, PROMPT, driver.pages_for(len(PROMPT)), samples=True)]


def test_answers_and_gradients_are_those_of_a_step_in_turns(backbone):
    driver = make_driver(backbone)
    assert driver.device.info.num_units == 4
    ready(driver, "turns", "sides")
    work: dict[str, dict[str, Any]] = {
        name: {"losses": [LossRows(name, NUM_TRAINED)], "tasklets": [Tasklets(name, 10, 9)]}
        for name in ("turns", "sides")
    }
    turns = driver.step(requests=rows(driver), **work["turns"])
    driver.open("r", greedy(1))
    sides = driver.step(requests=rows(driver), partition=Partition(1, 3), **work["sides"])
    assert sides.tokens["r"].token == turns.tokens["r"].token
    assert (turns.num_tasklets, sides.num_tasklets) == ({"turns": 9}, {"sides": 9})
    assert (
        1 <= sides.num_beside["sides"] <= 9 and 0 < sides.forward_s < 60 and 0 < sides.beside_s < 60
    )
    norms = driver.step(updates=[Update(name, NUM_TRAINED, 1) for name in ("turns", "sides")]).norms
    assert sides.packs["sides"].loss == pytest.approx(turns.packs["turns"].loss, rel=1e-5)
    assert norms["sides"] == pytest.approx(norms["turns"], rel=1e-5)
    driver.device.close()


def test_tasklets_stop_soon_after_the_forward_pass(backbone, monkeypatch):
    """It waits in its middle until some have run; what is left waits for a later step."""
    driver = make_driver(backbone)
    ready(driver, "job")
    driver.step(losses=[LossRows("job", NUM_TRAINED)])
    passes, real = device_of(driver)._trainers["job"].training_pass, models.forward

    def forward(*given: Any) -> torch.Tensor:
        while passes.num_parts_done < 1:
            pass
        return real(*given)

    monkeypatch.setattr(torch_step, "forward", forward)
    found = driver.step(
        requests=rows(driver),
        tasklets=[Tasklets("job", 1, 87)],
        partition=Partition(2, 2, stops=True),
    )
    assert NUM_ROWS <= found.num_tasklets["job"] < 87 and found.num_beside == found.num_tasklets
    driver.device.close()


@pytest.mark.parametrize("kind", ["captured", "eager"])
def test_two_jobs_and_a_request_side_by_side_are_those_in_turns(backbone, kind, monkeypatch):
    """Step after step, with one job's window in the forward pass and another's tasklets beside
    it."""
    if kind == "eager":
        monkeypatch.setattr(type(backbone.backend), "captures", False)
    found = []
    for partition in (None, Partition(1, 3), Partition(3, 1)):
        driver = make_driver(backbone)
        norms: list[Any] = []
        tokens: list[int] = []
        opened = {
            job: driver.open_trainer(job, CONFIG, adapter=LORA.to_peft()) for job in ("a", "b")
        }
        for turn in range(5):
            driver.forward_and_loss("a", opened["a"], SEQUENCES)
            driver.begin("b", opened["b"], SEQUENCES)
            driver.open(f"r{turn}", greedy(1))
            request = [
                RequestRows(f"r{turn}", 0, PROMPT, driver.pages_for(len(PROMPT)), samples=True)
            ]
            step = driver.step(
                requests=request,
                windows=[WindowRows("b", NUM_ROWS)],
                tasklets=[Tasklets("a", 1000, 3)],
                partition=partition,
            )
            tokens.append(step.tokens[f"r{turn}"].token)
            driver.step(losses=[LossRows("b", NUM_TRAINED)])
            driver.step(tasklets=[Tasklets("b", 1000, 3)])
            norms += driver.step(
                updates=[Update(job, NUM_TRAINED, 1) for job in ("a", "b")]
            ).norms.values()
        found.append((tokens, norms))
        driver.device.close()
    for tokens, norms in found[1:]:
        assert tokens == found[0][0]
        assert norms == pytest.approx(found[0][1], rel=1e-4)


@pytest.mark.parametrize("policy", ["spatial-sharing", "harli", "llmstation", "slack"])
def test_policies_train_on_a_divided_gpu(backbone, policy):
    """A job is trained to its end beside requests whose answers are those of a device by itself."""
    profile = replace(
        roofline_profile(backbone, HARDWARE), sharing=Sharing(num_units=4, shares=SHARES)
    )
    memory_bytes = 3000 * kv_page_bytes(backbone, 4)
    device = torch_device(backbone, memory_bytes=memory_bytes, block_tokens=4, profile=profile)
    engine = Engine(device, EngineConfig(policy=policy, block_tokens=4, tpot_s=1.0, ttft_s=4.0))
    config = TuningConfig(num_epochs=6, batch_size=2, seed=2, optimizer=CONFIG.optimizer)
    job = engine.submit(examples_of([40] * 6), config, adapter=replace(LORA, dropout=0.1))
    engine.add(prompts_of((9,))[0], greedy(100))
    num_divided = 0
    while engine.has_work:
        engine.step()
        num_divided += engine.last_plan.partition is not None
    assert engine.jobs[job].state == "succeeded"
    assert num_divided or policy != "spatial-sharing", (
        "others divide it where they expect to gain by it"
    )
    device.close()
