"""Many jobs in an engine at once, from their start until nothing of them is to be left; and what is
left.

Figures are of a process that does nothing else: `python many_jobs.py left` and `python many_jobs.py
resident` print them.
"""

import gc
import json
import sys
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from engines import make_engine, watched

from coserve.adapters import LoraConfig
from coserve.devices.messages.commands import DropVersion
from coserve.devices.messages.jobs import (
    DropCheckpoint,
    DropTrainer,
    OpenTrainer,
    PublishVersion,
    TakeCheckpoint,
)
from coserve.devices.torch.process_memory import give_back_freed_memory, keep_freed_memory
from coserve.engine.commands import CancelJob, JobStart, StartJob
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.jobs.datasets.examples import write_examples_file
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.worker.job_commands import JobCommands

RANK = 64
NUM_EXAMPLES, NUM_TOKENS = 12, 24
_PAIRS = (
    (OpenTrainer, DropTrainer),
    (PublishVersion, DropVersion),
    (TakeCheckpoint, DropCheckpoint),
)
_numbers = count()


def run_jobs(engine: Engine, number: int) -> None:
    """From their start to their ends, with checkpoints; every third is cancelled. Then their
    adapters are unloaded."""
    directory, jobs, ids = Path(mkdtemp(prefix="coserve-jobs-")), JobCommands(engine), []
    example = Example(tokens=tuple(range(1, NUM_TOKENS + 1)), trained=(True,) * NUM_TOKENS)
    write_examples_file(directory / "examples", [example] * NUM_EXAMPLES)
    for _ in range(number):
        ids.append(f"job-{next(_numbers)}")
        job = JobStart(
            id=ids[-1],
            name=f"made by {ids[-1]}",
            examples=str(directory / "examples"),
            config=TuningConfig(batch_size=6),
            adapter=LoraConfig(r=RANK, target_modules="all-linear").to_peft(),
            checkpoints=str(directory / ids[-1]),
            checkpoint_every_steps=1,
        )
        jobs.handle(StartJob(0, job))
    doomed = set(ids[::3][1:])
    while engine.has_work or jobs.is_waiting:
        jobs.take([event for event in engine.step() if isinstance(event, JobEvent)])
        jobs.take_pending()
        for id in [id for id in doomed & engine.jobs.keys() if engine.job(id).num_steps_done == 1]:
            doomed.discard(id)
            jobs.handle(CancelJob(0, id))
    jobs.close()
    for id in ids:
        jobs.unload_adapter(f"made by {id}")
    engine.flush_commands()


def tensor_bytes() -> int:
    """Of all tensors that this process holds."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum(
        {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors
        }.values()
    )


def resident_bytes() -> int:
    """Of this process, when it has given back what it does not need."""
    give_back_freed_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def left_by_jobs() -> dict[str, Any]:
    """Of a dozen jobs, on a small model: pages by owner, bytes of tensors beyond those after one
    job, and how many things the device was told to make and to drop.
    """
    engine = make_engine()
    told = watched(engine).commands
    run_jobs(engine, 1)
    before = tensor_bytes()
    run_jobs(engine, 12)
    return {
        "pages": engine.pool.num_pages_by_owner(),
        "tensor_bytes": tensor_bytes() - before,
        "made_and_dropped": {
            made.__name__: [
                sum(isinstance(each, kind) for each in told) for kind in (made, dropped)
            ]
            for made, dropped in _PAIRS
        },
    }


def resident_after_jobs() -> list[int]:
    """Resident bytes after one job on the built-in model, and after a dozen more."""
    keep_freed_memory()  # as the engine's process does
    torch.set_num_threads(1)
    engine = Engine.load("tiny", EngineConfig(memory_bytes=64 << 20))
    found = []
    for number in (1, 12):
        run_jobs(engine, number)
        found.append(resident_bytes())
    return found


if __name__ == "__main__":
    json.dump({"left": left_by_jobs, "resident": resident_after_jobs}[sys.argv[1]](), sys.stdout)
