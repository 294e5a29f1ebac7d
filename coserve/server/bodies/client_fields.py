"""Table of the fields that clients of other servers send and that no body has here.

It says what is done with each, and why. `other_fields` applies it, and scripts/fields_table.py
makes the table in docs/clients.md from it. A row applies only on routes whose own body has no field
of that name.
"""

from dataclasses import dataclass
from typing import Any, Literal

from coserve.server.bodies import field_readers as read
from coserve.server.bodies.field_readers import Reader, same_as

_LEAVE_OUT = "leave it out"
_SAMPLER = "tokens are chosen by temperature, top_k, top_p and min_p alone"
_USE_MODEL = "name the adapter as the model"
_NO_OTHERS = "there is one server, and nothing to choose among others"


@dataclass(frozen=True, kw_only=True)
class ClientField:
    """A field that clients of other servers send."""

    name: str
    """Name of the field."""
    # Servers whose clients send it.
    sent_to: str
    # Ignored: cannot change an answer. Refused: would change it, and has no counterpart here.
    action: Literal["mapped", "ignored", "refused"]
    # Mapped: what it sets here. Ignored: why it changes no answer. Refused: what would be right.
    note: str
    # Values beside null with which a refused field asks for nothing.
    neutral: tuple[Any, ...] = ()
    # Translates the value of a mapped field.
    reader: Reader | None = None
    # Keys of a mapped field's value that are passed over.
    ignored_keys: tuple[str, ...] = ()


def _mapped(
    name: str, sent_to: str, reader: Reader, note: str, ignored_keys: tuple[str, ...] = ()
) -> list[ClientField]:
    return [
        ClientField(
            name=name,
            sent_to=sent_to,
            action="mapped",
            reader=reader,
            note=note,
            ignored_keys=ignored_keys,
        )
    ]


def _renamed(name: str, sent_to: str, here: str) -> list[ClientField]:
    return _mapped(name, sent_to, same_as(here), f"`{here}`")


def _ignored(names: str, sent_to: str, note: str) -> list[ClientField]:
    return [
        ClientField(name=name, sent_to=sent_to, action="ignored", note=note)
        for name in names.split()
    ]


def _refused(
    names: str, sent_to: str, note: str = _LEAVE_OUT, neutral: tuple[Any, ...] = ()
) -> list[ClientField]:
    return [
        ClientField(name=name, sent_to=sent_to, action="refused", note=note, neutral=neutral)
        for name in names.split()
    ]


_OPENAI = [
    *_ignored("user safety_identifier metadata store", "OpenAI", "for a provider's records"),
    *_ignored("service_tier", "OpenAI", "`priority` orders requests here"),
    *_ignored("prediction", "OpenAI", "speeds up an answer, and does not change it"),
    *_ignored("verbosity", "OpenAI", "no chat template takes it"),
    *_ignored(
        "prompt_cache_key prompt_cache_options prompt_cache_retention",
        "OpenAI",
        "prefixes are cached anyway",
    ),
    *_ignored("parallel_tool_calls", "OpenAI", "no tools on this route"),
    *_refused("modalities", "OpenAI", "answers are text", (["text"], [])),
    *_refused("audio web_search_options moderation", "OpenAI", neutral=({},)),
    *_refused("data_sources", "Azure OpenAI", neutral=([],)),
    *_renamed("max_completion_tokens", "OpenAI", "max_tokens"),
    *_renamed("max_output_tokens", "OpenAI, Google", "max_tokens"),
]
# Fields of one route that are sent to another one.
_OTHER_ROUTES = [
    *_refused(
        "prompt suffix", "OpenAI", "chats have messages; /v1/completions has a prompt", ("", [])
    ),
    *_refused("messages", "OpenAI", "give the prompt, or use /v1/chat/completions", ([],)),
    *_refused(
        "input instructions previous_response_id", "OpenAI", "only /v1/responses has it", ("", [])
    ),
    *_refused("tools functions", "OpenAI", "use /v1/chat/completions", ([],)),
    *_refused("tool_choice function_call", "OpenAI", "use /v1/chat/completions", ("none", "auto")),
    *_refused("top_logprobs", "OpenAI", "on /v1/completions logprobs is the number", (0,)),
    *_refused("best_of", "OpenAI, vLLM", "give n", (1,)),
    *_refused("echo", "vLLM", neutral=(False,)),
    *_ignored(
        "chat_template_kwargs reasoning_effort enable_thinking",
        "vLLM",
        "no chat template on this route",
    ),
    *_ignored("include_reasoning", "vLLM", "no chat template on this route"),
    *_refused("add_generation_prompt", "vLLM", "only chats have it", (True,)),
    *_refused("continue_final_message", "vLLM", "only chats have it", (False,)),
    *_mapped("stop", "OpenAI", read.stop, "`stop_sequences` of /v1/messages"),
    *_ignored("stream_options", "OpenAI", "streams of this route end with their usage"),
    *_refused("n", "OpenAI", "there is one answer; send several requests", (1,)),
    *_refused(
        "logprobs",
        "OpenAI",
        "on /v1/responses give include: message.output_text.logprobs",
        (False,),
    ),
    *_refused("logprob_token_ids prompt_logprobs", "vLLM", "use /v1/chat/completions", ([],)),
    *_refused(
        "return_token_ids return_tokens_as_token_ids", "vLLM", "use /v1/chat/completions", (False,)
    ),
    *_refused(
        "include_stop_str_in_output", "vLLM", "stop_sequence of the answer says it", (False,)
    ),
    *_refused("truncate_prompt_tokens", "vLLM", "the whole prompt is read", (-1,)),
    *_refused("truncation_side", "vLLM", "the first tokens are kept", ("right",)),
    *_refused("truncation", "OpenAI, Voyage", "use truncate_prompt_tokens", ("disabled", False)),
    *_refused("add_special_tokens", "vLLM", "the prompt is read as an answer's"),
    *_refused("text", "OpenAI", "use response_format", ({}, {"format": {"type": "text"}})),
    *_refused(
        "conversation", "OpenAI", "only /v1/responses has it: give the whole conversation", ("",)
    ),
    *_refused("background", "OpenAI", "only /v1/responses has it", (False,)),
    *_refused("include", "OpenAI", "only /v1/responses has it: use logprobs", ([],)),
    *_ignored(
        "background_options max_tool_calls", "OpenAI", "there are no tools that a server calls"
    ),
    *_refused("tokens", "vLLM", "give the prompt or messages; /detokenize has tokens", ([],)),
    *_ignored("return_token_strs", "vLLM", "extra data of an answer"),
    *_ignored(
        "cache_control inference_geo",
        "Anthropic",
        "prefixes are cached anyway, and there is one server",
    ),
    *_ignored("encoding_format", "OpenAI", "only embeddings have it"),
    *_refused(
        "dimensions",
        "OpenAI",
        "a model's states have one width, and only /v1/embeddings returns them",
    ),
    *_renamed("stop_sequences", "Anthropic", "stop"),
    *_mapped(
        "output_config", "Anthropic", read.output_config, "`reasoning_effort`, `response_format`"
    ),
    *_mapped("output_format", "Anthropic", read.output_format, "`response_format`"),
    *_ignored("context_management", "Anthropic", "the whole conversation is read"),
    *_refused("mcp_servers", "Anthropic", "give the functions as tools", ([],)),
    *_refused("container", "Anthropic"),
]
_THINKING = [
    *_mapped(
        "thinking",
        "Anthropic, DeepSeek, Z.ai",
        read.enable_thinking,
        "`enable_thinking`; a budget is ignored",
        ("budget_tokens",),
    ),
    *_mapped("think", "Ollama", read.think, "`enable_thinking`, `reasoning_effort`"),
    *_mapped(
        "reasoning",
        "OpenRouter",
        read.reasoning,
        "`reasoning_effort`, `enable_thinking`, `include_reasoning`; a budget is ignored",
        ("max_tokens",),
    ),
    *_mapped(
        "reasoning_format",
        "llama.cpp, Groq",
        read.reasoning_format,
        "hidden: `include_reasoning: false`",
    ),
    *_refused(
        "separate_reasoning",
        "SGLang",
        "use include_reasoning: reasoning is never part of content",
        (True,),
    ),
    *_ignored("stream_reasoning", "SGLang", "a stream has the reasoning as it comes"),
    *_refused(
        "thinking_token_budget thinking_budget",
        "vLLM, DashScope",
        "limit the answer by max_tokens",
        (-1,),
    ),
]
_STRUCTURED = [
    *_ignored(
        "guided_decoding_backend", "vLLM", "there is one backend, and grammars mean the same"
    ),
    *_mapped(
        "guided_json_object", "vLLM", read.json_object, "`response_format: {type: json_object}`"
    ),
    *_renamed("json_schema", "llama.cpp, SGLang", "guided_json"),
    *_mapped("grammar", "llama.cpp, TGI", read.grammar, "`guided_grammar`, or as TGI's type says"),
    *_renamed("grammar_string", "text-generation-webui", "guided_grammar"),
    *_renamed("ebnf", "SGLang", "guided_grammar"),
    *_renamed("regex", "SGLang", "guided_regex"),
    *_refused("structural_tag", "SGLang", "use response_format of type structural_tag"),
    *_refused("grammar_lazy", "llama.cpp", "use response_format of type structural_tag", (False,)),
    *_refused("format", "Ollama", "use response_format", ("",)),
    *_refused("stop_regex", "SGLang", "use stop", ("", [])),
    *_refused("guided_decoding", "TensorRT-LLM, vLLM", "use structured_outputs", ({},)),
    *_refused("response_schema", "Google", "use response_format", ({},)),
    *_refused("response_mime_type", "Google", "use response_format", ("text/plain", "")),
]
_LENGTHS_AND_NAMES = [
    *_mapped("n_predict", "llama.cpp", read.max_tokens, "`max_tokens`; -1: no limit"),
    *_mapped("num_predict", "Ollama", read.max_tokens, "`max_tokens`; -1: no limit"),
    *_renamed("max_new_tokens", "TGI, SGLang, transformers", "max_tokens"),
    *_renamed("min_new_tokens", "SGLang, transformers", "min_tokens"),
    *_refused("max_length", "transformers, KoboldCpp", "use max_tokens"),
    *_refused("min_length", "transformers", "use min_tokens", (0,)),
    *_renamed("stop_strings", "transformers", "stop"),
    *_renamed("stopping_strings", "text-generation-webui", "stop"),
    *_renamed("custom_stopping_strings", "text-generation-webui", "stop"),
    *_renamed("repeat_penalty", "llama.cpp, LM Studio, Ollama", "repetition_penalty"),
    *_renamed("rep_pen", "KoboldCpp", "repetition_penalty"),
    *_mapped("random_seed", "Mistral", read.seed, "`seed`; -1 draws one"),
    *_mapped("sampler_seed", "KoboldCpp", read.seed, "`seed`; -1 draws one"),
    *_mapped("sampling_seed", "SGLang", read.seed, "`seed`; -1 draws one"),
    *_mapped("do_sample", "TGI, transformers, Z.ai", read.do_sample, "false: `temperature: 0`"),
    *_mapped("n_probs", "llama.cpp", read.top_logprobs, "`logprobs`"),
    *_mapped("usage", "OpenRouter", read.usage, "`stream_options.include_usage`"),
    *_renamed("no_stop_trim", "SGLang", "include_stop_str_in_output"),
    *_renamed("return_full_text", "TGI", "echo"),
    *_mapped("truncate", "TGI", read.truncate, "`truncate_prompt_tokens`"),
    *_renamed("prompt_truncate_len", "Fireworks", "truncate_prompt_tokens"),
    *_renamed("ban_eos_token", "text-generation-webui", "ignore_eos"),
    *_renamed("add_bos_token", "text-generation-webui", "add_special_tokens"),
    *_renamed("extra_key", "SGLang", "cache_salt"),
    *_mapped(
        "repeat_last_n",
        "llama.cpp, Ollama",
        read.last_penalised,
        "-1: `repetition_penalty` counts all",
    ),
    *_mapped(
        "repetition_penalty_range",
        "KoboldCpp",
        read.penalty_window,
        "0: `repetition_penalty` counts all",
    ),
]
_SAMPLERS = [
    *_refused("typical_p typical", "llama.cpp, TGI", _SAMPLER, (1,)),
    *_refused("top_a", "OpenRouter, KoboldCpp", _SAMPLER, (0,)),
    *_refused("tfs_z tfs", "llama.cpp, KoboldCpp", _SAMPLER, (1,)),
    *_refused("mirostat mirostat_mode", "llama.cpp, Ollama", _SAMPLER, (0,)),
    *_ignored(
        "mirostat_tau mirostat_eta", "llama.cpp", "without mirostat, which is refused, of no effect"
    ),
    *_refused("xtc_probability", "llama.cpp", _SAMPLER, (0,)),
    *_ignored(
        "xtc_threshold", "llama.cpp", "without xtc_probability, which is refused, of no effect"
    ),
    *_refused("dry_multiplier", "llama.cpp", _SAMPLER, (0,)),
    *_ignored(
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
        "llama.cpp",
        "without dry_multiplier, which is refused, of no effect",
    ),
    *_refused("dynatemp_range", "llama.cpp", _SAMPLER, (0,)),
    *_ignored(
        "dynatemp_exponent", "llama.cpp", "without dynatemp_range, which is refused, of no effect"
    ),
    *_refused("dynamic_temperature temperature_last", "text-generation-webui", _SAMPLER, (False,)),
    *_refused("top_n_sigma nsigma", "llama.cpp", _SAMPLER, (-1, 0)),
    *_refused("smoothing_factor skew", "text-generation-webui", _SAMPLER, (0,)),
    *_ignored(
        "smoothing_curve",
        "text-generation-webui",
        "without smoothing_factor, which is refused, of no effect",
    ),
    *_refused("epsilon_cutoff eta_cutoff penalty_alpha", "transformers", _SAMPLER, (0,)),
    *_refused("no_repeat_ngram_size", "transformers", "use repetition_penalty", (0,)),
    *_refused("encoder_repetition_penalty", "transformers", "use repetition_penalty", (1,)),
    *_refused("guidance_scale", "transformers", neutral=(1,)),
    *_refused("negative_prompt", "transformers", neutral=("",)),
    *_refused("samplers sampler_priority sampler_order", "llama.cpp", _SAMPLER, ([], "")),
    *_refused("min_keep", "llama.cpp", _SAMPLER, (0, 1)),
    *_refused("use_beam_search", "vLLM", "answers are drawn; give n for several", (False,)),
    *_refused("num_beams", "transformers", "answers are drawn; give n for several", (1,)),
    *_ignored(
        "length_penalty early_stopping",
        "vLLM",
        "of no effect without beam search, which is refused",
    ),
    *_refused("logits_processors", "vLLM", "use logit_bias, allowed_token_ids or bad_words", ([],)),
    *_refused("custom_logit_processor", "SGLang", "use logit_bias, allowed_token_ids or bad_words"),
    *_refused(
        "custom_token_bans banned_strings", "text-generation-webui", "use bad_words", ("", [])
    ),
    *_refused("watermark watermarking", "TGI, vLLM", neutral=(False,)),
    *_refused("repetition_detection", "vLLM"),
]
_PROMPTS = [
    *_refused("chat_template", "vLLM", "the server's --chat-template writes chats"),
    *_refused("documents", "vLLM, Cohere", "put the documents into the messages", ([],)),
    *_refused(
        "system system_prompt", "Ollama, llama.cpp", "give a message with the role system", ("",)
    ),
    *_refused(
        "template instruction_template tool_prompt",
        "Ollama, TGI",
        "use chat_template_kwargs",
        ("",),
    ),
    *_refused("character preset", "text-generation-webui, OpenRouter", neutral=("",)),
    *_refused("raw", "Ollama", "use /v1/completions", (False,)),
    *_refused("context", "Ollama", "give the whole conversation", ([],)),
    *_refused("images image_data", "Ollama, llama.cpp", neutral=([],)),
    *_refused("options", "Ollama", "give its fields at the top of the body", ({},)),
    *_refused("extra_body", "OpenAI's client", "give its fields at the top of the body", ({},)),
    *_refused("inputs parameters", "TGI", "use OpenAI's fields"),
    *_refused("sampling_params", "SGLang", "give its fields at the top of the body", ({},)),
    *_refused(
        "generation_config", "Google, transformers", "give its fields at the top of the body", ({},)
    ),
    *_refused("contents system_instruction", "Google", "use messages"),
    *_refused("prompt_embeds", "vLLM"),
    *_refused("input_type", "Cohere, NVIDIA", "put an instruction into the input"),
    *_refused("prompt_name", "TEI", "put an instruction into the input"),
    *_refused("task task_type", "Jina, Google", "put an instruction into the input"),
    *_refused("late_chunking", "Jina", neutral=(False,)),
    *_refused("normalize normalized", "vLLM, Jina", "embeddings have length 1", (True,)),
    *_refused("output_dimension", "Voyage, Mistral", "a model's states have one width"),
    *_refused("output_dtype", "Voyage, Mistral", "embeddings are floats", ("float",)),
    *_refused(
        "embedding_type embedding_types",
        "Jina, Cohere",
        "use encoding_format",
        ("float", ["float"]),
    ),
    *_refused("embed_dtype", "vLLM", "embeddings are floats", ("float32",)),
    *_refused("prompt_mode", "Mistral", "use enable_thinking"),
    *_refused("safe_prompt", "Mistral", neutral=(False,)),
    *_refused("n_indent", "llama.cpp", neutral=(0,)),
    *_refused("enable_search", "DashScope", neutral=(False,)),
    *_refused("search_parameters", "xAI", neutral=({},)),
    *_refused("plugins", "OpenRouter", neutral=([],)),
    *_refused("guideline", "TGI", neutral=("",)),
    *_ignored(
        "num_ctx n_keep n_discard truncation_length", "Ollama, llama.cpp", "prompts are never cut"
    ),
    *_ignored(
        "transforms context_length_exceeded_behavior",
        "OpenRouter, Together",
        "prompts are never cut",
    ),
    *_ignored("mode", "text-generation-webui", "the route says it"),
]
_ADAPTERS = [
    *_refused("lora_path", "SGLang", _USE_MODEL),
    *_refused("adapter_id", "TGI", _USE_MODEL, ("",)),
    *_refused("lora", "llama.cpp", _USE_MODEL, ([],)),
    *_refused("session_params", "SGLang", "give the whole conversation", ({},)),
    *_refused("custom_params", "SGLang", neutral=({},)),
]
_ANSWERS = [
    *_refused("return_prompt_text return_hidden_states", "vLLM, SGLang", neutral=(False,)),
    *_refused("post_sampling_probs", "llama.cpp", "logprobs are the model's own", (False,)),
    *_refused("parse_tool_calls", "llama.cpp", "calls are always tool_calls", (True,)),
    *_refused("echo_last", "Fireworks", "use echo", (0,)),
    *_refused("mock_response", "LiteLLM"),
    *_refused("guardrails", "LiteLLM", neutral=([],)),
    *_refused("vllm_xargs", "vLLM", neutral=({},)),
    *_refused("kv_transfer_params ec_transfer_params", "vLLM"),
    *_refused("bootstrap_host bootstrap_port bootstrap_room", "SGLang"),
    *_ignored(
        "return_token_offsets return_mm_kwargs detokenize stream_interval",
        "vLLM",
        "extra data of an answer",
    ),
    *_ignored(
        "routed_experts_prompt_start return_routed_experts",
        "vLLM, SGLang",
        "extra data of an answer",
    ),
    *_ignored(
        "spaces_between_special_tokens",
        "vLLM",
        "special tokens are not shown, or shown as they are",
    ),
    *_ignored(
        "timings_per_token return_progress return_tokens", "llama.cpp", "extra data of an answer"
    ),
    *_ignored("response_fields", "llama.cpp", "answers have OpenAI's fields"),
    *_ignored(
        "details decoder_input_details top_n_tokens", "TGI", "extra data of an answer; use logprobs"
    ),
    *_ignored(
        "perf_metrics_in_response return_cached_tokens_details",
        "Fireworks, SGLang",
        "extra data of an answer",
    ),
    *_ignored("result_format incremental_output", "DashScope", "answers have OpenAI's form"),
    *_ignored("tool_stream", "Z.ai", "calls are streamed as they are written"),
]
_OPERATION = [
    *_ignored("request_id session_id rid trace debug", "vLLM, SGLang, OpenRouter", "for logs"),
    *_ignored("provider models route", "OpenRouter", _NO_OTHERS),
    *_ignored("keep_alive ttl", "Ollama, LM Studio", "the model stays loaded"),
    *_ignored(
        "draft_model speculation prompt_lookup_num_tokens",
        "LM Studio",
        "speculation does not change answers",
    ),
    *_ignored(
        "speculative.n_max speculative.n_min speculative.p_min",
        "llama.cpp",
        "speculation changes no answer",
    ),
    *_ignored(
        "cache_prompt n_cache_reuse id_slot slot_id", "llama.cpp", "prefixes are cached anyway"
    ),
    *_ignored(
        "t_max_predict_ms t_max_prompt_ms sse_ping_interval",
        "llama.cpp",
        "`--request-timeout` limits time",
    ),
    *_ignored("data_parallel_rank", "vLLM, SGLang", "the server chooses the node"),
    *_ignored("media_io_kwargs mm_processor_kwargs", "vLLM", "prompts are text"),
    *_ignored(
        "litellm_call_id litellm_metadata litellm_session_id litellm_trace_id custom_llm_provider "
        "tags num_retries timeout fallbacks context_window_fallback_dict drop_params "
        "additional_drop_params cache caching no-log allowed_openai_params "
        "provider_specific_fields",
        "LiteLLM",
        "for the proxy",
    ),
]
FIELDS: dict[str, ClientField] = {
    field.name: field
    for group in (
        *(
            _OPENAI,
            _OTHER_ROUTES,
            _THINKING,
            _STRUCTURED,
            _LENGTHS_AND_NAMES,
            _SAMPLERS,
            _PROMPTS,
            _ADAPTERS,
        ),
        *(_ANSWERS, _OPERATION),
    )
    for field in group
}
