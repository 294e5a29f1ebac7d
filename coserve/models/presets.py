"""Shapes of published models without their files: the configurations of `dummy:<preset>`."""

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama3(
    hidden: int, mlp: int, layers: int, heads: int, *, factor: float, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": factor},
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def _qwen25(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool, positions: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151936 if tied else 152064,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6 if tied else 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2, tied=True, positions=32768),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2, tied=True, positions=131072),
    "llama-3.2-1b": {**_llama3(2048, 8192, 16, 32, factor=32.0, tied=True), "head_dim": 64},
    "qwen2.5-7b": {
        **_qwen25(3584, 18944, 28, 28, 4, tied=False, positions=131072),
        "rms_norm_eps": 1e-6,
    },
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, factor=8.0),
    "llama-2-13b": {
        "model_type": "llama",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float16",
    },
    "qwen2.5-14b": _qwen25(5120, 13824, 48, 40, 8, tied=False, positions=131072),
    "qwen2.5-32b": _qwen25(5120, 27648, 64, 40, 8, tied=False, positions=131072),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, factor=8.0),
}
