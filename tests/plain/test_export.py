"""`coserve export` of a directory: written whole, or nothing is left and one line says why."""

import asyncio
import json

import numpy as np
import pytest
from homes import HandMade
from safetensors.numpy import save_file
from small_disk import small_disk
from typer.testing import CliRunner

from coserve.cli.main import app
from coserve.errors import CoserveError, DiskFullError
from coserve.server.fine_tuning.archives import Merging

FILES = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / FILES[0]).write_text(
        json.dumps({"base_model_name_or_path": "dummy:llama-3.1-8b"})
    )
    save_file({"x": np.zeros(10_000, dtype=np.float32)}, tmp_path / "adapter" / FILES[1])
    return tmp_path / "adapter"


def export(*arguments):
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_it_is_written_to_new_and_to_empty_directories(adapter, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new/in/new"):
        assert json.loads(export(adapter, tmp_path / name, "--json"))["directory"] == str(
            tmp_path / name
        )
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == FILES
    with pytest.raises(CoserveError, match="is not empty"):
        export(adapter, tmp_path / "empty")


def test_on_a_full_disk_nothing_is_left(adapter, tmp_path):
    with small_disk(tmp_path / "disk", size="16k") as disk:
        for directory in (disk.path, disk.path / "new"):
            with pytest.raises(CoserveError, match="No space left"):
                export(adapter, directory)
            assert list(disk.path.iterdir()) == []


def test_where_nothing_can_be_written(adapter, tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "new"):
        with pytest.raises(CoserveError, match=f"{directory} cannot be written: Not a directory"):
            export(adapter, directory)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_configuration_that_is_none(content, adapter, tmp_path):
    (adapter / FILES[0]).write_bytes(content)
    with pytest.raises(
        CoserveError, match="is not a PEFT configuration: it must hold a JSON object"
    ):
        export(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_job_without_a_finished_model_is_said_with_its_checkpoints(tmp_path):
    home = HandMade(tmp_path / "home")
    begun, running = home.job(), home.job()
    home.checkpoint(running, 4)
    home.close()
    for job, has in ((begun, "none"), (running, f"{running.name}:ckpt-step-4")):
        words = (
            f"job {job.id} is running and has no finished model; it has these checkpoints: {has}"
        )
        with pytest.raises(CoserveError) as caught:
            export(job.id, tmp_path / "out", "--home", home.path)
        assert str(caught.value) == words
    assert "written" in export(f"{running.name}:ckpt-step-4", tmp_path / "out", "--home", home.path)


def test_the_name_of_what_is_written_is_told(tmp_path):
    """Of `last`, one could not know it otherwise."""
    home = HandMade(tmp_path / "home")
    running = home.job()
    home.checkpoint(running, 4)
    home.close()
    name, at = f"{running.name}:ckpt-step-4", ("--home", home.path)
    assert export(name, tmp_path / "one", *at) == f"{tmp_path / 'one'}: {name} written\n"
    told = {"directory": str(tmp_path / "two"), "merged": False, "exported": name}
    assert json.loads(export(name, tmp_path / "two", *at, "--json")) == told


def test_a_base_model_is_for_merging(adapter, tmp_path):
    result = CliRunner().invoke(
        app, ["export", str(adapter), str(tmp_path / "out"), "--model", "tiny"]
    )
    assert result.exit_code == 2 and "applies only to --merge" in result.output
    assert not (tmp_path / "out").exists()


def test_random_weights_are_not_made_to_be_refused(adapter, tmp_path):
    """Those of this model take 32 GB."""
    with pytest.raises(CoserveError, match="has no files of weights"):
        export(adapter, tmp_path / "out", "--merge")
    assert not (tmp_path / "out").exists()


def test_a_merged_model_is_not_begun_where_it_has_no_room(adapter, tmp_path):
    with small_disk(tmp_path / "disk", size="64k") as disk:
        with pytest.raises(DiskFullError, match="the merged model needs"):
            export(adapter, disk.path / "out", "--merge", "--model", "tiny")
        with pytest.raises(DiskFullError, match="the merged model needs"):
            asyncio.run(Merging().merge("tiny", adapter, disk.path))
        assert list(disk.path.iterdir()) == []
