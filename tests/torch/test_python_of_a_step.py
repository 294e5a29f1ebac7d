"""How much Python a step on a device takes, counted in opcodes: of its layers, and of its requests,
never of both."""

import gc
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support import CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM

from coserve.adapters import Adapter, LoraConfig
from coserve.adapters.peft_directory import save_adapter
from coserve.devices.messages.commands import OpenRequest, OpenVersion
from coserve.devices.messages.steps import RequestRows, StepBatch
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.device import TorchDevice
from coserve.models import load_backbone
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile

GPU = Hardware(name="gpu", flops_per_s=6e14, bytes_per_s=3e12, call_s=1e-5)


def device_of(
    directory: Path, num_layers: int, num_requests: int, num_adapters: int, dtype: str
) -> TorchDevice:
    """Requests that decode, on adapters of their own ranks in turn."""
    wide = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_hidden_layers": num_layers,
    }
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**CONFIGS["llama"], **wide})
    ).save_pretrained(directory)
    backbone = load_backbone(str(directory), dtype=dtype)
    device = TorchDevice(
        backbone,
        num_pages=4 * num_requests,
        block_tokens=16,
        profile=roofline_profile(backbone, GPU),
    )
    for index in range(num_adapters):
        adapter = Adapter(
            backbone, LoraConfig(r=2 << index % 4, target_modules="all-linear"), seed=index
        )
        save_adapter(adapter, directory / f"adapter-{index}")
        device.execute(OpenVersion(f"adapter-{index}", str(directory / f"adapter-{index}")))
    params = SamplingParams(max_tokens=40, temperature=0.0)
    for index in range(num_requests):
        version = f"adapter-{index * num_adapters // num_requests}" if num_adapters else ""
        pages = tuple(range(4 * index, 4 * (index + 1)))
        device.execute(
            OpenRequest(
                request=f"r{index}", params=params, seed=index, version=version, pages=pages
            )
        )
    return device


def decode_steps(num_requests: int) -> Iterator[StepBatch]:
    for place in count():
        rows = [
            RequestRows(f"r{index}", 20 + place, (5,), (), True, place)
            for index in range(num_requests)
        ]
        yield StepBatch(step=place, requests=tuple(rows))


def num_opcodes(device: TorchDevice, num_requests: int) -> int:
    """Of a step like the ones before it."""
    found, batches = 0, decode_steps(num_requests)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal found
        frame.f_trace_opcodes = True
        found += event == "opcode"
        return trace

    for index in range(5):
        batch, before = next(batches), sys.gettrace()
        if index == 4:
            gc.collect()
            gc.disable()  # what else is collected meanwhile, and has finalizers, would count
            sys.settrace(trace)
        try:
            device.submit(batch)
            device.collect()
        finally:
            sys.settrace(before)
            gc.enable()
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("on_adapters", [False, True])
def test_no_python_is_for_each_layer_and_request(dtype, on_adapters, tmp_path):
    layers, requests = (2, 6), (4, 20)
    found = {}
    for num_layers in layers:
        for num_requests in requests:
            number = num_requests if on_adapters else 0
            directory = tmp_path / f"{num_layers}-{num_requests}"
            device = device_of(directory, num_layers, num_requests, number, dtype)
            found[num_layers, num_requests] = num_opcodes(device, num_requests)
    few, many = ({n: found[n, number] for n in layers} for number in requests)
    both = (many[6] - many[2]) - (few[6] - few[2])
    # An opcode for each layer and request would be 4 x 16 of them.
    assert abs(both) < (6 - 2) * (20 - 4)
