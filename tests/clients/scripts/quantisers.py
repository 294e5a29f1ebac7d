"""Writes a small model's checkpoint with each quantiser that runs on a CPU, and what the tool itself makes of it.

    python quantisers.py DIRECTORY [NAME ...]

Below DIRECTORY: a folder for each, with the checkpoint as the tool saves it and `expected.safetensors`: the tokens, and
the logits in float32 of the model with the weights that the tool makes of its own files. The last line is JSON: by name
the tool's version, or why there is nothing.
"""

import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    """Of a function from the model's directory and one to write to, to the model with the tool's own weights."""

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
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1").save_pretrained(directory)


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
quantiser("bitsandbytes-nf4", "bitsandbytes")(bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
quantiser("bitsandbytes-nf4-nested", "bitsandbytes")(
    bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
)
quantiser("bitsandbytes-fp4", "bitsandbytes")(bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"))


# -- llm-compressor --------------------------------------------------------------------


def compressor(scheme: str, modifier: str = "QuantizationModifier", **settings: Any) -> Callable[[str, str], Any]:
    def write(source: str, out: str) -> Any:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers import quantization
        from transformers import CompressedTensorsConfig

        made = getattr(quantization, modifier)(targets="Linear", scheme=scheme, ignore=["lm_head"], **settings)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        data = {}
        if scheme == "FP8" or modifier != "QuantizationModifier":
            rows = torch.randint(0, SHAPE["vocab_size"], (32, 64), generator=torch.Generator().manual_seed(2))
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
            out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
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
            return AutoRound(model, tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu", **settings)

        rounded().quantize_and_save(out, format=format)
        (made,) = Path(out).iterdir()  # a folder named after the scheme
        for path in made.iterdir():
            path.rename(Path(out) / path.name)
        made.rmdir()
        # What reads these files on a CPU computes in float16, or wants kernels: the weights that the tool has found,
        # which are of bfloat16.
        return rounded().quantize()[0].float()

    return write


quantiser("auto-round-gptq-4", "auto-round")(auto_round("auto_gptq", bits=4, group_size=64, sym=True))
quantiser("auto-round-gptq-8", "auto-round")(auto_round("auto_gptq", bits=8, group_size=64, sym=True))
quantiser("auto-round-gptq-asym", "auto-round")(auto_round("auto_gptq", bits=4, group_size=64, sym=False))
quantiser("auto-round-awq", "auto-round")(auto_round("auto_awq", bits=4, group_size=64, sym=False))


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
            save_file({"tokens": TOKENS[0], "logits": logits.contiguous()}, out / "expected.safetensors")
            found[name] = {"version": importlib.metadata.version(package)}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
