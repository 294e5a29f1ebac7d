"""Milliseconds of Python per step: of an engine whose 512 requests decode, and of a device that runs rows of adapters.

    OMP_NUM_THREADS=1 python benchmarks/step_time.py

The engine's part is timed on a modelled device, whose own time is left out; the device's part on a model of three
layers that is too small for its products to count. Times are those of the thread, so that other processes count little.
Prints a table, and one line of JSON.
"""

import json
import time
from collections.abc import Callable
from statistics import median

import torch

from coserve.adapters import Adapter, LoraConfig
from coserve.devices.messages import StepBatch, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.core import EngineCore
from coserve.memory.paged_kv import PagedKv
from coserve.models import Backbone, forward, load_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import Hardware, roofline_profile
from coserve.simulate.modelled_device import ModelledDevice

NUM_REQUESTS, STEPS, CONTEXT = 512, 100, 34
GPU = Hardware(name="gpu", flops_per_s=6e14, bytes_per_s=3e12, call_s=1e-5)


class _Timed(ModelledDevice):
    """Counts what it takes itself."""

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
    """Of a step in which all requests decode."""
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, GPU)
    device = _Timed(backbone, profile, num_pages=80 * NUM_REQUESTS)
    engine = EngineCore(device, LatencyModel(profile), EngineConfig(max_requests=NUM_REQUESTS))
    params = SamplingParams(max_tokens=2 * STEPS + 200, temperature=0.0, ignore_eos=True)
    for index in range(NUM_REQUESTS):
        engine.add_tokens([index + 1] * 64, params, slo=Slo(ttft_s=100.0, tpot_s=10.0))
    while len(engine.last_plan.rows) < NUM_REQUESTS or any(rows.kind != "decode" for rows in engine.last_plan.rows):
        engine.step()

    def step() -> None:
        engine.step()
        assert len(engine.last_plan.rows) == NUM_REQUESTS

    return _median_ms(step, lambda: device.own_s)


def device_ms(backbone: Backbone, num_requests: int, num_adapters: int) -> float:
    """Of the forward pass of a step in which requests decode, on adapters of ranks 2 to 16 in turn."""
    pages = PagedKv(backbone, num_pages=3 * num_requests, block_tokens=16)
    pages.storage.zero_()
    users = [
        Adapter(backbone, LoraConfig(r=2 << index % 4, target_modules="all-linear"), seed=index).bypasses()
        for index in range(num_adapters)
    ]

    def step() -> None:
        with torch.inference_mode():
            spans = [
                pages.rows(range(3 * i, 3 * i + 3), CONTEXT, [5], users[i % num_adapters] if users else None)
                for i in range(num_requests)
            ]
            forward(backbone, spans)

    return _median_ms(step, lambda: 0.0)


def _median_ms(step: Callable[[], None], left_out_s: Callable[[], float]) -> float:
    times = []
    for _ in range(STEPS):
        start, before_s = time.thread_time(), left_out_s()
        step()
        times.append(time.thread_time() - start - (left_out_s() - before_s))
    return 1e3 * median(times)


def main() -> None:
    """Measure and print."""
    small = load_backbone("tiny", dtype="float32")
    found = {"engine_512_requests_ms": engine_ms()}
    for num_requests, num_adapters in ((32, 0), (32, 1), (32, 32), (512, 0), (512, 32)):
        name = f"device_{num_requests}_requests_{num_adapters}_adapters_ms"
        found[name] = device_ms(small, num_requests, num_adapters)
    for name, ms in found.items():
        print(f"{name:45} {ms:6.2f}")
    print(json.dumps({name: round(ms, 2) for name, ms in found.items()}))


if __name__ == "__main__":
    main()
