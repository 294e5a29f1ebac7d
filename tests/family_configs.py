"""Tiny configurations of every family, by name, in the forms in which its models come; those of
`support.CONFIGS` are not repeated.
"""

from typing import Any

VOCAB = 97
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
_GPT |= {
    "bos_token_id": None,
    "eos_token_id": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_NEOX = {"model_type": "gpt_neox", **_SHAPE, "attention_dropout": 0.0, "hidden_dropout": 0.0}
_FALCON = {
    "model_type": "falcon",
    **{name: _SHAPE[name] for name in _SHAPE if "inter" not in name and "key" not in name},
}
_MPT: dict[str, Any] = {
    "model_type": "mpt",
    "vocab_size": VOCAB,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
}
_GEMMA: dict[str, Any] = {
    **_SHAPE,
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
_QWEN3_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "head_dim": 16,
}
_QWEN3_5: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # what small heads give may be near zero, and so would be what it is divided by
    "rms_norm_eps": 0.05,
}
_SHARED_EXPERT: dict[str, Any] = {**_QWEN3_MOE, "shared_expert_intermediate_size": 20}
_QWEN3_5_MOE = (
    {name: size for name, size in _SHAPE.items() if "inter" not in name} | _QWEN3_5 | _SHARED_EXPERT
)
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

MORE_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT},
    "gpt2-scaled": {
        "model_type": "gpt2",
        **_GPT,
        "n_inner": 40,
        "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "relu",
        "tie_word_embeddings": False,
    },
    "gpt-neox": {**_NEOX, "rotary_pct": 0.5},
    "gpt-neox-in-turn": {
        **_NEOX,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 1.0,
    },
    "gptj": {"model_type": "gptj", **_GPT, "rotary_dim": 4},
    "falcon-new": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-new-one-norm": {
        **_FALCON,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
    },
    "falcon-old": {**_FALCON, "bias": True},
    "falcon-alibi": {
        **_FALCON,
        "num_attention_heads": 3,
        "hidden_size": 24,
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    },
    "mpt": {**_MPT, "max_seq_len": 64},
    "mpt-clipped": {
        **_MPT,
        "max_seq_len": 64,
        "d_model": 24,
        "n_heads": 3,
        "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4},
    },
    "gemma2": {
        **_GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma2-uncapped": {
        **_GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu",
    },
    "gemma3": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "phi3": {"model_type": "phi3", **_SHAPE},
    "phi3-mini4": {
        "model_type": "phi3",
        **_SHAPE,
        "partial_rotary_factor": 0.75,
        "head_dim": 8,
        "sliding_window": 6,
    },
    "phi3-128k": {  # every sequence of more than two tokens is a long one
        "model_type": "phi3",
        **_SHAPE,
        "original_max_position_embeddings": 2,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.3, 1.5],
            "long_factor": [1.2, 2.0, 5.0, 9.0],
        },
    },
    "olmo2": {"model_type": "olmo2", **_SHAPE},
    "smollm3": {
        "model_type": "smollm3",
        **_SHAPE,
        "no_rope_layers": [1, 0],
        "tie_word_embeddings": False,
    },
    "smollm3-sliding": {
        "model_type": "smollm3",
        **_SHAPE,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {
        "model_type": "granite",
        **_SHAPE,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "mixtral": {"model_type": "mixtral", **_SHAPE, "num_local_experts": 4, "sliding_window": 6},
    "qwen3-moe": {"model_type": "qwen3_moe", **_SHAPE, **_QWEN3_MOE, "norm_topk_prob": True},
    "qwen3-moe-some-dense": {
        "model_type": "qwen3_moe",
        **_SHAPE,
        **_QWEN3_MOE,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **_SHAPE,
        "head_dim": 8,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.7,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        **_SHAPE,
        **_QWEN3_5,
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
        ],
        "tie_word_embeddings": False,
    },
    "qwen3.5-tied": {
        "model_type": "qwen3_5_text",
        **_SHAPE,
        **_QWEN3_5,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention"],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3.5-moe": {
        "model_type": "qwen3_5_moe_text",
        **_QWEN3_5_MOE,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        **_SHAPE,
        **_QWEN3_5,
        **_SHARED_EXPERT,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [2],
        "norm_topk_prob": False,
    },
    "ministral": {
        "model_type": "ministral",
        **_SHAPE,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {
        "model_type": "ministral3",
        **_SHAPE,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
}

# Models that see pictures, too, around text models of those above.
for _name, _text, _fields in (
    ("qwen3.5-published", "qwen3.5", {"model_type": "qwen3_5", "vision_config": _QWEN_VISION}),
    (
        "qwen3.5-moe-published",
        "qwen3.5-moe",
        {"model_type": "qwen3_5_moe", "vision_config": _QWEN_VISION},
    ),
    (
        "gemma3-published",
        "gemma3",
        {"model_type": "gemma3", "vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    (
        "mistral3",
        "mistral",
        {
            "model_type": "mistral3",
            "vision_config": {"model_type": "pixtral", **_VISION},
            "tie_word_embeddings": False,
        },
    ),
    (
        "mistral3-ministral",
        "ministral3",
        {
            "model_type": "mistral3",
            "vision_config": {"model_type": "pixtral", **_VISION},
            "tie_word_embeddings": True,
        },
    ),
):
    _config = (
        {"model_type": "mistral", **_SHAPE, "sliding_window": 6}
        if _text == "mistral"
        else MORE_CONFIGS[_text]
    )
    MORE_CONFIGS[_name] = {**_fields, "text_config": _config}
