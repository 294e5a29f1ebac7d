"""Milliseconds of Python per step: of an engine whose 512 requests decode, and of a torch device
that runs such steps.

    OMP_NUM_THREADS=1 python -m experiments.step_time

The engine's part is timed on a modelled device, whose own time is left out; the device's part, with
all results of the step, on a model of one block that is too small for its products to count. Times
are those of the thread, so that other processes count little. Prints a table, and one line of JSON.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from transformers import AutoModelForCausalLM, LlamaConfig

from coserve.adapters import Adapter, LoraConfig
from coserve.adapters.peft_directory import save_adapter
from coserve.devices.messages.commands import OpenRequest, OpenVersion
from coserve.devices.messages.steps import RequestRows, StepBatch, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.device import TorchDevice
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.models import load_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from experiments.results import print_result, save_option

NUM_REQUESTS, STEPS, CONTEXT = 512, 100, 34
PAGES_EACH = -(-(CONTEXT + STEPS + 1) // 16)
GPU = Hardware(name="gpu", flops_per_s=6e14, bytes_per_s=3e12, call_s=1e-5)


class _Timed(ModelledDevice):
    """A modelled device that measures its own time."""

    own_s = 0.0

    def submit(self, batch: StepBatch) -> None:
        start = time.thread_time()
        super().submit(batch)
        self.own_s += time.thread_time() - start

    def collect(self) -> StepResult:
        start = time.thread_time()
        result = super().collect()
        self.own_s += time.thread_time() - start
        return result


def engine_ms() -> float:
    """Return the milliseconds of the engine in a step in which all requests decode."""
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, GPU)
    device = _Timed(backbone, profile, num_pages=80 * NUM_REQUESTS)
    engine = TokenEngine(device, LatencyModel(profile), EngineConfig(max_requests=NUM_REQUESTS))
    params = SamplingParams(max_tokens=2 * STEPS + 200, temperature=0.0, ignore_eos=True)
    for index in range(NUM_REQUESTS):
        engine.add_tokens([index + 1] * 64, params, slo=Slo(ttft_s=100.0, tpot_s=10.0))
    while len(engine.last_plan.rows) < NUM_REQUESTS or any(
        rows.kind != "decode" for rows in engine.last_plan.rows
    ):
        engine.step()

    def step() -> None:
        engine.step()
        assert len(engine.last_plan.rows) == NUM_REQUESTS

    return _median_ms(step, lambda: device.own_s)


def small_model(directory: Path) -> None:
    """Write a model of one block, with as few features as the kernels take."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def device_ms(directory: Path, num_requests: int, num_adapters: int) -> float:
    """Return the milliseconds of a torch device in a step of requests that decode, on adapters of
    ranks 2 to 16 in turn.
    """
    backbone = load_backbone(str(directory), dtype="float32")
    profile = roofline_profile(backbone, GPU)
    device = TorchDevice(
        backbone, num_pages=PAGES_EACH * num_requests, block_tokens=16, profile=profile
    )
    for index in range(num_adapters):
        adapter = Adapter(
            backbone, LoraConfig(r=2 << index % 4, target_modules="all-linear"), seed=index
        )
        save_adapter(adapter, directory / f"adapter-{index}")
        device.execute(OpenVersion(f"adapter-{index}", str(directory / f"adapter-{index}")))
    params = SamplingParams(max_tokens=STEPS + 1, temperature=0.0)
    for index in range(num_requests):
        version = f"adapter-{index * num_adapters // num_requests}" if num_adapters else ""
        pages = tuple(range(index * PAGES_EACH, (index + 1) * PAGES_EACH))
        device.execute(
            OpenRequest(
                request=f"r{index}", params=params, seed=index, version=version, pages=pages
            )
        )

    batches = _decode_steps(num_requests)

    def step() -> None:
        device.submit(next(batches))
        assert len(device.collect().tokens) == num_requests

    return _median_ms(step, lambda: 0.0)


def _decode_steps(num_requests: int) -> Iterator[StepBatch]:
    for place in count():
        rows = [
            RequestRows(f"r{index}", CONTEXT + place, (5,), (), True, place)
            for index in range(num_requests)
        ]
        yield StepBatch(step=place, requests=tuple(rows))


def _median_ms(step: Callable[[], None], left_out_s: Callable[[], float]) -> float:
    times = []
    for _ in range(STEPS):
        start, before_s = time.thread_time(), left_out_s()
        step()
        times.append(time.thread_time() - start - (left_out_s() - before_s))
    return 1e3 * median(times)


def main() -> None:
    """Measure and print."""
    save = save_option(__doc__)
    times_ms = {"engine_512_requests_ms": engine_ms()}
    with TemporaryDirectory() as folder:
        small_model(Path(folder))
        for num_requests, num_adapters in ((32, 0), (32, 1), (32, 32), (512, 0), (512, 32)):
            name = f"device_{num_requests}_requests_{num_adapters}_adapters_ms"
            times_ms[name] = device_ms(Path(folder), num_requests, num_adapters)
    for name, ms in times_ms.items():
        print(f"{name:45} {ms:6.2f}")
    print_result("step_time", {name: round(ms, 2) for name, ms in times_ms.items()}, save)


if __name__ == "__main__":
    main()
