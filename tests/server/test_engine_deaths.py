"""A job that kills the engine again and again is set aside; the one beside it is done as if nothing
had happened."""

import json
from typing import Any

import pytest
from served import Served, serving

pytestmark = pytest.mark.long

LINES = [
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n * n}."}) for n in range(30)
]
# Run by the server's process as it starts: adapters of rank 5 end the process in their fifth step.
DEADLY = """
import os
from coserve.devices.torch.trainer import TorchTrainer

update = TorchTrainer.update

def deadly(self, *arguments):
    self.num_updates = getattr(self, "num_updates", 0) + 1
    if self.adapter.config.r == 5 and self.num_updates == 5:
        os._exit(3)
    return update(self, *arguments)

TorchTrainer.update = deadly
"""


# The process ends as a job's files are read, before it begins; and as its last checkpoint is
# written, after its steps.
DEADLY_FILES = {
    "read": """
import os
from coserve.worker import job_commands

job_commands.read_job_files = lambda *arguments: os._exit(3)
""",
    "written": """
import os, time
from coserve.engine.jobs.checkpoint import Checkpoint

def deadly(self, parent):
    time.sleep(1)  # all that while the engine rests
    os._exit(3)

Checkpoint.write = deadly
""",
}


def create(served: Served, rank: int) -> str:
    client = served.client()
    file = client.files.create(file=("data.jsonl", "\n".join(LINES).encode()), purpose="fine-tune")
    made = client.fine_tuning.jobs.create(
        model="small",
        training_file=file.id,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 8, "batch_size": 3}},
        },
        extra_body={"coserve": {"adapter": {"r": rank}, "checkpoint_every_steps": 1}},
    )
    return made.id


def test_a_job_that_kills_engines_fails_and_the_one_beside_it_does_not():
    with serving(before=DEADLY) as served:
        jobs = served.client().fine_tuning.jobs
        bad, good = create(served, 5), create(served, 4)

        def is_finished(id: str) -> bool:
            return jobs.retrieve(id).status in ("succeeded", "failed")

        served.wait_until(lambda: is_finished(bad) and is_finished(good), limit_s=240)
        failed = jobs.retrieve(bad)
        assert failed.status == "failed" and failed.error is not None
        assert (
            failed.error.code == "engine_died"
            and "3 times while it worked for this job alone" in failed.error.message
        )
        assert failed.to_dict()["coserve"]["step"] > 0, "it made steps between"  # type: ignore[index]
        assert jobs.retrieve(good).status == "succeeded"
        metrics: list[Any] = [
            each.data for each in jobs.list_events(good, limit=1000) if each.type == "metrics"
        ]
        assert sorted(each["step"] for each in metrics if "train_loss" in each) == list(
            range(1, 81)
        )
        assert 3 <= served.log.read_text().count("the engine died") <= 6


@pytest.mark.parametrize("files_are", DEADLY_FILES)
def test_a_job_in_whose_files_engines_die_fails(files_are: str):
    with serving(before=DEADLY_FILES[files_are]) as served:
        jobs = served.client().fine_tuning.jobs
        bad = create(served, 4)
        served.wait_until(lambda: jobs.retrieve(bad).status == "failed", limit_s=240)
        error = jobs.retrieve(bad).error
        assert error is not None and error.code == "engine_died"
        assert served.log.read_text().count("the engine died") == 3
