"""A recording of several ranks is run again on one."""

from pathlib import Path

import pytest
from engines import BLOCK, FAST, WatchedDevice, examples_of, greedy, prompts_of
from lockstep import LockstepDevice
from support import make_backbone

from coserve.adapters import LoraConfig
from coserve.devices.base import WallClock
from coserve.devices.loading import torch_device
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.device import TorchDevice
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import RecordingEngine, record
from coserve.engine.replay import ReplayReport, replay
from coserve.errors import DataError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import Backbone
from coserve.models.dividing import divided_backbone
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

NUM_PAGES = 200
TUNING = TuningConfig(
    num_epochs=2, batch_size=2, max_pack_tokens=16, optimizer=OptimizerConfig(learning_rate=1e-2)
)


def device_of(backbone: Backbone) -> TorchDevice:
    memory_bytes = NUM_PAGES * kv_page_bytes(backbone, BLOCK)
    profile = roofline_profile(make_backbone("llama"), FAST)
    return torch_device(backbone, memory_bytes=memory_bytes, block_tokens=BLOCK, profile=profile)


def recording_of(num_ranks: int, path: Path) -> RecordingEngine:
    whole = make_backbone("llama")
    device = LockstepDevice(lambda group: device_of(divided_backbone(whole, group)), num_ranks)
    return record(
        Engine(WatchedDevice(device, WallClock()), EngineConfig(block_tokens=BLOCK)), str(path)
    )


def run_again(path: Path) -> ReplayReport:
    return replay(*read_recording(path), device_of(make_backbone("llama")))


def test_a_recording_of_two_ranks_is_run_again_on_one(tmp_path):
    engine = recording_of(2, tmp_path / "file")
    for number, prompt in enumerate(prompts_of((30, 17, 25, 9))):
        params = (
            greedy(20, logprobs=1)
            if number % 2
            else SamplingParams(max_tokens=15, temperature=1.0, seed=number)
        )
        engine.add_tokens(prompt, params, request_id=str(number))
    lora = LoraConfig(r=3, target_modules="all-linear")
    engine.submit_examples(examples_of((9, 14, 5, 11)), TUNING, adapter=lora, job_id="job")
    while engine.has_work:
        engine.step()
    assert engine.jobs["job"].state == "succeeded"
    engine.device.close()
    report = run_again(tmp_path / "file")
    assert report.plans_equal and report.tokens_equal and report.steps > 15, report.diverged
    assert report.max_loss_difference < 1e-5


def test_ranks_that_hold_copies_of_heads_need_more_than_one_rank_has(tmp_path):
    """Two of four ranks hold the same key head each, so that their pages together are twice as
    large as one rank's.
    """
    recording_of(4, tmp_path / "file").device.close()
    with pytest.raises(
        DataError, match=r"page_bytes .* on each of 4 ranks; this one has .* on each of 1"
    ):
        run_again(tmp_path / "file")
