"""Small builders that the tests share: random models of every family, as transformers has them and
as coserve loads them."""

import copy
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from family_configs import MORE_CONFIGS
from family_configs import VOCAB as VOCAB
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from coserve.adapters import Adapter, LoraConfig, load_adapter
from coserve.kernels.cpu.products import CpuProducts
from coserve.kernels.plain import PlainBackend
from coserve.models import Backbone, load_backbone
from coserve.models.vision_language import VisionLanguage

transformers_logging.disable_progress_bar()

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "dropout": 0.0,
}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHAPE},
    "llama-biases-tied": {
        "model_type": "llama",
        **_SHAPE,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
    },
    "llama-3.1-rope": {
        "model_type": "llama",
        **_SHAPE,
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    },
    "llama-linear-rope": {"model_type": "llama", **_SHAPE, **_rope("linear", factor=2.0)},
    "llama-yarn-rope": {
        "model_type": "llama",
        **_SHAPE,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=32),
    },
    "llama-partial-rope": {
        "model_type": "llama",
        **_SHAPE,
        "partial_rotary_factor": 0.5,
    },  # which is not read for it
    "mistral": {"model_type": "mistral", **_SHAPE, "sliding_window": None},
    "mistral-sliding": {"model_type": "mistral", **_SHAPE, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", **_SHAPE},
    "qwen2-sliding": {
        "model_type": "qwen2",
        **_SHAPE,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_SHAPE, "head_dim": 16},
    "opt": _OPT,
    "opt-350m-style": {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "opt-gelu-no-bias": {**_OPT, "activation_function": "gelu", "enable_bias": False},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")


def random_weights_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough that every part of the model matters, and norms and biases that are not
    trivial."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data.copy_(noise / math.sqrt(parameter.shape[1]))
        else:
            parameter.data.add_(noise * 0.2)
    return model


def auto_class(config: dict[str, Any]) -> Any:
    """transformers' for a model of this configuration, which may see pictures, too."""
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


@cache
def _model(name: str, dtype: torch.dtype) -> nn.Module:
    config = (CONFIGS | MORE_CONFIGS)[name]
    # Falcon's own adds ALiBi twice.
    attention = "sdpa" if config.get("alibi") else "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some parameters are drawn, and only changed below
        model = auto_class(config).from_config(
            AutoConfig.for_model(**config), attn_implementation=attention
        )
    random_weights_(model)
    model.tie_weights()
    made: nn.Module = model.to(dtype).eval()
    return made


def make_model(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model with random weights, a fresh copy each time."""
    return copy.deepcopy(_model(name, dtype))


@cache
def model_directory(name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """Where `make_model(name, dtype)` is saved."""
    directory = Path(mkdtemp(prefix=f"coserve-{name}-"))
    model: Any = _model(name, dtype)
    model.save_pretrained(directory)
    return directory


@cache
def make_backbone(
    name: str = "llama", dtype: str = "float32", kernels: str | None = None
) -> Backbone:
    """The same model, loaded by coserve from its directory."""
    return load_backbone(str(model_directory(name)), dtype=dtype, kernels=kernels)


def targets_of(name: str) -> Any:
    """All linear layers. Of a mixture, PEFT's all-linear would add experts and routers, and of
    most, PEFT takes the name of an MLP's projection for that of all experts' projections.
    """
    architecture = make_backbone(name).architecture
    if isinstance(architecture, VisionLanguage):
        return r".*language_model.*proj[a-z_]*"  # and nothing of what sees
    if not architecture.expert_sites:
        return "all-linear"
    modules = [
        module.partition(".mlp.") for module in architecture.linear_sites if module != "lm_head"
    ]
    own = {mlp or before.rpartition(".")[2] for before, _, mlp in modules}
    is_taken = name != "qwen3.5-moe"
    return sorted(
        each
        for each in own
        if not is_taken or not each.endswith(("gate_proj", "up_proj", "down_proj"))
    )


def peft_twin(name: str = "llama", *, seed: int = 0, **lora: Any) -> tuple[PeftModel, Adapter]:
    """A PEFT model with a random LoRA (B is not zero), and the same adapter in coserve, by way of
    PEFT's directory.

    Shared between tests, which must not change it; `fresh_peft_twin` gives one to change.
    """
    return _shared_twin(name, seed, json.dumps(lora))


@cache
def _shared_twin(name: str, seed: int, lora: str) -> tuple[PeftModel, Adapter]:
    return fresh_peft_twin(name, seed=seed, **json.loads(lora))


def fresh_peft_twin(
    name: str = "llama", *, seed: int = 0, **lora: Any
) -> tuple[PeftModel, Adapter]:
    """See `peft_twin`."""
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        **lora,
    }
    model = get_peft_model(make_model(name), PeftLoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    directory = mkdtemp(prefix="coserve-adapter-")
    model.save_pretrained(directory)
    return model, load_adapter(make_backbone(name), directory)


def make_adapter(backbone: Backbone, *, seed: int = 0, **lora: Any) -> Adapter:
    """A LoRA of coserve's own with random A and B."""
    adapter = Adapter(
        backbone, LoraConfig(**{"r": 4, "alpha": 8, "target_modules": "all-linear", **lora})
    )
    generator = torch.Generator().manual_seed(seed)
    for master in adapter.masters.values():
        master.copy_(torch.randn(master.shape, generator=generator) * 0.15)
    adapter.sync_compute_copy()
    return adapter


def record_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor]]:
    """The number of rows and the weight of each product x W^T on a CPU, from now on."""
    found: list[tuple[int, Tensor]] = []

    def recorded(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(self: object, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            found.append((len(x), weight))
            return product(self, x, weight, bias)

        return record

    for owner in (CpuProducts, PlainBackend):
        monkeypatch.setattr(owner, "product", recorded(owner.product))
    return found


def random_tokens(length: int, seed: int) -> Tensor:
    """int64 [length]."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def random_sequences(lengths: tuple[int, ...], seed: int = 0) -> list[tuple[list[int], list[bool]]]:
    """Training sequences with some tokens that are not trained on."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            random_tokens(n, seed + 100 * i + n).tolist(),
            (torch.rand(n, generator=generator) < 0.7).tolist(),
        )
        for i, n in enumerate(lengths)
    ]


def summed_loss(model: nn.Module, sequences: list[tuple[list[int], list[bool]]]) -> Tensor:
    """What a pack of these sequences must cost: each sequence alone through transformers, trained
    tokens summed."""
    loss = torch.zeros(())
    for ids, trained in sequences:
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
        each = nn.functional.cross_entropy(
            logits, torch.tensor(ids[1:], dtype=torch.int64), reduction="none"
        )
        loss = loss + each[torch.tensor(trained[1:], dtype=torch.bool)].sum()
    return loss


def peft_gradients(
    model: nn.Module, sequences: list[tuple[list[int], list[bool]]]
) -> dict[str, Tensor]:
    """Autograd's gradients of the summed loss, under coserve's parameter names."""
    model.zero_grad()
    torch.autograd.backward(summed_loss(model, sequences))
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


class _Wide(TorchFunctionMode):
    """What a model computes in float32, whatever its dtype, it computes in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        more = {
            key: torch.float64 if value is torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return func(*wide, **more)


def wide_gradients(
    model: nn.Module, sequences: list[tuple[list[int], list[bool]]]
) -> dict[str, Tensor]:
    """`peft_gradients` in float64, also of models that compute some things in float32 in any
    dtype."""
    twin: Any = copy.deepcopy(model).double()
    twin.set_experts_implementation("eager")  # grouped products take no float64
    with _Wide():
        return peft_gradients(twin, sequences)


def exact_gradients(name: str, sequences: list[tuple[list[int], list[bool]]]) -> dict[str, Tensor]:
    """`peft_gradients` of `peft_twin(name)` in float64: where a gradient is small because large
    ones cancel, PEFT's own float32 is as far from the truth as ours, on whichever side.
    """
    return peft_gradients(_double_twin(name), sequences)


@cache
def _double_twin(name: str) -> nn.Module:
    model: nn.Module = fresh_peft_twin(name)[0].double()
    return model


def worst_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative error of any parameter; both must have the same parameters.

    One that ought to be zero (query gradients, where every row sees one key) is measured against
    the largest.
    """
    assert ours.keys() == theirs.keys()
    norms = {name: float(tensor.norm()) for name, tensor in theirs.items()}
    largest = max(norms.values())
    return max(
        float((ours[name].double() - theirs[name].double()).norm())
        / (norm if norm > 1e-6 * largest else largest)
        for name, norm in norms.items()
    )


class RaisingMode(TorchFunctionMode):
    """The n-th call of PyTorch from now on raises this error: memory that runs out, or a user who
    interrupts."""

    def __init__(self, error: BaseException, num_calls: int) -> None:
        super().__init__()
        self._error, self.num_left = error, num_calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_left -= 1
        if self.num_left == 0:
            raise self._error
        return func(*args, **(kwargs or {}))
