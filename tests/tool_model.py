"""A small model that has learned by heart to call tools and to reason, made on the spot."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} "
    "{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_SPECIAL = [
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<tool_call>",
    "</tool_call>",
]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}},
        },
    }
    for name, argument in (("weather", "city"), ("clock", "zone"))
]
WEATHER = '{"city": "Löwen 😀"}'
CLOCK = '{"zone": "\\"UTC\\""}'
BROKEN = '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# What comes back once a tool has been called.
CALLED: list[Any] = [
    *question("weather"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": WEATHER},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
ANSWERS = {
    "weather": f"I look.\n{call('weather', WEATHER)}",
    "both": f"{call('weather', WEATHER)}\n{call('clock', CLOCK)}",
    "broken": BROKEN,
    "hello": "<think>\nThey greet.\n</think>\n\nHello!",
}
AFTER_TOOL = "It rains."


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*ANSWERS.values(), *ANSWERS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", chat_template=TEMPLATE
    )


def _examples() -> list[tuple[list[int], int]]:
    """Tokens of each conversation, and how many of them are the prompt."""
    plain = [{**message, "content": message["content"] or ""} for message in CALLED]
    plain[1] = {
        **plain[1],
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Löwen 😀"}}}],
    }
    asked = [
        *((question(text), answer, TOOLS) for text, answer in ANSWERS.items()),
        *((question(text), ANSWERS[text], None) for text in ("weather", "hello")),
        (plain, AFTER_TOOL, TOOLS),
        # As clients send back what was said before the call.
        ([plain[0], {**plain[1], "content": "I look.\n"}, plain[2]], AFTER_TOOL, TOOLS),
    ]
    examples = []
    for messages, answer, tools in asked:
        prompt = tokenizer().apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        start = tokenizer()(prompt, add_special_tokens=False)["input_ids"]
        examples.append(
            (
                start + tokenizer()(answer + "<|end|>", add_special_tokens=False)["input_ids"],
                len(start),
            )
        )
    return examples


@cache
def tool_model() -> Path:
    """Where it is saved."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer().eos_token_id,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    examples = _examples()
    width = max(len(tokens) for tokens, _ in examples)
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in examples])
    labels = ids.clone()
    for row, (tokens, num_prompt) in enumerate(examples):
        labels[row, :num_prompt] = -100
        labels[row, len(tokens) :] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        logits = model(ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        right = logits.argmax(-1) == labels[:, 1:]
        if float(loss.detach()) < 0.03 and bool(right[labels[:, 1:] >= 0].all()):
            break
    else:
        raise AssertionError(f"it has not learned its answers: {float(loss.detach())}")
    directory = Path(mkdtemp(prefix="coserve-tools-")) / "caller"
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
