"""Ctrl-C between any two statements of a job's bookkeeping: the job trains the same adapter, or has
failed."""

import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from engines import examples_of, make_engine
from lengths import long_but
from safetensors.torch import load_file

from coserve.adapters import LoraConfig
from coserve.engine import jobs
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.job import Job
from coserve.tuning.config import TuningConfig

LORA = LoraConfig(r=2, target_modules="all-linear", dropout=0.2)
CONFIG = TuningConfig(
    num_epochs=2,
    batch_size=3,
    max_pack_tokens=20,
    seed=4,
    publish_every_steps=1,
    evaluate_every_steps=1,
)
FOLDER = str(Path(jobs.__file__).parent)
_MOST_STEPS = 400


class InterruptingTrace:
    """A trace function that raises KeyboardInterrupt before the n-th line that code in engine/jobs
    runs."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.num_lines = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._trace_line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.line:
                raise KeyboardInterrupt
        return self._trace_line


def train(line: int) -> tuple[Engine, Job, InterruptingTrace]:
    """Train a job whose owner interrupts a step once, before this line; 0: never."""
    engine, trace = make_engine(), InterruptingTrace(line)
    job = engine.job(
        engine.submit(
            examples_of((9, 14, 5, 20, 11, 7)),
            CONFIG,
            adapter=LORA,
            name="a",
            validation=examples_of((8, 6)),
        )
    )
    for _ in range(_MOST_STEPS):
        if job.is_terminal:
            break
        before = sys.gettrace()
        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                engine.step()
            finally:
                sys.settrace(before)
        engine.check_integrity()
    engine.step()
    return engine, job, trace


def parameters(engine: Engine, directory: Path) -> dict[str, torch.Tensor]:
    engine.save_adapter("a", directory)
    return load_file(directory / "adapter_model.safetensors")


@cache
def num_lines() -> int:
    return train(0)[2].num_lines


@pytest.mark.parametrize("part", long_but(3, 11, 17, 26, of=range(32)))
def test_a_job_that_was_interrupted_between_any_two_lines_trains_the_same_adapter_or_has_failed(
    part, tmp_path
):
    engine, plain, _ = train(0)
    wanted = parameters(engine, tmp_path / "plain")
    engine, job, trace = train(1 + part * num_lines() // 32)
    assert trace.num_lines >= trace.line, "it was interrupted"
    if job.state == "failed":  # whether its optimizer step was made is not known
        assert job.error is not None and "the device failed within an optimizer step" in job.error
        return
    assert job.state == "succeeded"
    assert (job.num_steps_done, job.num_tokens_trained) == (
        plain.num_steps_done,
        plain.num_tokens_trained,
    )
    got = parameters(engine, tmp_path / "interrupted")
    assert max(float((got[name] - wanted[name]).abs().max()) for name in wanted) < 1e-6


def interrupted_once(call: Any) -> Any:
    """Return a function that does a call, and then is interrupted, the first time."""
    times: list[None] = []

    def do(*arguments: Any) -> None:
        call(*arguments)
        times.append(None)
        if len(times) == 1:
            raise KeyboardInterrupt

    return do


@pytest.mark.parametrize("where", ["pages", "counters"])
def test_a_job_whose_pause_is_interrupted_has_no_pack_on_pages_of_others_and_trains_on(
    monkeypatch, where
):
    engine = make_engine()
    job = engine.job(engine.submit(examples_of((9, 14, 5, 20)), CONFIG, adapter=LORA, name="a"))
    while not job.has_pack:
        engine.step()
    begun = job.progress.begun
    assert begun is not None
    owner, name = (begun.pages, "release") if where == "pages" else (engine.counters, "leave")
    monkeypatch.setattr(owner, name, interrupted_once(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        engine.pause_job(job.id)
    assert job.progress.begun is None
    engine.pause_job(job.id)
    engine.resume_job(job.id)
    while not job.is_terminal:
        engine.step()
    assert job.state == "succeeded"
    engine.check_integrity()


@pytest.mark.parametrize(
    ("where", "is_done"),
    [
        ("pages", True),
        *((where, is_done) for where in ("counters", "swap", "log") for is_done in (False, True)),
    ],
)
def test_a_job_whose_end_is_interrupted_ends_once_and_leaves_nothing(monkeypatch, where, is_done):
    """Before or after the call, of each thing that a job gives back when it ends."""
    engine = make_engine()
    job = engine.job(engine.submit(examples_of((9, 14, 5, 20)), CONFIG, adapter=LORA, name="a"))
    while not job.has_pack:
        engine.step()
    begun = job.progress.begun
    assert begun is not None
    owner, name = {
        "pages": (begun.pages, "release"),
        "counters": (engine.counters, "leave"),
        "swap": (engine.swap, "release_tensors"),
        "log": (engine.log, "send"),
    }[where]
    call = getattr(owner, name)
    times: list[None] = []

    def interrupted(*arguments: Any) -> None:
        times.append(None)
        if len(times) > 1:
            call(*arguments)
            return
        if is_done:
            call(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.cancel_job(job.id)
    events = [*engine.step(), *engine.step()]
    ends = [event for event in events if isinstance(event, JobEvent) and event.kind == "cancelled"]
    assert len(ends) == 1
    assert engine.counters.views() == (), "nothing of the tenant is queued"
    engine.forget_job(job.id)
    engine.check_integrity()
