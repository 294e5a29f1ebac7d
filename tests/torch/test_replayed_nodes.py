"""A recording of what a node's engine was commanded over its wire, also of a part of a divided job,
is run again."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import (
    BLOCK,
    TickingClock,
    WatchedDevice,
    adapter_directory,
    examples_of,
    greedy,
    prompts_of,
)
from process_server import looks_until, run
from recordings import steps_in
from support import make_backbone

from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.loading import torch_device
from coserve.devices.messages.steps import StepFailure
from coserve.devices.torch.device import TorchDevice
from coserve.engine.commands import (
    AdapterRef,
    AddRequest,
    CancelJob,
    CancelRequest,
    CombineJob,
    JobStart,
    LoadAdapter,
    PauseJob,
    ResumeJob,
    StartJob,
    UnloadAdapter,
)
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import RecordingEngine, record
from coserve.engine.replay import replay
from coserve.jobs.datasets.examples import write_examples_file
from coserve.jobs.messages import Contributed
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.protocol.messages import CallReply, StepReport
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.shard import Combination, Shard

HERE = Hardware(name="here", flops_per_s=2e9, bytes_per_s=5e9, call_s=1e-5)
TUNING = TuningConfig(
    num_epochs=2, batch_size=2, max_pack_tokens=16, optimizer=OptimizerConfig(learning_rate=1e-2)
)
LORA = LoraConfig(r=3, target_modules=("q_proj", "down_proj"))


def make_device() -> TorchDevice:
    backbone = make_backbone()
    return torch_device(
        backbone,
        memory_bytes=60 * kv_page_bytes(backbone, BLOCK),
        block_tokens=BLOCK,
        profile=roofline_profile(backbone, HERE),
    )


class Node:
    """A recorded engine in its process, and what it is told and says."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.file = directory, directory / "recording"
        self.device = WatchedDevice(make_device(), TickingClock(1e-4))
        plain = Engine(self.device, EngineConfig(block_tokens=BLOCK, tpot_s=0.05, ttft_s=0.5))
        self.engine: RecordingEngine = record(plain, str(self.file))
        self.reports: list[Any] = []

    def run(self, script: Callable[[], Iterator[Any]]) -> None:
        run(self.engine, script, self.reports)
        self.engine.device.close()

    def job(self, **named: Any) -> JobStart:
        write_examples_file(self.directory / "examples", examples_of([9, 14, 5, 11]))
        fields: dict[str, Any] = {
            "id": "j",
            "name": "learned",
            "config": TUNING,
            "adapter": LORA.to_peft(),
        }
        fields |= {
            "examples": str(self.directory / "examples"),
            "checkpoints": str(self.directory / "checkpoints"),
        }
        return JobStart(**fields | named)

    def answers(self, call: int) -> Iterator[None]:
        """Wait for a reply, which is no error."""
        yield from looks_until(lambda: CallReply(call) in self.reports)

    @property
    def contributed(self) -> list[Contributed]:
        return [
            each
            for report in self.reports
            if isinstance(report, StepReport)
            for each in report.contributions
        ]

    def assert_replays_equal(self) -> None:
        header, lines = read_recording(self.file)
        frames = list(lines)
        report = replay(header, iter(frames), make_device())
        assert report.plans_equal and report.tokens_equal, report.diverged
        assert report.max_loss_difference == 0 and report.steps == len(steps_in(frames)) > 10


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_requests_adapters_and_jobs_of_the_wire(node: Node):
    """Too few pages for all, a step that runs out of memory, and a job that resumes from its
    checkpoint."""
    ref = AdapterRef(
        name="served", directory=adapter_directory(r=3, target_modules=["q_proj", "down_proj"])
    )

    def fail(batch: Any) -> StepFailure | None:
        is_time = (
            batch.windows
            and batch.requests
            and not any(result.failure for result in node.device.results)
        )
        return StepFailure(message="out of memory") if is_time else None

    def script() -> Iterator[Any]:
        yield LoadAdapter(1, ref)
        yield from node.answers(1)
        yield StartJob(2, node.job())
        yield from node.answers(2)
        node.device.fail = fail
        for number, prompt in enumerate(prompts_of((30, 17, 25, 41))):
            params = greedy(40, ignore_eos=True, logprobs=1)
            yield AddRequest(
                id=str(number),
                prompt=prompt,
                params=params,
                arrival_s=0.0,
                adapter=ref if number % 2 else None,
            )
        yield CancelRequest("3")
        yield from looks_until(lambda: node.engine.job("j").num_steps_done >= 1)
        yield PauseJob(3, "j")
        yield from node.answers(3)
        yield ResumeJob(4, "j")
        yield from looks_until(lambda: "j" not in node.engine.jobs and not node.engine.has_work)
        [first, *_] = sorted((node.directory / "checkpoints").iterdir())
        yield StartJob(5, node.job(id="again", name="more", adapter=None, checkpoint=str(first)))
        yield from node.answers(5)
        yield CancelJob(6, "again")
        yield UnloadAdapter(7, "served")
        yield from node.answers(7)

    node.run(script)
    assert any(result.failure for result in node.device.results)
    assert node.engine.stats().num_preemptions + node.engine.stats().num_packs_dropped > 0
    node.assert_replays_equal()


@pytest.mark.parametrize("synchronization", ["synchronous", "local-sgd"])
def test_a_part_of_a_divided_job(node: Node, synchronization: Any):
    """The other node contributes what this one does; both files are in the recording."""
    shard = Shard(
        job="j",
        index=0,
        count=2,
        synchronization=synchronization,
        every_steps=1,
        meet_every_steps=0,
        directory=str(node.directory / "contributions"),
    )

    def script() -> Iterator[Any]:
        yield StartJob(1, node.job(id="j.0", shard=shard))
        yield from node.answers(1)
        number = 0
        while "j.0" in node.engine.jobs:
            if len(node.contributed) == number:
                yield None
                continue
            due = node.contributed[number]
            number += 1
            combination = Combination(
                directories=(due.directory,) * 2, num_trained=2 * due.num_trained
            )
            yield CombineJob(1 + number, "j.0", combination)
            yield from node.answers(1 + number)
            for file in Path(due.directory).iterdir():
                file.unlink()

    node.run(script)
    assert len(node.contributed) >= 2
    node.assert_replays_equal()
