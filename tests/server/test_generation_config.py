"""The model's generation_config.json decides what requests do not say."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from served import Served, model_directory, serving, tokenizer

from coserve.errors import ModelError
from coserve.server.text.generation_defaults import FILE, read_defaults


def write(directory: Path, **values: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_text(json.dumps(values))
    return directory


def test_what_is_taken_of_the_file(tmp_path: Path):
    own = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "repetition_penalty": 1.05,
    }
    directory = write(
        tmp_path / "own", **own, eos_token_id=[1], do_sample=False, max_new_tokens=2048
    )
    taken = {name: value for name, value in own.items() if value is not None}
    assert read_defaults(directory, "auto") == taken
    assert read_defaults(None, str(directory)) == taken
    assert (
        read_defaults(directory, "none")
        == read_defaults(None, "auto")
        == read_defaults(tmp_path, "auto")
        == {}
    )


def test_a_file_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    directory = write(tmp_path / "own", temperature=7)
    with caplog.at_level(logging.WARNING):
        assert read_defaults(directory, "auto") == {}
    assert "temperature must be a number from 0 to 2" in caplog.text
    for wrong in (directory, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match="cannot be used"):
            read_defaults(None, str(wrong))


def texts(served: Served, **more: Any) -> set[str]:
    """Of three requests that say no seed."""
    prompt = tokenizer()("Hello", add_special_tokens=False)["input_ids"]
    body = {"model": "small", "prompt": prompt, "max_tokens": 24, **more}
    return {
        served.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(3)
    }


@pytest.mark.long
def test_a_server_honours_it_and_requests_overrule_it(tmp_path: Path):
    with serving("--generation-config", str(write(tmp_path / "greedy", top_k=1))) as served:
        assert len(texts(served)) == 1
        assert len(texts(served, top_k=0)) == 3
    other = tmp_path / "small"
    other.mkdir()
    for file in model_directory().iterdir():
        (other / file.name).symlink_to(file)
    (other / FILE).unlink()
    write(other, temperature=0)
    with serving(model=str(other)) as served:
        assert len(texts(served)) == 1
        assert len(texts(served, temperature=1)) == 3
