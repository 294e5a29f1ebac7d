"""Places of ranks on a machine: what is refused, what is warned of, and that `coserve doctor` says
both."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import HandMade
from typer.testing import CliRunner

from coserve.cli.main import app
from coserve.devices.ranks import places as rank_places
from coserve.devices.ranks.places import check_places, crowding, num_usable_cores, why_not
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.errors import ModelError


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_places, "num_usable_cores", lambda: 4)


def test_the_cores_are_those_that_this_process_may_use():
    assert 1 <= num_usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("num_ranks", "device", "message"),
    [
        (5, "cpu", "5 ranks need 5 CPU cores, one for each, and this machine has 4"),
        (65, "cpu", "65 ranks are too many: a group has 64 at most"),
        (2, "cuda:1", "2 ranks cannot run on the single device 'cuda:1': set the device to 'cuda'"),
    ],
)
def test_ranks_without_a_place_are_refused_in_one_line(
    four_cores: None, num_ranks: int, device: str, message: str
):
    with pytest.raises(ModelError) as refused:
        check_places(num_ranks, device)
    assert str(refused.value) == message
    assert why_not(num_ranks, device, 1) == message


def test_ranks_on_gpus_need_one_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    check_places(2, "auto")
    assert why_not(2, "cuda", 1) == ""
    with pytest.raises(
        ModelError, match="4 ranks need 4 GPUs, one for each, and this machine has 2"
    ):
        check_places(4, "auto")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(
        ModelError,
        match="2 ranks on GPUs need a PyTorch with NCCL, which this one was built without",
    ):
        check_places(2, "auto")


def test_one_rank_can_be_anywhere():
    check_places(1, "cuda:7")
    assert crowding(1, 10_000) == ""


def test_ranks_that_share_cores_are_warned_of(four_cores: None):
    assert crowding(2, 2) == "" and why_not(4, "cpu", 1) == ""
    assert crowding(2, 3).startswith(
        "2 ranks of 3 threads have 4 CPU cores: a step may take several times as long"
    )
    assert why_not(2, "cpu", 3) == crowding(2, 3)


def test_an_engine_refuses_them_before_it_loads_a_model():
    too_many = num_usable_cores() + 1
    with pytest.raises(ModelError, match=f"{too_many} ranks need {too_many} CPU cores"):
        Engine.load("tiny", EngineConfig(tensor_parallel=too_many), device="cpu")


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_number_of_ranks_is_a_whole_number_from_1_on(number: Any):
    with pytest.raises(ValueError, match="tensor_parallel must be a whole number of at least 1"):
        EngineConfig(tensor_parallel=number)


def test_other_models_are_refused_beside_ranks():
    with pytest.raises(
        ValueError, match="trainable_models must be empty where tensor_parallel is above 1"
    ):
        EngineConfig(tensor_parallel=2, trainable_models={"big": "tiny"})


def test_the_doctor_says_whether_ranks_have_a_place(four_cores: None, tmp_path: Path):
    HandMade(tmp_path).close()

    def doctor(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path), *arguments])
        assert result.exit_code == 0
        found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return found

    assert "ranks_warning" not in doctor(
        "--tensor-parallel", "2", "--device", "cpu", "--threads", "2"
    )
    crowded = doctor("--tensor-parallel", "2", "--device", "cpu", "--threads", "3")
    assert "2 ranks of 3 threads have 4 CPU cores" in crowded["ranks_warning"]
    assert "ranks_warning" not in doctor()
