"""Quantised checkpoints: made here in the formats of their tools, number by number, and read into
weights that a plain dequantisation, transformers and the tools' own words agree with."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from engines import greedy
from rank_loading import assert_ranks_hold_pieces
from safetensors.torch import load_file, save_file
from support import make_model, model_directory

from coserve.adapters.methods.full import FullConfig
from coserve.engine.engine import Engine
from coserve.errors import AdapterError, ModelError, UnsupportedModelError, WeightsError
from coserve.models import load_backbone
from coserve.models.files import check_config
from coserve.models.quantised import quantisation_methods, quantisation_of
from coserve.models.source import find_model
from coserve.models.weights import weight_tensors

GROUP = 16
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}


def packed(values, bits):
    """Whole numbers [n, m] to int32 words [n, m * bits / 32], the lowest bits first, one by one."""
    each = 32 // bits
    words = []
    for row in values.tolist():
        parts = [row[start : start + each] for start in range(0, len(row), each)]
        words.append(
            [sum(value << (bits * place) for place, value in enumerate(part)) for part in parts]
        )
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)  # the highest bit is the sign


def grouped(weight, bits, *, asymmetric=True, groups=None):
    """Whole numbers, zeros and scales of a weight [out, in] by groups of inputs; [out, in], [out,
    groups] twice.

    groups: of each input, in place of runs of GROUP.
    """
    groups = torch.arange(weight.shape[1]) // GROUP if groups is None else groups
    number = int(groups.max()) + 1
    low, high = (
        torch.stack([find(weight[:, groups == g], 1).values for g in range(number)], 1)
        for find in (torch.min, torch.max)
    )
    most = 2**bits - 1
    if asymmetric:
        scales = (high - low).clamp(min=1e-5) / most
        zeros = (
            (-low / scales).round().clamp(1, most)
        )  # a zero of none cannot be stored in GPTQ's first format
    else:
        scales = torch.maximum(high, -low).clamp(min=1e-5) / (most // 2)
        zeros = torch.full_like(scales, (most + 1) // 2)
    scales = scales.half().float()
    values = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return values.int(), zeros.int(), scales, (values - zeros[:, groups]) * scales[:, groups]


def awq(weight):
    values, zeros, scales, exact = grouped(weight, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(numbers):  # [n, out], a word's numbers out of order
        return packed(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    return {"qweight": words(values.T), "qzeros": words(zeros.T), "scales": scales.T.half()}, exact


def gptq(weight, *, bits=4, v2=False, reordered=False):
    columns = torch.arange(weight.shape[1])
    groups = columns.flip(0) // GROUP if reordered else columns // GROUP
    values, zeros, scales, exact = grouped(weight, bits, groups=groups)
    tensors = {
        "qweight": packed(values, bits).T,
        "qzeros": packed(zeros.T - int(not v2), bits),
        "scales": scales.T.half(),
        "g_idx": groups.int(),
    }
    return tensors, exact


def eight_bits(weight):
    scales = weight.abs().amax(1)
    values = (weight * (127 / scales)[:, None]).round().to(torch.int8)
    tensors = {"weight": values, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * scales[:, None] / 127


def four_bits(weight, *, nested):
    table = torch.tensor([*(-1.0 + place / 8 for place in range(15)), 1.0])
    flat, block = weight.flatten(), 32
    scales = flat.view(-1, block).abs().amax(1)
    state = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    tensors = {"weight.absmax": scales, "weight.quant_map": table}
    if nested:
        offset, size, codes = float(scales.mean()), 16, torch.linspace(-1, 1, 256)
        rest = scales - offset
        largest = torch.stack([part.abs().max() for part in rest.split(size)])
        wide = largest.repeat_interleave(size)[: rest.numel()]
        indices = (rest / wide)[:, None].sub(codes).abs().argmin(1).to(torch.uint8)
        tensors |= {
            "weight.absmax": indices,
            "weight.nested_absmax": largest,
            "weight.nested_quant_map": codes,
        }
        state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
        scales = codes[indices.long()] * wide + offset
    wide = scales.repeat_interleave(block)
    indices = (flat / wide)[:, None].sub(table).abs().argmin(1)
    tensors["weight"] = (indices[::2] * 16 + indices[1::2]).to(torch.uint8)[:, None]
    words = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = words
    return tensors, (table[indices] * wide).view(weight.shape)


def blocks(scales, size, shape):
    return scales.repeat_interleave(size, 0)[: shape[0]].repeat_interleave(size, 1)[:, : shape[1]]


def float8(weight, *, size=24):
    """Blocks that do not divide the matrices."""
    rows = [part.split(size, 1) for part in weight.split(size)]
    scales = torch.tensor([[float(part.abs().max()) / 448 for part in row] for row in rows])
    values = (weight / blocks(scales, size, weight.shape)).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scales}, values.float() * blocks(
        scales, size, weight.shape
    )


def compressed(weight, *, kind="int", bits=4, strategy="group", asymmetric=False, reordered=False):
    if kind == "float":
        scales = (
            weight.abs().amax(1, keepdim=True) / 448
            if strategy == "channel"
            else weight.abs().max().view(1) / 448
        )
        values = (weight / scales).to(torch.float8_e4m3fn)
        return {
            "weight": values,
            "weight_scale": scales,
            "input_scale": torch.ones(1),
        }, values.float() * scales
    if strategy == "channel":
        scales = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / scales).round().to(torch.int8)
        return {"weight": values, "weight_scale": scales}, values.float() * scales
    columns = torch.arange(weight.shape[1])
    groups = columns.flip(0) // GROUP if reordered else columns // GROUP
    values, zeros, scales, exact = grouped(weight, bits, asymmetric=asymmetric, groups=groups)
    tensors = {
        "weight_packed": packed(values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if asymmetric:
        tensors["weight_zero_point"] = packed(zeros.T, bits).T.contiguous()
    if reordered:
        tensors["weight_g_idx"] = groups.int()
    return tensors, exact


def ct(layout, kind, bits, **named):
    weights = {"type": kind, "num_bits": bits, "symmetric": True, **named}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT4 = {"strategy": "group", "group_size": GROUP}
FORMATS = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, lambda weight: gptq(weight, bits=8)),
    "gptq, 2 bits": (GPTQ | {"bits": 2}, lambda weight: gptq(weight, bits=2)),
    "gptq v2, reordered": (
        GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True},
        lambda weight: gptq(weight, v2=True, reordered=True),
    ),
    "bitsandbytes, 8 bits": (EIGHT, eight_bits),
    "bitsandbytes, 4 bits": (FOUR, lambda weight: four_bits(weight, nested=False)),
    "bitsandbytes, 4 bits, twice": (FOUR, lambda weight: four_bits(weight, nested=True)),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [24, 24]}, float8),
    "int4": (ct("pack-quantized", "int", 4, **INT4), compressed),
    "int4, zeros": (
        ct("pack-quantized", "int", 4, **INT4),
        lambda weight: compressed(weight, asymmetric=True),
    ),
    "int4, reordered": (
        ct("pack-quantized", "int", 4, **INT4, actorder="group"),
        lambda weight: compressed(weight, reordered=True),
    ),
    "int8": (
        ct("int-quantized", "int", 8, strategy="channel"),
        lambda weight: compressed(weight, bits=8, strategy="channel"),
    ),
    "float8, rows": (
        ct("float-quantized", "float", 8, strategy="channel"),
        lambda weight: compressed(weight, kind="float", bits=8, strategy="channel"),
    ),
    "float8, one scale": (
        ct("float-quantized", "float", 8, strategy="tensor"),
        lambda weight: compressed(weight, kind="float", bits=8, strategy="tensor"),
    ),
}


def save(directory: Path, name: str, family: str = "llama", *, shards=1) -> dict[str, torch.Tensor]:
    """A model whose blocks' linear layers are quantised; its weights as they should be read."""
    fields, quantise = FORMATS[name]
    source = model_directory(family)
    directory.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    stored, exact = {}, {}
    for key, weight in load_file(source / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            stored[key] = exact[key] = weight
            continue
        tensors, exact[key] = quantise(weight)
        module = key.removesuffix("weight")
        stored |= {module + part: tensor.contiguous() for part, tensor in tensors.items()}
    if shards == 1:
        save_file(stored, directory / "model.safetensors")
        return exact
    places = {
        key: f"model-{place % shards}.safetensors" for place, key in enumerate(sorted(stored))
    }
    for file in set(places.values()):
        save_file({key: stored[key] for key in stored if places[key] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return exact


def as_dense(weight):
    return weight if isinstance(weight, torch.Tensor) else weight.dense()


def logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def last_logprobs(directory, tokens, weights="dense"):
    """Of the likeliest tokens after a prompt, as the engine serves them."""
    engine = Engine.load(str(directory), dtype="float32", weights=weights, with_text=False)
    (answer,) = engine.generate([tokens], greedy(1, logprobs=20))
    return dict(answer.logprobs[0].top)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_a_plain_dequantisation(name, tmp_path, caplog):
    exact = save(tmp_path, name)
    with caplog.at_level(logging.INFO):
        backbone = load_backbone(str(tmp_path), dtype="float32")
    read = {
        backbone.architecture.prefix(part) + local: weight
        for part, weights in backbone.weights.items()
        for local, weight in weights.items()
    }
    for key, weight in exact.items():
        torch.testing.assert_close(as_dense(read[key]), weight, rtol=1e-6, atol=1e-7)
    assert "are held as float32: off by 0.00% of their root mean square" in caplog.text
    assert quantisation_of(FORMATS[name][0]).words in caplog.text


@pytest.mark.parametrize("name", FORMATS)
def test_they_are_held_as_int8_and_the_error_is_said(name, tmp_path, caplog):
    save(tmp_path, name)
    with caplog.at_level(logging.INFO):
        backbone = load_backbone(str(tmp_path), dtype="float32", weights="int8")
    dense = load_backbone(str(tmp_path), dtype="float32")
    wrong = whole = 0.0
    for part, weights in backbone.weights.items():
        for local, weight in weights.items():
            if local.endswith("_proj.weight"):
                assert weight_tensors({local: weight})[0].dtype == torch.int8
                exact = as_dense(dense.weights[part][local])
                wrong += float((as_dense(weight) - exact).square().sum())
                whole += float(exact.square().sum())
    share = (wrong / whole) ** 0.5
    assert (
        f"are held as int8: off by {share:.2%} of their root mean square, at most by "
        in caplog.text
    )
    assert share < (0.012 if name not in ("bitsandbytes, 8 bits", "int8") else 1e-6), (
        "as the nearest int8 is"
    )


@pytest.mark.parametrize("held", ["dense", "int8"])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_hold_pieces_of_what_one_rank_makes(name, held, tmp_path, caplog):
    save(tmp_path, name, shards=3)
    with caplog.at_level(logging.INFO):
        assert_ranks_hold_pieces(str(tmp_path), 2, held)
    assert caplog.text.count("are held as") == 2, "the whole model's, and rank 0's"


def test_answers_are_transformers_of_the_dequantised_model(tmp_path):
    exact = save(tmp_path, "awq", shards=3)
    model = make_model("llama")
    own = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(exact, strict=False)
        tokens = [5, 9, 60, 31, 2, 77]
        expected = torch.log_softmax(logits(model, tokens)[-1], -1)
    finally:
        model.load_state_dict(own)
    found = last_logprobs(tmp_path, tokens)
    assert found
    for token, logprob in found.items():
        assert logprob == pytest.approx(float(expected[token]), abs=1e-4)
    assert last_logprobs(tmp_path, tokens, "int8") != found


def test_experts_in_mxfp4_are_those_that_transformers_reads(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = model_directory("gpt-oss")
    tensors, exact = load_file(source / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    width = 64  # of an expert: groups are of 32
    for key in [
        key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, columns, rows = tensors.pop(key).shape
        if key.endswith("down_proj"):
            columns = width
        else:
            rows = 2 * width
            tensors[f"{key}_bias"] = torch.zeros(experts, rows)
        tensors[f"{key}_blocks"] = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{key}_scales"] = torch.randint(
            118, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator
        )
        exact[key] = convert_moe_packed_tensors(
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"], dtype=torch.float32
        )
    config = json.loads((source / "config.json").read_text())
    fields = {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": width}
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    save_file(tensors, tmp_path / "model.safetensors")
    backbone = load_backbone(str(tmp_path), dtype="float32")
    for key, weight in exact.items():
        layer = int(key.split(".")[2])
        held = backbone.weights[layer][key.partition(f"layers.{layer}.")[2] + ".weight"]
        assert torch.equal(as_dense(held), weight.mT)
    assert_ranks_hold_pieces(str(tmp_path), 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "hqq"}, "weights quantised by hqq are not read; known are awq, "),
        ({"bits": 4}, "quantization_config has no quant_method"),
        (AWQ | {"version": "gemv"}, "version='gemv' are not read; version must be gemm"),
        (GPTQ | {"bits": 3}, "bits=3 are not read; bits must be 2 or 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' are not read"),
        ({"quant_method": "bitsandbytes"}, "must have load_in_8bit or load_in_4bit"),
        (ct("nvfp4-pack-quantized", "float", 4), "format='nvfp4-pack-quantized' are not read"),
        (ct("pack-quantized", "int", 3), "num_bits=3 are not read"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' are not read"),
    ],
)
def test_what_is_not_read_is_refused_by_name(fields, message, tmp_path):
    source = json.loads((model_directory("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(source | {"quantization_config": fields}))
    with pytest.raises(UnsupportedModelError) as error:
        check_config(tmp_path / "config.json")
    assert message in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_every_method_has_its_row_in_the_docs():
    text = (Path(__file__).parents[2] / "docs/families.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|", text.partition("## Quantised checkpoints")[2], re.M)
    assert rows[1:] == list(quantisation_methods())


def test_tensors_that_do_not_make_a_weight_are_named(tmp_path):
    save(tmp_path, "gptq")
    path, key = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = load_file(path)
    scales = tensors.pop(f"{key}.scales")
    save_file(tensors, path)
    with pytest.raises(
        WeightsError, match=rf"{key}\.weight lacks \.scales, which GPTQ, 4 bits needs"
    ):
        load_backbone(str(tmp_path))
    save_file(tensors | {f"{key}.scales": scales[:, :5].contiguous()}, path)
    with pytest.raises(WeightsError, match=rf"the tensors of {key}\.weight do not fit together"):
        load_backbone(str(tmp_path))
    save_file(
        tensors
        | {f"{key}.scales": scales, f"{key}.qweight": tensors[f"{key}.qweight"][:2].contiguous()},
        path,
    )
    with pytest.raises(
        WeightsError, match=rf"{key}\.weight has shape \[\d+, 16\], the model needs"
    ):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("size", [10**12, 0, -1, 1, "32", 2.5, None])
def test_blocks_that_do_not_fit_take_no_memory(tmp_path, size, nested):
    save(tmp_path, "bitsandbytes, 4 bits, twice")
    path, key = (
        tmp_path / "model.safetensors",
        "model.layers.1.mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
    )
    tensors = load_file(path)
    state = json.loads(bytes(tensors[key].tolist()))
    state["nested_blocksize" if nested else "blocksize"] = size
    tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"blocks of (nested_)?blocksize"):
        load_backbone(str(tmp_path))
    save_file(tensors | {key: tensors[key][:5].clone()}, path)
    with pytest.raises(WeightsError, match="a quant_state that cannot be read"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("block", [[10**12, 10**12], [0, 0], [-1, 4]])
def test_blocks_of_float8_that_do_not_fit_take_no_memory(tmp_path, block):
    save(tmp_path, "fp8")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = block
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="do not fit together"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("block", ["x", [], [1], 7, [None, 1], [1e400, 1]])
def test_settings_of_float8_that_mean_nothing_are_refused(tmp_path, block):
    save(tmp_path, "fp8")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = block
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantization_config cannot be used"):
        check_config(tmp_path / "config.json")


def test_a_float8_weight_without_its_scale_is_no_float(tmp_path):
    save(tmp_path, "fp8")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"up_proj\.weight is F8_E4M3; weights must be float32"):
        load_backbone(str(tmp_path))


def test_what_needs_files_of_floats_says_so(tmp_path):
    from coserve.models.mapped_weights import MappedWeights
    from coserve.models.saving import save_model

    save(tmp_path / "model", "awq")
    backbone = load_backbone(str(tmp_path / "model"), dtype="float32")
    with pytest.raises(
        AdapterError, match=r"this model is quantised \(AWQ, 4 bits\): serve the model that it was"
    ):
        FullConfig().sites(backbone.architecture)
    with pytest.raises(
        ModelError, match=r"is quantised \(AWQ, 4 bits\), and changed weights have no place"
    ):
        save_model(backbone.architecture, find_model(str(tmp_path / "model")), tmp_path / "out", {})
    with pytest.raises(UnsupportedModelError, match="are quantised; serve it to train on it"):
        MappedWeights(backbone.architecture, tmp_path / "model")
