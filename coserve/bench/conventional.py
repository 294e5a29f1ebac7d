"""What a conventional trainer keeps: the activations that autograd saves for one block under transformers and PEFT.

Counted, not modelled: the real modules run forward on the meta device (shapes without memory) under saved-tensor
hooks. A model of two blocks minus a model of one gives a block in the middle, whose input needs a gradient.
"""

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coserve.adapters.lora import LoraConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ATTENTION = "coserve_tiled"


def conventional_saved_bytes(
    config: "PretrainedConfig", lora: LoraConfig, *, rows: int, dtype: torch.dtype
) -> int | None:
    """Bytes that autograd holds for one block and one sequence of `rows` tokens; None if PEFT is not installed.

    Attention is the tiled kernel (FlashAttention's saved set), float32 adapter weights are PEFT's default.
    """
    if importlib.util.find_spec("peft") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the two libraries' advice to each other
        return _saved_bytes(config, lora, 2, rows, dtype) - _saved_bytes(config, lora, 1, rows, dtype)


def _saved_bytes(config: "PretrainedConfig", lora: LoraConfig, num_blocks: int, rows: int, dtype: torch.dtype) -> int:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _tiled_attention)
    fields = {**config.to_dict(), "num_hidden_layers": num_blocks, "dtype": None}
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][:num_blocks]
    adapter = PeftLoraConfig(**lora.to_peft())
    adapter.inference_mode, adapter.layers_to_transform = False, None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**fields), dtype=dtype, attn_implementation=_ATTENTION
        )
        model = get_peft_model(model, adapter).train()
        x = torch.empty(1, rows, config.hidden_size, dtype=dtype, requires_grad=True)
        positions = torch.empty(1, rows, dtype=torch.int64)
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}  # held, so that no storage is freed and its address used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            saved[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_base_model().base_model(inputs_embeds=x, position_ids=positions, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _tiled_attention(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention for transformers' registry: q [1, heads, n, D]. On the meta device its own choice would be one that
    keeps all scores.
    """
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
