"""Fields that clients of other servers send at the top of a body, and that no field here stands for: those that cannot
change an answer are passed over, and the answer's header names them; those that would change it are refused.
"""

from collections.abc import Collection, Mapping
from typing import Any

from coserve.server.errors import ApiError

HEADER = "x-coserve-ignored"
_OPENAI = (
    *("user", "metadata", "store", "service_tier", "prediction", "verbosity", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
_VLLM = (
    *("request_id", "session_id", "length_penalty", "early_stopping", "spaces_between_special_tokens"),
    *("stream_interval", "return_token_offsets", "routed_experts_prompt_start", "return_mm_kwargs"),
    *("media_io_kwargs", "mm_processor_kwargs", "detokenize"),
)
_LITELLM = (
    *("litellm_call_id", "litellm_metadata", "litellm_session_id", "litellm_trace_id", "custom_llm_provider", "tags"),
    *("num_retries", "timeout", "fallbacks", "context_window_fallback_dict", "drop_params", "additional_drop_params"),
    *("cache", "caching", "no-log", "allowed_openai_params", "provider_specific_fields"),
)
_OLLAMA = ("keep_alive",)
IGNORED = frozenset((*_OPENAI, *_VLLM, *_LITELLM, *_OLLAMA))
# With the values, beside null, that ask for nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    # vLLM's
    "use_beam_search": (False,),
    "watermarking": (False,),
    "documents": ([],),
    "chat_template": (),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "return_prompt_text": (False,),
    # LiteLLM's
    "mock_response": (),
    "guardrails": ([],),
    # Ollama's
    "options": ({},),
    "format": ("",),
    "think": (),
    "system": ("",),
    "template": ("",),
    "raw": (False,),
    "context": ([],),
    "images": ([],),
    "num_ctx": (),
    "num_predict": (),
}


def sort_out(data: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A body's fields without those that are passed over, and the names of these. known: fields that the body has.

    Raises:
        ApiError: one would change the answer.
    """
    for name in _REFUSED:
        if name not in known and data.get(name) is not None and data[name] not in _REFUSED[name]:
            raise ApiError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    ignored = tuple(sorted(name for name in IGNORED if data.get(name) is not None))
    left = {name for name in (*_REFUSED, *IGNORED) if name in data and name not in known}
    return {name: value for name, value in data.items() if name not in left} if left else dict(data), ignored
