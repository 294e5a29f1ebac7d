"""Files of a device that is a group of processes: they are there, whole, once a command has been
answered."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from devices import Driver
from rank_training import CONFIG, FAST, num_trained, packs
from safetensors.torch import load_file
from small_disk import small_disk
from support import make_backbone, model_directory

from coserve.adapters import LoraConfig
from coserve.adapters.file_names import CONFIG_FILE, FULL_FILE, WEIGHTS_FILE
from coserve.adapters.methods.full import FullConfig
from coserve.devices.loading import open_device
from coserve.devices.messages.commands import OpenVersion, SaveAdapter
from coserve.devices.messages.jobs import (
    OPTIMIZER_FILE,
    PublishVersion,
    TakeCheckpoint,
    WriteCheckpoint,
)
from coserve.devices.messages.steps import Update
from coserve.devices.ranks.group_device import GroupDevice
from coserve.devices.settings import DeviceSettings
from coserve.engine.jobs.checkpoint import Checkpoint, JobPosition
from coserve.errors import DiskFullError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.simulate.roofline import roofline_profile

pytestmark = pytest.mark.long
LORA = LoraConfig(r=4, target_modules="all-linear")
POSITION = JobPosition(
    num_steps_done=2,
    num_tokens_trained=1,
    num_rows_run=1,
    num_bad_steps=0,
    evaluated=False,
    num_steps=4,
    num_examples=1,
    num_tokens=1,
)


@pytest.fixture
def drivers():
    """A device of two processes, and one that is here."""
    backbone = make_backbone("llama")
    settings = DeviceSettings(
        model=str(model_directory("llama")),
        dtype="float32",
        device="cpu",
        threads=1,
        memory_bytes=1500 * kv_page_bytes(backbone, 4),
        block_tokens=4,
        profile=roofline_profile(backbone, FAST),
    )
    group = GroupDevice(msgspec.structs.replace(settings, num_ranks=2))
    yield Driver(group), Driver(open_device(settings, lambda *progress: None))
    group.close()


class Taken:
    """A job's copy on a device, as an engine writes it."""

    def __init__(self, driver: Driver, name: str = "copy") -> None:
        self._driver, self._name = driver, name
        driver.device.execute(TakeCheckpoint("job", name))

    def write(self, directory: Path) -> None:
        self._driver.device.execute(WriteCheckpoint(self._name, str(directory)))


def train(driver, opened, steps):
    for sequences in packs(4)[steps.start : steps.stop]:
        driver.train("job", opened, sequences, window=9, tasklet=9)
        driver.step(updates=[Update("job", num_trained(sequences), 4)])
        driver.reuse_pages()


@pytest.mark.parametrize("config", [LORA, FullConfig()], ids=["lora", "full"])
def test_a_group_and_one_process_resume_each_others_checkpoints(config, drivers, tmp_path):
    source, found = {"adapter": config.to_peft()}, []
    tuning = replace(CONFIG, live=config.is_model)
    names = {OPTIMIZER_FILE, "job.json"} | (
        {CONFIG_FILE, WEIGHTS_FILE} if config is LORA else {FULL_FILE}
    )
    for number, (first, second) in enumerate((drivers, drivers[::-1])):
        first_job = first.open_trainer("job", tuning, **source)
        train(first, first_job, range(2))
        directory = Checkpoint(position=POSITION, state=Taken(first, f"{number}")).write(
            tmp_path / f"{number}"
        )
        written = {path.name for path in directory.iterdir()}
        assert names <= written and not [name for name in written if "ranks" in name]
        train(first, first_job, range(2, 4))
        resumed = second.open_trainer("job", tuning, checkpoint=str(directory), **source)
        train(second, resumed, range(2, 4))
        for driver in (first, second):
            place = Checkpoint(position=POSITION, state=Taken(driver, f"end-{number}")).write(
                tmp_path / "ends"
            )
            found.append(load_file(place / OPTIMIZER_FILE))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-5, rtol=1e-3)


def test_a_group_saves_versions_and_reads_them_again(drivers, tmp_path):
    group, _ = drivers
    trained = group.open_trainer("job", CONFIG, adapter=LORA.to_peft())
    train(group, trained, range(2))
    group.device.execute(PublishVersion("job", "version"))
    for number in range(2):  # the second time, over files that are there
        group.device.execute(SaveAdapter("version", str(tmp_path / "saved")))
        assert {path.name for path in (tmp_path / "saved").iterdir()} == {
            CONFIG_FILE,
            WEIGHTS_FILE,
        }, number
    opened = [
        each.device.execute(OpenVersion("again", str(tmp_path / "saved"))) for each in drivers
    ]
    assert opened[0].num_bypasses == opened[1].num_bypasses > 0
    group.device.execute(SaveAdapter("again", str(tmp_path / "again")))
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


def test_a_full_disk_is_told_as_one_and_leaves_no_file(drivers, tmp_path):
    group, _ = drivers
    trained = group.open_trainer("job", CONFIG, adapter=LORA.to_peft())
    train(group, trained, range(1))
    with small_disk(tmp_path / "disk", "1m") as disk:
        disk.fill()
        checkpoint = Checkpoint(position=POSITION, state=Taken(group))
        with pytest.raises(DiskFullError):
            checkpoint.write(disk.path / "checkpoints")
        disk.empty()
        assert not list(disk.path.rglob("*.safetensors*"))
        directory = checkpoint.write(disk.path / "checkpoints")
        assert {path.name for path in directory.iterdir()} == {
            CONFIG_FILE,
            WEIGHTS_FILE,
            OPTIMIZER_FILE,
            "job.json",
        }
