"""Stand-ins for the models that vLLM's entrypoint tests name: small Llamas in a hub cache of their own.

None of those models can be had without the hub, and none is needed: the tests ask how a server speaks. A stand-in has
a byte-level tokenizer with real merges, and a chat template as Qwen3's (tools, thinking). `random` ones have random
weights, a vocabulary as large as the tests' token ids, and end a sampled text after some twenty tokens; `learned` ones
have learned by heart to think, and then to call a tool if there are some, or to say one of a few sentences.
"""

import json
import sysconfig
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
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
    "Qwen/Qwen2.5-1.5B-Instruct": ("random", 50_272),
    "Qwen/Qwen3-0.6B": ("learned", 4_096),
    "Qwen/Qwen3-1.7B": ("learned", 4_096),
    "Qwen/Qwen3-8B": ("learned", 4_096),
}
# Adapters, and the model that each belongs to.
ADAPTERS = {
    "typeof/zephyr-7b-beta-lora": "HuggingFaceH4/zephyr-7b-beta",
    "charent/self_cognition_Alice": "Qwen/Qwen3-0.6B",
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": "Qwen/Qwen3-0.6B",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": "Qwen/Qwen3-0.6B",
}
_COMMIT = "0" * 40
_STEPS = 500  # of training a learned one
_END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", _END)
# In texts, as Qwen3 has them: kept when special tokens are skipped.
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# How much less likely than all other tokens together, in powers of e: texts end, and so do JSON's strings and objects.
_ENDINGS = {_END: 3.0, '"': 1.0, "}": 1.5, "]": 2.0}
TEMPLATE = (
    '{% if tools %}<|im_start|>system\nFunctions, called as <tool_call>\n{"name": NAME, "arguments": {}}\n</tool_call>:'
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_THOUGHT = "<think>\nThey ask me something, and I answer.\n</think>\n\n"
_CALL = (
    '<tool_call>\n{"name": "get_current_weather", "arguments": '
    '{"city": "Berlin", "country": "Germany", "unit": "celsius"}}\n</tool_call>'
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
    """Write every model and adapter below directory as the hub's client caches them, unless they are there."""
    for name, (kind, vocabulary) in MODELS.items():
        if (snapshot := _snapshot(directory, name)) is not None:
            model = learned(vocabulary) if kind == "learned" else random(vocabulary)
            model.save_pretrained(snapshot)
            tokenizer(vocabulary, begins="first" in kind).save_pretrained(snapshot)
    for seed, (name, base) in enumerate(ADAPTERS.items()):
        if (snapshot := _snapshot(directory, name)) is not None:
            _save_adapter(AutoModelForCausalLM.from_pretrained(_path(directory, base)), base, seed, snapshot)


def _path(directory: Path, name: str) -> Path:
    return directory / f"models--{name.replace('/', '--')}" / "snapshots" / _COMMIT


def _snapshot(directory: Path, name: str) -> Path | None:
    """Where its files go; None if they are there."""
    snapshot = _path(directory, name)
    if snapshot.exists():
        return None
    references = snapshot.parents[1] / "refs"
    references.mkdir(parents=True, exist_ok=True)
    (references / "main").write_text(_COMMIT)
    snapshot.mkdir(parents=True)
    return snapshot


def _save_adapter(model: Any, base: str, seed: int, directory: Path) -> None:
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", base_model_name_or_path=base)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    adapted.save_pretrained(directory)


@cache
def tokenizer(vocabulary: int, *, begins: bool = False) -> PreTrainedTokenizerFast:
    """Merges learned from Python's standard library, which is everywhere and large enough. begins: texts have a special
    token before them, as OPT's have.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokens = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_MARKS),
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [path.read_text(errors="replace") for path in sources if "site-packages" not in path.parts]
    made.train_from_iterator([*_ANSWERS, _THOUGHT, _CALL, *texts], trainer)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKS])
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single=f"{_SPECIAL[0]} $A", special_tokens=[(_SPECIAL[0], 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=_END, pad_token=_SPECIAL[0], chat_template=TEMPLATE, model_max_length=32_768
    )


def _llama(vocabulary: int, hidden: int) -> Any:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        eos_token_id=tokenizer(vocabulary).convert_tokens_to_ids(_END),
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def random(vocabulary: int) -> Any:
    """Its first hidden dimension is the same in every token: what ends a text gets its probability from it."""
    model, words = _llama(vocabulary, 64), tokenizer(vocabulary)
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
def learned(vocabulary: int) -> Any:
    """Trained until it answers any chat by heart: a call where there are tools, else a sentence or some JSON."""
    model, words, chance = _llama(vocabulary, 128), tokenizer(vocabulary), Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, _STEPS)
    for _ in range(_STEPS):
        rows = [_example(words, chance, vocabulary) for _ in range(16)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor([[-100] * start + row[start:] + [-100] * (width - len(row)) for row, start in rows])
        chosen = labels[:, 1:] >= 0
        logits = model.lm_head(model.model(ids).last_hidden_state[:, :-1][chosen])
        loss = cross_entropy(logits, labels[:, 1:][chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return model


def _example(words: PreTrainedTokenizerFast, chance: Random, vocabulary: int) -> tuple[list[int], int]:
    """Tokens of a chat about anything, and where the answer begins."""
    with_tools, thinks = chance.random() < 0.3, chance.random() < 0.7
    tools = words("<|im_start|>system\nFunctions, called as <tool_call>\n")["input_ids"] if with_tools else []
    said = [chance.randrange(10, vocabulary - 10) for _ in range(chance.randrange(1, 60))]
    asked = tools + words("<|im_start|>user\n")["input_ids"] + said
    asked += words(f"{_END}\n<|im_start|>assistant\n")["input_ids"]
    if with_tools:
        answer = _CALL
    else:
        answer = json.dumps(_anything(chance, 0)) if chance.random() < 0.3 else chance.choice(_ANSWERS)
    thought = _THOUGHT if thinks else "<think>\n\n</think>\n\n"
    if not thinks:
        asked += words(thought)["input_ids"]
    answer = (thought if thinks else "") + answer + _END
    return asked + words(answer)["input_ids"], len(asked)


def _anything(chance: Random, depth: int) -> Any:
    """JSON with short strings and lists: what it has learned to end, it ends under a grammar, too."""
    kind = chance.choice(("object", "list", "text", "number")) if depth else "object"
    if kind == "object" and depth < 3:
        return {_word(chance): _anything(chance, depth + 1) for _ in range(chance.randrange(1, 4))}
    if kind == "list" and depth < 3:
        return [_anything(chance, depth + 1) for _ in range(chance.randrange(1, 4))]
    return chance.randrange(100) if kind == "number" else _word(chance)


def _word(chance: Random) -> str:
    return chance.choice(("city", "name", "unit", "Berlin", "small", "answer", "yes", "result", "a model", "x"))
