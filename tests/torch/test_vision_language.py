"""Checkpoints of models that see pictures, too: what is read of them, what is left, and what is
written."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import make_backbone, make_model, model_directory, random_tokens

from coserve.errors import UnsupportedModelError, WeightsError
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.saving import save_model
from coserve.models.source import find_model


def logits_of(backbone, tokens):
    sequence = CachedSequence(backbone, len(tokens))
    return logits(backbone, forward(backbone, [sequence.extend(tokens)]))


@pytest.fixture
def fused(tmp_path):
    """Qwen3.5's experts as they are published: those of a layer in one tensor."""
    directory = shutil.copytree(model_directory("qwen3.5-moe-published"), tmp_path / "fused")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    model = make_model("qwen3.5-moe-published")
    tensors |= {
        name: value.clone() for name, value in model.state_dict().items() if ".mlp.experts." in name
    }
    save_file(tensors, path)
    return directory


@pytest.mark.parametrize("name", ["qwen3.5-published", "gemma3-published", "mistral3"])
def test_the_log_says_what_is_left_unread(name, caplog):
    num_seen = sum(
        "language_model" not in each and "lm_head" not in each
        for each in make_model(name).state_dict()
    )
    with caplog.at_level(logging.INFO):
        load_backbone(str(model_directory(name)))
    assert (
        f"{num_seen} tensors are left unread, which the text model does not have: " in caplog.text
    )


def test_a_tensor_of_the_text_part_too_many_is_named(tmp_path):
    directory = shutil.copytree(model_directory("gemma3-published"), tmp_path / "model")
    path, name = directory / "model.safetensors", "language_model.model.layers.0.other.weight"
    save_file(load_file(path) | {name: torch.zeros(1)}, path)
    with pytest.raises(WeightsError, match=f"holds {name}"):
        load_backbone(str(directory))


def test_experts_in_one_tensor_are_those_in_many(fused):
    tokens = random_tokens(9, 1)
    assert any(
        name.endswith("experts.gate_up_proj") for name in load_file(fused / "model.safetensors")
    )
    torch.testing.assert_close(
        logits_of(load_backbone(str(fused)), tokens),
        logits_of(make_backbone("qwen3.5-moe-published"), tokens),
    )


def test_experts_in_one_tensor_of_other_experts_are_named(fused):
    path = fused / "model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("experts.down_proj"))
    save_file(tensors | {name: tensors[name][1:].clone()}, path)
    with pytest.raises(WeightsError, match=rf"{name} has shape \[5, .* not one of 6 experts"):
        load_backbone(str(fused))


@pytest.mark.parametrize("is_fused", [False, True])
def test_changed_weights_are_written_where_they_were_and_the_rest_stays(is_fused, fused, tmp_path):
    directory = fused if is_fused else model_directory("qwen3.5-moe-published")
    backbone, target = load_backbone(str(directory)), tmp_path / "changed"
    shapes = backbone.architecture.weight_shapes
    changed = {
        name: torch.randn(shape) * 0.1
        for name, shape in shapes.items()
        if name.endswith("_proj.weight")
    }
    assert any("experts" in name for name in changed) and any(
        "out_proj" in name for name in changed
    )
    save_model(backbone.architecture, find_model(str(directory)), target, changed)
    before, after = (load_file(each / "model.safetensors") for each in (directory, target))
    assert before.keys() == after.keys()
    seen = [name for name in before if "visual" in name]
    assert seen and all(torch.equal(before[name], after[name]) for name in seen)
    theirs = (
        type(make_model("qwen3.5-moe-published"))
        .from_pretrained(target, attn_implementation="eager")
        .eval()
    )
    tokens = random_tokens(9, 1)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(
        logits_of(load_backbone(str(target)), tokens), expected, atol=1e-4, rtol=0
    )


def test_a_text_part_of_another_family_is_refused_by_name(tmp_path):
    directory = shutil.copytree(model_directory("mistral3"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["model_type"] = "llama"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match="mistral3 with a text_config of model_type 'llama'"
    ):
        load_backbone(str(directory))
