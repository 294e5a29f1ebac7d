"""Activations that a conventional trainer keeps: those that autograd saves for each block under
transformers and PEFT.

They are counted, not modelled: the real modules run forward on the meta device (shapes without
memory) under saved-tensor hooks. A model of two blocks minus a model of the first alone gives the
second, with the sites that it has in the whole model.
"""

import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from coserve.adapters.methods.lora import LoraConfig
from coserve.models.base import Architecture

_ATTENTION = "coserve_tiled"


def conventional_saved_bytes(
    architecture: Architecture, lora: LoraConfig, *, rows: int, dtype: torch.dtype
) -> dict[int, int] | None:
    """Return the bytes that autograd holds for one sequence, by block; None without PEFT.

    Attention is the tiled kernel (FlashAttention's saved set), float32 adapter weights are PEFT's
    default, and the backbone's dropout is off, as it is in coserve. Blocks below the lowest site
    hold nothing.

    Args:
        architecture: The model.
        lora: The adapter.
        rows: Tokens of the sequence.
        dtype: Dtype of the backbone.
    """
    if importlib.util.find_spec("peft") is None:
        return None
    sites = lora.sites(architecture)
    input_grad = any(part == "embed" for part, _ in sites.values())
    kinds = getattr(architecture.config, "layer_types", None) or [None] * architecture.num_layers
    counted: dict[tuple[Any, ...], int] = {}
    result = {}
    for layer in range(architecture.num_layers):
        ranks = {node: lora.rank(module) for module, (part, node) in sites.items() if part == layer}
        # Blocks of one kind with the same sites keep the same bytes: count each once.
        key = (kinds[layer], tuple(ranks.items()), input_grad)
        if key not in counted:
            shape: dict[str, Any] = {
                "kind": kinds[layer],
                "rows": rows,
                "dtype": dtype,
                "input_grad": input_grad,
            }
            two = _held(architecture, num_blocks=2, ranks=ranks, dropout=lora.dropout, **shape)
            counted[key] = two - _held(architecture, num_blocks=1, ranks={}, dropout=0.0, **shape)
        result[layer] = counted[key]
        # Gradients pass through every block above the lowest site.
        input_grad |= bool(ranks)
    return result


def _held(
    architecture: Architecture,
    *,
    kind: str | None,
    num_blocks: int,
    ranks: dict[str, int],
    dropout: float,
    rows: int,
    dtype: torch.dtype,
    input_grad: bool,
) -> int:
    """Return the bytes of the storages that autograd saves in a forward pass of some blocks,
    without weights.

    Args:
        architecture: The model.
        kind: Layer type of the blocks; None: the model has none.
        num_blocks: Number of blocks.
        ranks: Ranks of the LoRAs in the last block, by node.
        dropout: Dropout of the LoRAs.
        rows: Tokens of the sequence.
        dtype: Dtype of the backbone.
        input_grad: Whether the first block's input needs a gradient.
    """
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # the two libraries' advice to each other
        model = _model(architecture, kind, num_blocks, dtype)
        if ranks:
            _add_lora(model, f"{_blocks(architecture)}.{num_blocks - 1}", ranks, dropout)
        width = model.get_input_embeddings().embedding_dim
        x = torch.empty(1, rows, width, dtype=dtype, requires_grad=input_grad)
        positions = torch.empty(1, rows, dtype=torch.int64)
    weights = {
        tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())
    }
    saved: dict[int, Tensor] = {}  # keeps storages, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            saved[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _GroupedProducts():
        model.base_model(inputs_embeds=x, position_ids=positions, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _model(
    architecture: Architecture, kind: str | None, num_blocks: int, dtype: torch.dtype
) -> Any:
    """Return a frozen transformers model of blocks of one kind, without the norm after them."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _tiled_attention)
    fields = {**architecture.config.to_dict(), "num_hidden_layers": num_blocks, "dtype": None}
    fields |= {name: 0.0 for name in ("dropout", "attention_dropout") if name in fields}
    if kind is not None:
        fields["layer_types"] = [kind] * num_blocks
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_ATTENTION)
    blocks = model.get_submodule(_blocks(architecture).rpartition(".")[0])
    for name in ("norm", "final_layer_norm"):
        if getattr(blocks, name, None) is not None:
            setattr(blocks, name, nn.Identity())
    return model.requires_grad_(False).train()


class _GroupedProducts(TorchFunctionMode):
    """A mode in which grouped products of experts run on the meta device in every dtype.

    PyTorch has them there for bfloat16 only. In other dtypes each becomes a product with one
    expert's matrix: it has the same shape, and autograd keeps the same rows of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm and args[0].dtype != torch.bfloat16:
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))


def _blocks(architecture: Architecture) -> str:
    """Return the name of the module that holds the blocks; a text part of a larger model is created
    alone.
    """
    return architecture.block_prefix.replace(".language_model.", ".")


def _add_lora(model: Any, block: str, ranks: dict[str, int], dropout: float) -> None:
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    names = {f"{block}.{node}": rank for node, rank in ranks.items()}
    settings = PeftLoraConfig(target_modules=list(names), rank_pattern=names, lora_dropout=dropout)
    inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (
                parameter.data.float()
            )  # as get_peft_model does (autocast_adapter_dtype)


def _tiled_attention(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Run attention for transformers' registry, on q [1, heads, n, D].

    On the meta device, PyTorch's own choice would be an attention that keeps all scores.
    """
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None
