"""Writes a small model's checkpoint with each quantiser that runs on a CPU, and what the tool
itself makes of it.

    GPTQMODEL_CPU_WORKERS=2 TORCHDYNAMO_DISABLE=1 python quantisers.py DIRECTORY [NAME ...]

Below DIRECTORY: a folder for each, with the checkpoint as the tool saves it and
`expected.safetensors`: the tokens, and the logits in float32 of the model with the weights that the
tool makes of its own files. The last line is JSON: by name the tool's version, or why there is
nothing.
"""

import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TOKENS = torch.randint(0, SHAPE["vocab_size"], (1, 24), generator=torch.Generator().manual_seed(1))
MADE: dict[str, tuple[str, Callable[[str, str], Any]]] = {}


def quantiser(name: str, package: str):
    """Of a function from the model's directory and one to write to, to the model with the tool's
    own weights."""

    def add(function):
        MADE[name] = (package, function)
        return function

    return add


def make_model(directory: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # rows of unlike sizes, so that scales matter
            parameter.data.mul_(2.5 * torch.rand(parameter.shape[0], 1).add(0.2))
    model.save_pretrained(directory)
    words = {f"w{number}": number for number in range(SHAPE["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w1"
    ).save_pretrained(directory)


# -- bitsandbytes ----------------------------------------------------------------------


def bits_and_bytes(**settings: Any) -> Callable[[str, str], Any]:
    def write(source: str, out: str) -> Any:
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        model.save_pretrained(out)
        again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, device_map="cpu")
        return again.dequantize()

    return write


quantiser("bitsandbytes-int8", "bitsandbytes")(bits_and_bytes(load_in_8bit=True))
quantiser("bitsandbytes-nf4", "bitsandbytes")(
    bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")
)
quantiser("bitsandbytes-nf4-nested", "bitsandbytes")(
    bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
)
quantiser("bitsandbytes-fp4", "bitsandbytes")(
    bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="fp4")
)


# -- llm-compressor --------------------------------------------------------------------


def compressor(
    scheme: str, modifier: str = "QuantizationModifier", **settings: Any
) -> Callable[[str, str], Any]:
    def write(source: str, out: str) -> Any:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers import quantization
        from transformers import CompressedTensorsConfig

        made = getattr(quantization, modifier)(
            targets="Linear", scheme=scheme, ignore=["lm_head"], **settings
        )
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        data = {}
        if scheme == "FP8" or modifier != "QuantizationModifier":
            rows = torch.randint(
                0, SHAPE["vocab_size"], (32, 64), generator=torch.Generator().manual_seed(2)
            )
            data = {
                "dataset": Dataset.from_dict(
                    {"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}
                ),
                "num_calibration_samples": 32,
                "max_seq_length": 64,
            }
        oneshot(model=model, recipe=made, **data)
        model.save_pretrained(out, save_compressed=True)
        found = AutoModelForCausalLM.from_pretrained(
            out,
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(run_compressed=False),
        )
        # It still quantises activations where the scheme says so; the weights alone are wanted.
        plain, weights = LlamaForCausalLM(LlamaConfig(**SHAPE)), found.state_dict()
        plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
        return plain

    return write


for scheme in ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"):
    quantiser(f"llmcompressor-{scheme}", "llmcompressor")(compressor(scheme))
quantiser("llmcompressor-GPTQ-W4A16", "llmcompressor")(compressor("W4A16", "GPTQModifier"))


# -- auto-round ------------------------------------------------------------------------


def auto_round(format: str, **settings: Any) -> Callable[[str, str], Any]:
    def write(source: str, out: str) -> Any:
        from auto_round import AutoRound

        def rounded() -> Any:  # by rounding alone, which is the same each time
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(source)
            return AutoRound(
                model, tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu", **settings
            )

        rounded().quantize_and_save(out, format=format)
        (made,) = Path(out).iterdir()  # a folder named after the scheme
        for path in made.iterdir():
            path.rename(Path(out) / path.name)
        made.rmdir()
        # What reads these files on a CPU computes in float16, or wants kernels: the weights that
        # the tool has found, which are of bfloat16.
        return rounded().quantize()[0].float()

    return write


quantiser("auto-round-gptq-4", "auto-round")(
    auto_round("auto_gptq", bits=4, group_size=64, sym=True)
)
quantiser("auto-round-gptq-8", "auto-round")(
    auto_round("auto_gptq", bits=8, group_size=64, sym=True)
)
quantiser("auto-round-gptq-asym", "auto-round")(
    auto_round("auto_gptq", bits=4, group_size=64, sym=False)
)
quantiser("auto-round-awq", "auto-round")(auto_round("auto_awq", bits=4, group_size=64, sym=False))


# -- AutoAWQ ---------------------------------------------------------------------------


@quantiser("autoawq", "autoawq")
def auto_awq(source: str, out: str) -> Any:
    """By its layer and its own reading of it: the rest of the tool imports what transformers no
    longer has."""
    at = Path(str(importlib.metadata.distribution("autoawq").locate_file("")))
    for name in ("awq", "awq.modules", "awq.modules.linear"):  # without what their __init__ imports
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(at.joinpath(*name.split(".")))]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    each, found = 64, {}

    def pack(name: str, linear: torch.nn.Linear) -> dict[str, torch.Tensor]:
        groups = linear.weight.data.unflatten(
            1, (-1, each)
        )  # as its pseudo_quantize_tensor, with zeros
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low).clamp(min=1e-5) / 15).half().float()
        zeros = (-(low / scales).round()).clamp(0, 15)
        linear.weight.data = (
            ((groups / scales[..., None]).round() + zeros[..., None])
            .clamp(0, 15)
            .sub(zeros[..., None])
            * scales[..., None]
        ).flatten(1)
        made = WQLinear_GEMM.from_linear(
            linear, 4, each, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        found[name] = dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, each).T
        return made.state_dict()

    fields = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": each,
        "zero_point": True,
        "version": "gemm",
    }
    write_layers(source, out, fields, pack)
    return dequantised(source, found.get)


# -- transformers' own: fine-grained fp8, and gpt-oss's MXFP4 ----------------------------


def fine_grained(**settings: Any) -> Callable[[str, str], Any]:
    def write(source: str, out: str) -> Any:
        """It quantises models on a GPU alone; what it does to each weight, and its reading of
        files, run anywhere."""
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Quantize
        from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

        config = FineGrainedFP8Config(**settings)
        operation = Fp8Quantize(FineGrainedFP8HfQuantizer(config))
        write_layers(
            source,
            out,
            config.to_dict(),
            lambda name, linear: operation.convert({"weight": linear.weight.data}),
        )
        return AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32
        )  # dequantises, as there is no GPU

    return write


quantiser("transformers-fp8", "transformers")(fine_grained(weight_block_size=(128, 128)))
quantiser("transformers-fp8-ue8m0", "transformers")(
    fine_grained(weight_block_size=(128, 128), scale_fmt="ue8m0")
)


@quantiser("torchao-mxfp4", "torchao")
def mxfp4(source: str, out: str) -> Any:
    """gpt-oss, its experts packed by torchao and read by transformers, which needs a GPU or kernels
    to write them."""
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        **(
            SHAPE
            | {
                "intermediate_size": 128,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "head_dim": 64,
            }
        ),
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    )
    model = GptOssForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 3:
            parameter.data.normal_(std=0.05).mul_(
                torch.rand(parameter.shape[0], 1, parameter.shape[2]).add(0.2)
            )
    model.save_pretrained(out)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(Path(out) / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = weight
            continue
        scales, values = to_mx(
            weight.mT.contiguous(), torch.float4_e2m1fn_x2, 32
        )  # [experts, out, in / 32 or 2]
        tensors[f"{name}_blocks"] = values.view(torch.uint8).unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = (
            scales.view(torch.uint8).reshape(tensors[f"{name}_blocks"].shape[:-1]).contiguous()
        )
    save_file(tensors, Path(out) / "model.safetensors", {"format": "pt"})
    configure(
        out,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
    )
    # It leaves experts in bfloat16, which holds them exactly; to multiply with them in that would
    # round.
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).float()


@quantiser("torchao", "torchao")
def torch_ao(source: str, out: str) -> Any:
    """What coserve refuses, by name."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model = AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
        dtype=torch.float32,
        device_map="cpu",
    )
    model.save_pretrained(out)
    return model


# -- GPTQModel, last: what it imports puts experts of its own into transformers ----------


def gptq_model(**settings: Any) -> Callable[[str, str], Any]:
    def write(source: str, out: str) -> Any:
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

        config = QuantizeConfig(
            bits=4, group_size=64, offload_to_disk=False, device="cpu", **settings
        )
        model = GPTQModel.load(source, config)
        rows = torch.randint(
            0, SHAPE["vocab_size"], (32, 64), generator=torch.Generator().manual_seed(2)
        )
        model.quantize(
            [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows.tolist()],
            batch_size=4,
        )
        model.save(out)
        # Its default here, bfloat16, rounds the scales of the files, which are float16; the rest
        # comes from the files.
        found = GPTQModel.load(out, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
        layers = dict(
            found.float().named_modules()
        )  # or it would round the weights to the type of its scales
        model = dequantised(source, lambda name: layers[name].dequantize_weight().T)
        left = {
            name: tensor
            for path in Path(out).glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        model.load_state_dict(left, strict=False)
        return model

    return write


quantiser("gptqmodel", "gptqmodel")(gptq_model(desc_act=False))
quantiser("gptqmodel-desc_act", "gptqmodel")(gptq_model(desc_act=True))
quantiser("gptqmodel-v2-asym", "gptqmodel")(gptq_model(desc_act=False, sym=False, format="gptq_v2"))


# -- files, where a tool's packing alone is taken ----------------------------------------


def configure(out: str, fields: dict[str, Any]) -> None:
    """Say in a checkpoint's configuration how it is quantised."""
    path = Path(out) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": fields}))


def write_layers(
    source: str, out: str, fields: dict[str, Any], pack: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """Save the model with the linear layers of its blocks packed. pack: of a name and a layer, to
    tensors."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(out)
    tensors = load_file(Path(out) / "model.safetensors")
    for name, layer in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(layer, torch.nn.Linear):
            del tensors[f"{name}.weight"]
            tensors |= {
                f"{name}.{part}": tensor.contiguous() for part, tensor in pack(name, layer).items()
            }
    save_file(tensors, Path(out) / "model.safetensors", {"format": "pt"})
    configure(out, fields)


def dequantised(source: str, weight: Callable[[str], torch.Tensor | None]) -> Any:
    """The model with the weights that a tool makes. weight: of a layer's name; None: it is left as
    it was."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, layer in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(layer, torch.nn.Linear):
            found = weight(name)
            assert found is not None, f"{name} was not quantised"
            layer.weight.data = found.detach().float().contiguous()
    return model


def main(directory: Path, names: list[str]) -> None:
    make_model(str(directory / "model"))
    found: dict[str, Any] = {}
    for name in names or MADE:
        package, write = MADE[name]
        out = directory / name
        try:
            model = write(str(directory / "model"), str(out)).eval()
            with torch.no_grad():
                logits = model(TOKENS).logits[0].float()
            save_file(
                {"tokens": TOKENS[0], "logits": logits.contiguous()}, out / "expected.safetensors"
            )
            found[name] = {"version": importlib.metadata.version(package)}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
