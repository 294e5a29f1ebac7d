"""A model is refused as soon as its configuration is read: one line, and nothing heavy is imported
for it."""

import json
import subprocess
import sys

import pytest

from coserve.errors import ModelError
from coserve.models.source import check_model

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def refused(name) -> str:
    with pytest.raises(ModelError) as error:
        check_model(str(name))
    assert "\n" not in str(error.value)
    return str(error.value)


def write(directory, config, *files):
    for name in files:
        (directory / name).touch()
    (directory / "config.json").write_text(json.dumps(config))


def test_what_is_here_passes(tmp_path):
    write(tmp_path, LLAMA, "model.safetensors")
    check_model(str(tmp_path))
    write(tmp_path, {"model_type": "llama"})
    check_model(str(tmp_path))
    check_model("tiny")
    check_model("dummy:llama-3.1-8b")
    check_model(f"dummy:{tmp_path}")


def test_the_hub_is_not_asked():
    check_model("nobody/has-such-a-model")


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaModel"])
def test_a_model_that_does_not_generate_text(tmp_path, name):
    write(tmp_path, LLAMA | {"architectures": [name]}, "model.safetensors")
    assert f"describes {name}, which does not generate text" in refused(tmp_path)


def test_another_family_names_those_that_are_run(tmp_path):
    write(tmp_path, {"model_type": "mamba"}, "model.safetensors")
    assert "model_type 'mamba' is not supported; " in refused(tmp_path)
    assert "supported: falcon, " in refused(tmp_path)
    write(tmp_path, {"model_type": "llama4"}, "model.safetensors")
    assert (
        "model_type 'llama4' is not supported; the nearest that is, is llama; supported: "
        in refused(tmp_path)
    )


def test_gguf_is_named(tmp_path):
    path = tmp_path / "model-Q4_K_M.gguf"
    path.touch()
    for name in (path, tmp_path):
        assert refused(name).startswith(f"{path} is a GGUF file, which is not read here")


def test_quantised_weights(tmp_path):
    """Those that are read: tests/torch/test_quantised.py."""
    for method in ("hqq", "aqlm", "quanto"):
        write(
            tmp_path, LLAMA | {"quantization_config": {"quant_method": method}}, "model.safetensors"
        )
        assert (
            f"weights quantised by {method} are not read; known are awq, bitsandbytes, "
            in refused(tmp_path)
        )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "is not valid JSON: it is nested too deeply"),
        ('{"model_type": ' * 50_000, "is not valid JSON: it is nested too deeply"),
        ("[1]", "must hold a JSON object"),
        ("\xff", "is not valid JSON"),
    ],
)
def test_a_configuration_of_anyone_s_is_refused_in_one_line(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert said in refused(tmp_path)


def test_a_configuration_of_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "is longer than" in refused(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/tmp/outside.safetensors", "a/b.safetensors", ".", "..", ""]
)
def test_an_index_names_files_beside_it_alone(tmp_path, name):
    model = tmp_path / "model"
    model.mkdir()
    write(model, LLAMA)
    (tmp_path / "outside.safetensors").touch()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "is not a safetensors index" in refused(
        model
    ) and "not the name of a file beside it" in refused(model)


def test_an_index_that_is_nested_too_deeply_is_refused(tmp_path):
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert "is not a safetensors index" in refused(tmp_path)


def test_weights_that_are_not_there(tmp_path):
    write(tmp_path, LLAMA)
    assert refused(tmp_path) == f"{tmp_path} has no model.safetensors, and no shards of one"


def test_nothing_heavy_is_imported(tmp_path):
    write(tmp_path, {"model_type": "mamba"})
    code = f"""
import sys
from coserve.cli.main import main
sys.argv = ["coserve", "up", {str(tmp_path)!r}]
try:
    main()
finally:
    print(sorted(sys.modules.keys() & {{"torch", "transformers", "fastapi", "sqlalchemy"}}))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2 or result.returncode == 1
    assert "model_type 'mamba' is not supported" in result.stderr
    assert result.stdout.strip() == "[]"
