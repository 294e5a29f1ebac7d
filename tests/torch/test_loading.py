"""From a name to weights: directories, the hub's cache, shapes without weights, and every way in
which files can be wrong."""

import json
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from support import CONFIGS, make_model, model_directory, random_tokens

from coserve.engine.prompts import load_tokenizer
from coserve.errors import ModelError, UnknownModelError, UnsupportedModelError, WeightsError
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.families import build_architecture
from coserve.models.presets import PRESETS
from coserve.models.source import find_model
from coserve.models.weights import weight_tensors


@pytest.fixture
def directory(tmp_path):
    """A copy of a good model, to be spoilt."""
    return shutil.copytree(model_directory("llama"), tmp_path / "model")


def edit_weights(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(directory, **fields):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **fields}))


def first_logits(backbone):
    tokens = random_tokens(8, 0)
    return logits(backbone, forward(backbone, [CachedSequence(backbone, 8).extend(tokens)]))


def test_sharded_weights_are_the_same_weights(tmp_path):
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole, sharded = load_backbone(str(model_directory("llama"))), load_backbone(str(tmp_path))
    assert torch.equal(first_logits(whole), first_logits(sharded))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_float_type_are_read(directory, stored):
    edit_weights(
        directory, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()})
    )
    backbone = load_backbone(str(directory), dtype="float32")
    assert {t.dtype for held in backbone.weights.values() for t in weight_tensors(held)} == {
        torch.float32
    }
    expected = make_model("llama").get_input_embeddings().weight.to(stored).float()
    found = backbone.weights["embed"]["model.embed_tokens.weight"]
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, expected)


def test_auto_takes_the_dtype_of_the_configuration(directory):
    assert load_backbone(str(directory)).dtype == torch.float32
    edit_config(directory, dtype="bfloat16")
    assert load_backbone(str(directory)).dtype == torch.bfloat16
    assert load_backbone(str(directory), dtype="float16").dtype == torch.float16
    with pytest.raises(
        ModelError, match="dtype 'int8' is not one of auto, float32, bfloat16, float16"
    ):
        load_backbone(str(directory), dtype="int8")


def test_configurations_from_before_transformers_5_are_read(directory):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"], config["dtype"]
    scaling = {"rope_type": "linear", "factor": 2.0}
    path.write_text(
        json.dumps(
            {**config, "rope_theta": 5000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
        )
    )
    backbone = load_backbone(str(directory))
    assert backbone.dtype == torch.bfloat16
    frequencies = backbone.rotary[""].inverse_frequencies
    torch.testing.assert_close(frequencies[1], torch.tensor(5000.0) ** (-2 / 8) / 2)


def test_a_model_in_the_hubs_cache_is_found_by_its_id(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    shutil.copytree(model_directory("llama"), snapshot)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert torch.equal(
        first_logits(load_backbone("someone/tiny")),
        first_logits(load_backbone(str(model_directory("llama")))),
    )
    with pytest.raises(
        UnknownModelError,
        match="'someone/other' is neither a directory, nor tiny, nor a model that",
    ):
        load_backbone("someone/other")


def same_logits(directory, family):
    return torch.equal(
        first_logits(load_backbone(str(directory))),
        first_logits(load_backbone(str(model_directory(family)))),
    )


def test_buffers_that_older_checkpoints_carry_along_are_passed_over(directory):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(directory, lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert same_logits(directory, "llama")


def test_a_tied_checkpoint_may_store_its_head_if_it_is_the_embedding(tmp_path):
    directory = shutil.copytree(model_directory("llama-biases-tied"), tmp_path / "model")
    head = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(directory, lambda tensors: tensors.update({"lm_head.weight": head.clone()}))
    assert same_logits(directory, "llama-biases-tied")
    edit_weights(directory, lambda tensors: tensors.update({"lm_head.weight": head + 1}))
    with pytest.raises(
        WeightsError, match=r"lm_head\.weight is not the embedding, but the configuration ties them"
    ):
        load_backbone(str(directory))


def test_the_files_are_those_that_transformers_reads(directory):
    """One whole file before an index that was left over; other safetensors in the directory are not
    the model's."""
    spoilt = {
        name: tensor + 1 for name, tensor in load_file(directory / "model.safetensors").items()
    }
    for name in ("consolidated.safetensors", "zz.safetensors", "model-00001-of-00001.safetensors"):
        save_file(spoilt, directory / name)
    index = {"weight_map": dict.fromkeys(spoilt, "model-00001-of-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same_logits(directory, "llama")


def test_a_tensor_in_two_shards_is_named(directory):
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    shutil.copy(
        directory / "model-00001-of-00002.safetensors",
        directory / "model-00002-of-00002.safetensors",
    )
    with pytest.raises(
        WeightsError, match=r"lm_head\.weight is in both .*00001.* and .*00002.*; keep one"
    ):
        load_backbone(str(directory))


# -- dummies ----------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_number_of_parameters_that_their_names_say(preset):
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = build_architecture(find_model(f"dummy:{preset}").config)
    ours = sum(torch.Size(shape).numel() for shape in architecture.weight_shapes.values())
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**PRESETS[preset])
        ).num_parameters()
    assert ours == theirs
    billions = float(preset.rsplit("-", 1)[1].rstrip("bm")) / (1000 if preset.endswith("m") else 1)
    assert ours / 1e9 == pytest.approx(billions, rel=0.25)


def test_random_weights_come_from_their_seed(directory):
    shape = f"dummy:{directory / 'config.json'}"
    one, same, other = (
        load_backbone(shape, seed=1),
        load_backbone(shape, seed=1),
        load_backbone(shape, seed=2),
    )
    assert torch.equal(first_logits(one), first_logits(same))
    assert not torch.equal(first_logits(one), first_logits(other))
    assert torch.isfinite(first_logits(one)).all()


def test_a_shape_without_memory_of_any_size():
    backbone = load_backbone("dummy:llama-3.1-70b", device="meta")
    assert sum(t.nbytes for held in backbone.weights.values() for t in weight_tensors(held)) > 130e9


# -- bad input --------------------------------------------------------------------


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(
        UnknownModelError, match=r"no preset or config.json 'gpt-5'; presets: smollm2-135m, .*70b"
    ):
        load_backbone("dummy:gpt-5")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "", "/" + "x" * 300])
def test_a_directory_that_is_not_there(name):
    with pytest.raises(UnknownModelError, match="is not a directory"):
        load_backbone(name)


def test_a_directory_without_a_configuration(tmp_path):
    with pytest.raises(UnknownModelError, match=r"has no config\.json"):
        load_backbone(str(tmp_path))


def test_an_unknown_family_names_the_known_ones(directory):
    edit_config(directory, model_type="mamba")
    with pytest.raises(
        UnsupportedModelError,
        match=r"'mamba' is not supported; .*supported: falcon, .*, qwen2, qwen3",
    ):
        load_backbone(str(directory))


def test_a_sliding_window_of_no_keys(tmp_path):
    directory = shutil.copytree(model_directory("mistral-sliding"), tmp_path / "model")
    edit_config(directory, sliding_window=0)
    with pytest.raises(UnsupportedModelError, match="sliding_window=0 is not valid"):
        load_backbone(str(directory))


@pytest.mark.parametrize("device", ["nosuch", "cuda:99"])
def test_a_device_that_is_not_there(directory, device):
    with pytest.raises(ModelError, match=f"device '{device}' cannot be used here") as error:
        load_backbone(str(directory), device=device)
    one_line(error)


def test_a_configuration_that_is_no_json(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_backbone(str(directory))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; hidden_act must be silu"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 must be a multiple of num_key_value_heads=3",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "a"}}, "is not valid"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not valid"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "weights quantised by hqq are not read"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope scaling 'dynamic' is not supported; known: default, linear, llama3, longrope, "
            "yarn",
        ),
    ],
)
def test_settings_that_are_not_run(directory, fields, message):
    edit_config(directory, **fields)
    with pytest.raises(UnsupportedModelError) as error:
        load_backbone(str(directory))
    assert message in one_line(error)


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_of_another_size_name_the_tensor_and_both_shapes(tmp_path, family):
    directory = shutil.copytree(model_directory(family), tmp_path / "model")
    edit_config(directory, vocab_size=96)
    with pytest.raises(
        WeightsError, match=r"weight has shape \[97, \d+\], the model needs \[96, \d+\]"
    ):
        load_backbone(str(directory))


def test_a_missing_tensor_is_named(directory):
    edit_weights(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        WeightsError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight, which the model needs"
    ):
        load_backbone(str(directory))


def test_a_tensor_too_many_is_named(directory):
    edit_weights(
        directory,
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
    )
    with pytest.raises(
        WeightsError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias, which this llama"
    ):
        load_backbone(str(directory))


def test_weights_that_are_no_floats_are_named(directory):
    name = "model.layers.2.mlp.down_proj.weight"
    edit_weights(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(
        WeightsError, match=rf"{name} is I8; weights must be float32, float16 or bfloat16"
    ):
        load_backbone(str(directory))


def test_a_file_that_was_cut_short(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(WeightsError) as error:
        load_backbone(str(directory))
    assert "damaged or cut short" in one_line(error)
    assert str(path) in one_line(error)


def test_a_shard_that_is_not_there(tmp_path):
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(WeightsError, match=f"lacks {gone.name}, which its index names"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("content", ['{"weight_map": 3}', '{"weight_map": {"a": 5}}', "{", "[]"])
def test_an_index_that_is_none(directory, content):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match="is not a safetensors index"):
        load_backbone(str(directory))


def test_weights_of_the_bare_model_without_its_head_say_so(directory):
    def strip(tensors):
        bare = {n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"}
        tensors.clear()
        tensors.update(bare)

    edit_weights(directory, strip)
    with pytest.raises(WeightsError, match="saved from the bare model, without its head"):
        load_backbone(str(directory))


@pytest.mark.long
def test_weights_in_pytorchs_format_name_the_command_that_converts_them(tmp_path):
    make_model("llama").config.save_pretrained(tmp_path)
    torch.save(make_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        WeightsError, match=r"no model\.safetensors, .* \(found pytorch_model\.bin\); convert"
    ) as error:
        load_backbone(str(tmp_path))
    subprocess.run(
        shlex.split(one_line(error).partition("by: ")[2].replace("python", sys.executable, 1)),
        check=True,
    )
    assert torch.equal(
        first_logits(load_backbone(str(tmp_path))),
        first_logits(load_backbone(str(model_directory()))),
    )


def test_a_tokenizer_of_sentencepiece_alone(directory):
    corpus = directory / "corpus.txt"
    corpus.write_text(
        "\n".join(f"the quick brown fox {n} jumps over the lazy dog {7 * n}" for n in range(200))
    )
    prefix = str(directory / "tokenizer")
    SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=prefix,
        vocab_size=97,
        model_type="bpe",
        minloglevel=2,
        byte_fallback=False,
    )
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer, text = load_tokenizer(find_model(str(directory))), "the quick fox 7"
    assert tokenizer.encode(text, add_special_tokens=False) == SentencePieceProcessor(
        f"{prefix}.model"
    ).encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_damaged_sentencepiece_model_is_called_damaged(directory, content):
    (directory / "tokenizer.model").write_bytes(content)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(
        ModelError, match=r"tokenizer.model is neither SentencePiece's .* it is damaged"
    ) as error:
        load_tokenizer(find_model(str(directory)))
    one_line(error)


def test_a_tokenizer_that_is_damaged_is_one_line(directory):
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=f"the tokenizer in {directory} cannot be read: ") as error:
        load_tokenizer(find_model(str(directory)))
    one_line(error)
