"""Engines on a simulated device with jobs, and random chats, for tests of co-serving and of
tenants' shares."""

from functools import cache
from random import Random
from typing import Any

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.models import Backbone, load_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

A100 = Hardware(name="a100", flops_per_s=2.2e14, bytes_per_s=1.6e12, call_s=5e-6)
GPU = Hardware(name="gpu", flops_per_s=5e13, bytes_per_s=1e12, call_s=5e-6)
CPU = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
ALL = LoraConfig(r=16, target_modules="all-linear")
PACK_TOKENS = 512


@cache
def backbone_of(model: str) -> Backbone:
    return load_backbone(f"dummy:{model}", device="meta", dtype="bfloat16")


@cache
def profile_of(model: str, hardware: Hardware) -> Profile:
    return roofline_profile(backbone_of(model), hardware)


def make_engine(
    model: str = "llama-3.1-8b",
    hardware: Hardware = A100,
    *,
    num_pages: int = 16_000,
    num_jobs: int = 1,
    **config: Any,
) -> TokenEngine:
    profile = profile_of(model, hardware)
    device = ModelledDevice(backbone_of(model), profile, num_pages=num_pages)
    engine = TokenEngine(device, LatencyModel(profile), EngineConfig(**config))
    for _ in range(num_jobs):
        submit(engine)
    return engine


def submit(
    engine: TokenEngine, *, length: int = 512, tenant: str = "", pack_tokens: int | None = None
) -> str:
    data = [Example(tokens=(1,) * length, trained=(True,) * length)] * 64
    config = TuningConfig(num_epochs=100_000, max_pack_tokens=pack_tokens)
    return engine.submit_examples(data, config, adapter=ALL, tenant=tenant)


def chats(rate: float, seconds: float, seed: int = 1) -> list[Arrival]:
    rng, at_s, found = Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        prompt, output = (
            1 + int(300 * rng.lognormvariate(0, 0.6)),
            1 + int(150 * rng.lognormvariate(0, 0.5)),
        )
        found.append(Arrival(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output))
    return found


def harvest(engine: TokenEngine) -> float:
    return engine.stats().num_tokens_trained / engine.device.clock.now()
