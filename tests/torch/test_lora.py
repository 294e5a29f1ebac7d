"""LoRA's settings mean what they mean in PEFT, and PEFT's directories go in and out bit for bit."""

import json
import re
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support import (
    CONFIGS,
    FAMILIES,
    make_adapter,
    make_backbone,
    make_model,
    peft_twin,
    random_tokens,
)

from coserve.adapters import Adapter, LoraConfig, load_adapter, save_adapter
from coserve.errors import AdapterError
from coserve.models import CachedSequence, forward, logits


def peft_modules(family: str, **lora) -> dict[str, tuple[int, float]]:
    """Where PEFT puts a LoRA: module -> (rank, scaling)."""
    model = get_peft_model(make_model(family), PeftLoraConfig(task_type="CAUSAL_LM", **lora))
    return {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def our_modules(family: str, **lora) -> dict[str, tuple[int, float]]:
    config = LoraConfig(
        **{"alpha" if name == "lora_alpha" else name: value for name, value in lora.items()}
    )
    return {
        module: (config.rank(module), config.scaling(module))
        for module in config.sites(make_backbone(family).architecture)
    }


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "ALL-LINEAR", "r": 3, "lora_alpha": 5},
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "r": 5},
        {"target_modules": ["self_attn.k_proj"]},
        {"target_modules": r".*\.(q|k)_proj"},
        {"target_modules": r".*layers\.[02]\..*v_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": 1},
        {
            "target_modules": ["q_proj", "k_proj"],
            "layers_to_transform": [0, 2],
            "layers_pattern": "layers",
        },
        {"target_modules": "all-linear", "exclude_modules": ["v_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*layers\.1\..*"},
        {
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"q_proj": 2, r"layers\.1\..*v_proj": 7},
        },
        {
            "target_modules": ["q_proj", "v_proj"],
            "alpha_pattern": {"v_proj": 3},
            "rank_pattern": {r"^.*layers\.0.*": 6},
        },
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"], "layers_to_transform": [0]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
    ],
)
def test_sites_ranks_and_scalings_are_pefts(family, lora):
    assert our_modules(family, **lora) == peft_modules(family, **lora)


_PIECES = st.sampled_from(
    ["q_proj", "k_proj", "v_proj", "self_attn", "layers", "model", r"\d", "0", "1", "", "p"]
)
_JOINTS = st.sampled_from([r"\.", ".*", r".*\.", "_", ""])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(_JOINTS, _PIECES), min_size=1, max_size=4))
def test_a_regular_expression_means_the_whole_name(parts):
    pattern = "".join(joint + piece for joint, piece in parts)
    linear = make_backbone("llama").architecture.linear_sites
    expected = {name for name in linear if re.fullmatch(pattern, name)}
    if expected and pattern.lower() != "all-linear":
        assert (
            LoraConfig(target_modules=pattern).sites(make_backbone("llama").architecture).keys()
            == expected
        )
    else:
        with pytest.raises(AdapterError, match="matches no linear layer"):
            LoraConfig(target_modules=pattern or "x").sites(make_backbone("llama").architecture)


@pytest.mark.parametrize("family", CONFIGS)
def test_an_adapter_from_peft_gives_pefts_logits(family):
    model, adapter = peft_twin(family)
    tokens = random_tokens(15, 4)
    sequence = CachedSequence(adapter.backbone, 15, adapter.bypasses())
    hidden = forward(adapter.backbone, [sequence.extend(tokens)])
    ours = logits(adapter.backbone, hidden, [(15, adapter.bypasses())])
    with torch.no_grad():
        theirs = model(tokens[None]).logits[0]
        base = make_model(family)(tokens[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert (base - theirs).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True, "r": 5, "lora_alpha": 3},
        {
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"up_proj": 1},
            "target_modules": "all-linear",
        },
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["down_proj"], "layers_to_transform": [1]},
    ],
)
def test_settings_from_peft_give_pefts_logits(lora):
    model, adapter = peft_twin("llama", **lora)
    tokens = random_tokens(15, 4)
    sequence = CachedSequence(adapter.backbone, 15, adapter.bypasses())
    hidden = forward(adapter.backbone, [sequence.extend(tokens)])
    ours = logits(adapter.backbone, hidden, [(15, adapter.bypasses())])
    with torch.no_grad():
        torch.testing.assert_close(ours, model(tokens[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "rank_pattern": {"q_proj": 2},
            "use_rslora": True,
            "lora_dropout": 0.25,
            "exclude_modules": ["k_proj"],
        },
        {
            "alpha_pattern": {"v_proj": 3},
            "r": 5,
            "lora_alpha": 7,
            "target_modules": ["v_proj", "o_proj"],
        },
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"target_modules": r".*\.(q|k)_proj", "exclude_modules": r".*layers\.1\..*"},
    ],
)
def test_a_directory_from_peft_comes_out_as_it_went_in(tmp_path, settings):
    model, adapter = peft_twin("qwen2", **settings)
    save_adapter(adapter, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (
        PeftLoraConfig.from_pretrained(tmp_path / who).to_dict() for who in ("ours", "theirs")
    )
    for fields in (ours, theirs):
        for name in ("base_model_name_or_path", "auto_mapping", "peft_version"):
            del fields[name]
        for name in ("target_modules", "exclude_modules"):
            if isinstance(fields[name], list | set):
                fields[name] = sorted(fields[name])
    assert ours == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_ours_loads_in_peft_and_gives_the_same_logits(tmp_path, family):
    adapter = make_adapter(make_backbone(family), use_rslora=True)
    save_adapter(adapter, tmp_path)
    model = PeftModel.from_pretrained(make_model(family), tmp_path)
    tokens = random_tokens(15, 4)
    sequence = CachedSequence(adapter.backbone, 15, adapter.bypasses())
    ours = logits(adapter.backbone, forward(adapter.backbone, [sequence.extend(tokens)]))
    with torch.no_grad():
        torch.testing.assert_close(ours, model(tokens[None]).logits[0], atol=1e-4, rtol=0)
    again = load_adapter(adapter.backbone, tmp_path)
    assert again.config == adapter.config
    assert all(torch.equal(again.masters[name], master) for name, master in adapter.masters.items())


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_adapters_stored_in_half_precision_are_read(tmp_path, stored):
    adapter = make_adapter(make_backbone("llama"))
    save_adapter(adapter, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    halved = {name: tensor.to(stored) for name, tensor in load_file(path).items()}
    save_file(halved, path)
    again = load_adapter(adapter.backbone, tmp_path)
    for name, master in again.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master, halved["base_model.model." + name].float())


def test_a_fresh_adapter_changes_nothing_and_starts_as_in_peft():
    backbone = make_backbone("llama")
    adapter = Adapter(backbone, LoraConfig(r=8, target_modules="all-linear"), seed=3)
    for name, master in adapter.masters.items():
        if "lora_B" in name:
            assert not master.any()
        else:
            bound = master.shape[1] ** -0.5
            assert bound * 0.8 < master.abs().max() <= bound
    same, other = (Adapter(backbone, adapter.config, seed=seed) for seed in (3, 4))
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(adapter.masters[name], same.masters[name])
    assert not torch.equal(adapter.masters[name], other.masters[name])


def test_masters_are_float32_and_the_compute_copy_is_in_the_backbones_dtype():
    adapter = make_adapter(make_backbone("llama", "bfloat16"))
    name = "self_attn.q_proj.lora_A.weight"
    master = adapter.masters["model.layers.1." + name]
    assert master.dtype == torch.float32
    assert adapter.parameters(1)[name].dtype == torch.bfloat16
    master.add_(1.0)
    adapter.sync_compute_copy()
    assert torch.equal(adapter.parameters(1)[name], master.bfloat16())


def test_directories_are_read_and_written_on_a_bfloat16_backbone_without_rounding(tmp_path):
    adapter = make_adapter(make_backbone("llama"))
    save_adapter(adapter, tmp_path / "in")
    half = load_adapter(make_backbone("llama", "bfloat16"), tmp_path / "in")
    for name, (part, local) in half.parameter_parts.items():
        assert torch.equal(half.parameters(part)[local], adapter.masters[name].bfloat16()), (
            "what is served"
        )
    save_adapter(half, tmp_path / "out")
    before, after = (
        load_file(tmp_path / which / "adapter_model.safetensors") for which in ("in", "out")
    )
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_in_float32_the_trained_tensors_are_the_served_tensors():
    adapter = make_adapter(make_backbone("llama"))
    name = "self_attn.q_proj.lora_A.weight"
    assert adapter.parameters(1)[name] is adapter.masters["model.layers.1." + name]


# -- bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "rank r must be a whole number from 1 to 2147483647, not 0"),
        ({"r": 2.5}, "rank r must be a whole number"),
        (
            {"rank_pattern": {"q_proj": -1}},
            "rank q_proj must be a whole number from 1 to 2147483647, not -1",
        ),
        ({"alpha": 0}, "alpha must be a number above 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ({"r": 0, "rank_pattern": {"r": 4}}, "rank r must be a whole number"),
        ({"alpha": float("inf")}, r"alpha must be a number above 0 and at most 1e\+09, not inf"),
        ({"dropout": "x"}, "dropout must be at least 0"),
        ({"use_rslora": "false"}, "use_rslora must be true or false"),
        ({"rank_pattern": {1: 2}}, "rank_pattern must be a mapping"),
        ({"target_modules": 5}, "target_modules must be a string or a list of strings, not 5"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform must be whole numbers"),
        ({"target_modules": ()}, "target_modules is empty"),
        ({"target_modules": "q_(proj"}, "is no regular expression"),
        ({"rank_pattern": {"[": 2}}, "rank_pattern '\\[' is no regular expression"),
        ({"target_modules": "q_proj", "layers_to_transform": 1}, "needs target_modules as a list"),
        ({"layers_pattern": "layers"}, "layers_pattern needs layers_to_transform"),
        ({"use_dora": 1}, "use_dora must be true or false, not 1"),
        ({"use_dora": True, "lora_bias": True}, "lora_bias must be false with use_dora"),
        (
            {"init_lora_weights": "loftq"},
            "init_lora_weights must be true or one of gaussian, pissa, .* not 'loftq'",
        ),
        (
            {"init_lora_weights": "pissa", "dropout": 0.1},
            "dropout must be 0 with init_lora_weights='pissa'",
        ),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**settings)


@pytest.mark.parametrize("targets", [("q_proj", "fc9"), ("fc9",), "fc9"])
def test_a_target_that_matches_nothing_names_what_there_is(targets):
    with pytest.raises(
        AdapterError, match=r"'fc9' matches no linear layer of this llama; it has q_proj, "
    ):
        Adapter(make_backbone("llama"), LoraConfig(target_modules=targets))


def test_filters_that_leave_nothing_are_named():
    config = LoraConfig(target_modules=("q_proj",), layers_to_transform=9)
    with pytest.raises(AdapterError, match="layers_to_transform leave nothing of target_modules"):
        Adapter(make_backbone("llama"), config)


def test_an_adapter_cannot_be_written_to_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match="cannot write an adapter to"):
        save_adapter(make_adapter(make_backbone("llama")), tmp_path / "file")


@pytest.fixture
def directory(tmp_path):
    save_adapter(make_adapter(make_backbone("llama")), tmp_path)
    return tmp_path


def edit_config(directory, **fields):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(directory, family="llama"):
    with pytest.raises(AdapterError) as error:
        load_adapter(make_backbone(family), directory)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"something_new": 3}, "something_new=3"),
    ],
)
def test_settings_of_peft_that_change_the_numbers_are_refused_by_name(directory, fields, named):
    edit_config(directory, **fields)
    assert named in refused(directory)


def test_everything_peft_writes_for_a_plain_lora_is_understood(directory):
    model = get_peft_model(
        make_model("llama"), PeftLoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    model.save_pretrained(directory)
    config = load_adapter(make_backbone("llama"), directory).config
    assert isinstance(config, LoraConfig)
    assert config.r == 4


@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_an_adapter_for_another_model_says_so(directory, family):
    assert "for another model" in refused(directory, family) or "has no place for" in refused(
        directory, family
    )


def test_an_adapter_of_another_rank_names_the_tensor(directory):
    edit_config(directory, r=5)
    message = refused(directory)
    assert "lora_A.weight has shape [4, 32]" in message
    assert "needs [5, 32]" in message


def test_files_that_are_missing_or_damaged(directory, tmp_path):
    assert "no adapter_config.json" in refused(tmp_path / "nowhere")
    broken = shutil.copytree(directory, tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\x10")
    assert "damaged or cut short" in refused(broken)
    (broken / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refused(broken)
    (broken / "adapter_config.json").write_text("[]")
    assert "peft_type None is not supported; supported: BITFIT, " in refused(broken)
    (broken / "adapter_config.json").write_text("{")
    assert "not valid JSON" in refused(broken)
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    assert "lacks 'lora_alpha'" in refused(broken)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_output_layer_saved_along_is_the_one_that_is_used(tmp_path):
    """PEFT saves lm_head itself beside a LoRA on it, and loads it."""
    model = get_peft_model(make_model("llama"), PeftLoraConfig(target_modules=["lm_head"]))
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    kept = "base_model.model.lm_head.base_layer.weight"
    assert kept in tensors
    same = load_adapter(make_backbone("llama"), tmp_path)
    assert len(same.masters) == 2
    assert not same.frozen_weights
    save_file({**tensors, kept: tensors[kept] + 1}, path)
    other = load_adapter(make_backbone("llama"), tmp_path)
    assert torch.equal(other.frozen_weights["lm_head"], tensors[kept] + 1)
    save_file({**tensors, kept: tensors[kept][:, 1:].contiguous()}, path)
    assert "it was made for another one" in refused(tmp_path)


def test_a_tensor_too_many_or_too_few_is_named(directory):
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    gone = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path)
    assert f"lacks {gone}" in refused(directory)
    save_file({**tensors, "base_model.model.extra": torch.zeros(2)}, path)
    assert "holds base_model.model.extra" in refused(directory)
