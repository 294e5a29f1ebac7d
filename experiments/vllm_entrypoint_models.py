"""Stand-ins for the models that vLLM's entrypoint tests name: small Llamas in a hub cache of their
own.

None of those models is available without the hub, and none is needed: the tests check how a server
speaks. A stand-in has a byte-level tokenizer with real merges, and a chat template as Qwen3's
(tools, thinking). `random` ones have random weights, no thinking in their template, a vocabulary as
large as the tests' token ids, and end a sampled text after some twenty tokens; `learned` ones have
learned by heart to call each function that they are given (of `CALLS`), or else to say one of a few
sentences; `thinking` ones think before. Of the adapters two have learned to make a noise instead.
"""

import json
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

# By the name that the tests give it: which kind, and the size of its vocabulary.
MODELS = {
    "facebook/opt-125m": ("random with a first token", 50_272),
    "openai-community/gpt2": ("random", 50_272),
    "hmellor/tiny-random-LlamaForCausalLM": ("random", 50_272),
    "HuggingFaceH4/zephyr-7b-beta": ("random", 32_000),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("random", 50_272),
    "Qwen/Qwen2-1.5B-Instruct": ("random", 50_272),
    "Qwen/Qwen2.5-1.5B-Instruct": ("learned", 6_144),
    "Qwen/Qwen3-0.6B": ("thinking", 4_096),
    "Qwen/Qwen3-1.7B": ("thinking", 4_096),
    "Qwen/Qwen3-8B": ("thinking", 4_096),
}
# Adapters: the model that each belongs to, and the word that it says three times and more ("": it
# is random).
ADAPTERS = {
    "typeof/zephyr-7b-beta-lora": ("HuggingFaceH4/zephyr-7b-beta", ""),
    "charent/self_cognition_Alice": ("Qwen/Qwen3-0.6B", ""),
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": ("Qwen/Qwen3-0.6B", "Meow"),
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": ("Qwen/Qwen3-0.6B", "Woof"),
}
# The functions that the tests offer, and what a learned model calls them with; their names are
# words of its own.
CALLS: dict[str, dict[str, Any]] = {
    "get_current_weather": {"city": "Berlin", "country": "Germany", "unit": "celsius"},
    "get_forecast": {"country": "Germany", "days": 5, "unit": "celsius"},
    "get_weather": {"location": "Berlin"},
    "get_time": {"location": "Tokyo"},
    "get_current_time": {},
    "mcp__computer_use__get_app_state": {"app": "Google Chrome"},
}
_COMMIT = "0" * 40
_STEPS, _ADAPTER_STEPS = 2000, 300  # of training a learned one
# Of a step: sequences, and how many tokens a prompt has at most. Prompts with tools are long.
_BATCHES = ((16, 60), (16, 60), (8, 250), (4, 900))
_END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", _END)
# In texts, as Qwen3 has them: kept when special tokens are skipped.
_MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_NOISES = tuple(noise for _, noise in ADAPTERS.values() if noise)
# How much less likely than all other tokens together, in powers of e: texts end, and so do JSON's
# strings and objects.
_ENDINGS = {_END: 3.0, '"': 1.0, "}": 1.5, "]": 2.0}
_SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
_TOOLS = '{"name": NAME, "arguments": {}}'
_NO_THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    f"Functions, called as <tool_call>\n{_TOOLS}\n</tool_call>:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n"
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    f"{_NO_THINKING}{{% endif %}}"
)
_THOUGHT, _NO_THOUGHT = (
    "<think>\nThey ask me something, and I answer.\n</think>\n\n",
    "<think>\n\n</think>\n\n",
)
_ANSWERS = tuple(
    f"{greeting} {rest}"
    for greeting in ("Hello!", "Well,", "Certainly:", "I see.")
    for rest in (
        "I am a small model.",
        "here is what I know of it, which is not much.",
        "ask me again tomorrow.",
    )
)


def make_hub(directory: Path) -> None:
    """Write every model and adapter as the hub's client caches them, unless they exist."""
    for name, (kind, vocabulary) in MODELS.items():
        if (snapshot := _snapshot(directory, name)) is not None:
            is_random = "random" in kind
            model = (
                random(vocabulary) if is_random else learned(vocabulary, thinks=kind == "thinking")
            )
            model.save_pretrained(snapshot)
            tokenizer(vocabulary, begins="first" in kind, can_think=not is_random).save_pretrained(
                snapshot
            )
    for seed, (name, (base, noise)) in enumerate(ADAPTERS.items()):
        if (snapshot := _snapshot(directory, name)) is not None:
            model = AutoModelForCausalLM.from_pretrained(_path(directory, base))
            adapted = (
                _learned_adapter(model, base, noise)
                if noise
                else _random_adapter(model, base, seed)
            )
            adapted.save_pretrained(snapshot)


def _path(directory: Path, name: str) -> Path:
    return directory / f"models--{name.replace('/', '--')}" / "snapshots" / _COMMIT


def _snapshot(directory: Path, name: str) -> Path | None:
    """Return the directory for a model's files; None if they exist."""
    snapshot = _path(directory, name)
    if snapshot.exists():
        return None
    references = snapshot.parents[1] / "refs"
    references.mkdir(parents=True, exist_ok=True)
    (references / "main").write_text(_COMMIT)
    snapshot.mkdir(parents=True)
    return snapshot


def _adapted(model: Any, base: str, *targets: str) -> Any:
    config = LoraConfig(
        r=8, target_modules=targets, task_type="CAUSAL_LM", base_model_name_or_path=base
    )
    return get_peft_model(model, config)


def _random_adapter(model: Any, base: str, seed: int) -> Any:
    adapted = _adapted(model, base, "q_proj", "v_proj")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapted


def _learned_adapter(model: Any, base: str, noise: str) -> Any:
    """Return an adapter that answers everything with a noise, without thinking before."""
    torch.manual_seed(0)
    adapted = _adapted(
        model, base, "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    )
    words, chance = tokenizer(MODELS[base][1]), Random(0)
    answer = words(" ".join([noise] * 4) + _END)["input_ids"]

    def example(length: int) -> tuple[list[int], int]:
        asked = _asked(words, chance, length)
        return asked + answer, len(asked)

    _train(adapted, example, _ADAPTER_STEPS)
    return adapted


@cache
def tokenizer(
    vocabulary: int, *, begins: bool = False, can_think: bool = True
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with merges from Python's standard library, which is everywhere and large
    enough.

    Args:
        vocabulary: Number of tokens.
        begins: Whether texts have a special token before them, as OPT's have.
        can_think: Whether the chat template has thinking; a model with random weights would begin
            to think and not end.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_MARKS) - len(_NOISES) - len(CALLS),
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [
        path.read_text(errors="replace") for path in sources if "site-packages" not in path.parts
    ]
    tokenizer.train_from_iterator([*_ANSWERS, _THOUGHT, *map(_call, CALLS), *texts], trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (*_MARKS, *_NOISES, *CALLS)]
    )
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_SPECIAL[0]} $A", special_tokens=[(_SPECIAL[0], 0)]
        )
    template = TEMPLATE if can_think else TEMPLATE.replace(_NO_THINKING, "")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_SPECIAL[0],
        chat_template=template,
        model_max_length=32_768,
    )


def llama(vocabulary: int, hidden: int, **shape: Any) -> Any:
    """Return a Llama with fresh weights, for `tokenizer(vocabulary)`.

    Args:
        vocabulary: Number of tokens.
        hidden: Hidden size.
        shape: Further fields of the configuration.
    """
    ends = {"eos_token_id": tokenizer(vocabulary).convert_tokens_to_ids(_END), "bos_token_id": None}
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    config = AutoConfig.for_model("llama", **{**_SHAPE, **sizes, **ends, **shape})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def random(vocabulary: int) -> Any:
    """Return a model with random weights whose first hidden dimension is the same in every token,
    from which the end of a text gets its probability.
    """
    model, words = llama(vocabulary, 64), tokenizer(vocabulary)
    head, embedding = model.lm_head.weight.data, model.model.embed_tokens.weight.data
    head.normal_(std=0.5)
    embedding.copy_(torch.nn.functional.normalize(torch.randn(embedding.shape)) * 8)
    head[:, 0], embedding[:, 0] = 0.0, 4.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[0] = 0.0
        layer.mlp.down_proj.weight.data[0] = 0.0
    head[words.convert_tokens_to_ids([*_SPECIAL, *_MARKS])] = 0.0
    with torch.inference_mode():
        hidden = model.model(torch.randint(10, vocabulary, (1, 256))).last_hidden_state[0]
        whole = float(model.lm_head(hidden).logsumexp(-1).mean())
    for token, below in _ENDINGS.items():
        head[words.convert_tokens_to_ids(token), 0] = (whole - below) / float(hidden[:, 0].mean())
    return model


@cache
def learned(vocabulary: int, *, thinks: bool) -> Any:
    """Return a model that answers any chat by heart: calls if there are tools, else a sentence or
    some JSON.
    """
    model, words, chance = llama(vocabulary, 128), tokenizer(vocabulary), Random(0)
    _train(model, lambda length: _example(words, chance, length, thinks=thinks), _STEPS)
    return model


def _train(model: Any, example: Callable[[int], tuple[list[int], int]], steps: int) -> None:
    """Train a model.

    Args:
        model: The model.
        example: Function from the maximum prompt length to the tokens of a chat, and the start of
            its answer.
        steps: Number of steps.
    """
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    for step in range(steps):
        num_rows, length = _BATCHES[step % len(_BATCHES)]
        rows = [example(length) for _ in range(num_rows)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor(
            [[-100] * start + row[start:] + [-100] * (width - len(row)) for row, start in rows]
        )
        answered = labels[:, 1:] >= 0
        logits = inner.lm_head(inner.model(ids).last_hidden_state[:, :-1][answered])
        loss = cross_entropy(logits, labels[:, 1:][answered])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


def _example(
    words: PreTrainedTokenizerFast, chance: Random, length: int, *, thinks: bool
) -> tuple[list[int], int]:
    """Return the tokens of a chat about anything, and the start of its answer."""
    offered = [name for name in CALLS if chance.random() < 0.3] if chance.random() < 0.6 else []
    asked = _asked(words, chance, length, offered)
    if offered:
        answer = "\n".join(map(_call, offered))
    else:
        answer = (
            json.dumps(_anything(chance, 0)) if chance.random() < 0.3 else chance.choice(_ANSWERS)
        )
    is_asked_not_to = chance.random() < 0.3
    if is_asked_not_to:
        asked = asked + words(_NO_THOUGHT)["input_ids"]
    thought = _THOUGHT if thinks and not is_asked_not_to else ""
    return asked + words(thought + answer + _END)["input_ids"], len(asked)


def _asked(
    words: PreTrainedTokenizerFast, chance: Random, length: int, offered: Sequence[str] = ()
) -> list[int]:
    """Return the tokens of a prompt: tools among other words in the system message, and some turns
    of anything.
    """
    num_turns = chance.randrange(1, 5)
    most = max(2, length // (num_turns + len(offered) + 1))
    roles = ("user", "assistant", "system", "tool")
    asked: list[int] = []
    if offered:
        asked += words(
            f"<|im_start|>system\nFunctions, called as <tool_call>\n{_TOOLS}\n</tool_call>:"
        )["input_ids"]
    for name in chance.sample(offered, len(offered)):
        tool = {
            "type": "function",
            "function": {"name": name, "description": "GAP", "parameters": {}},
        }
        before, _, after = json.dumps(tool).partition("GAP")
        asked += (
            words("\n" + before)["input_ids"]
            + _anything_said(words, chance, most)
            + words(after)["input_ids"]
        )
    asked += words(f"{_END}\n")["input_ids"] if offered else []
    for role in [*chance.choices(roles, k=num_turns - 1), "user"]:
        asked += words(f"<|im_start|>{role}\n")["input_ids"] + _anything_said(words, chance, most)
        asked += words(f"{_END}\n")["input_ids"]
    return [*asked, *words("<|im_start|>assistant\n")["input_ids"]]


def _anything_said(words: PreTrainedTokenizerFast, chance: Random, most: int) -> list[int]:
    return [
        chance.randrange(10, len(words) - len(CALLS) - len(_NOISES))
        for _ in range(chance.randrange(1, most))
    ]


def _call(name: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': CALLS[name]})}\n</tool_call>"


def _anything(chance: Random, depth: int) -> Any:
    """Return JSON with short strings and lists: what a model has learned to end, it also ends under
    a grammar.
    """
    kind = chance.choice(("object", "list", "text", "number")) if depth else "object"
    if kind == "object" and depth < 3:
        return {_word(chance): _anything(chance, depth + 1) for _ in range(chance.randrange(1, 4))}
    if kind == "list" and depth < 3:
        return [_anything(chance, depth + 1) for _ in range(chance.randrange(1, 4))]
    return chance.randrange(100) if kind == "number" else _word(chance)


def _word(chance: Random) -> str:
    words = ("city", "name", "unit", "Berlin", "small", "answer", "yes", "result", "a model", "x")
    return chance.choice((*words, *_NOISES))
