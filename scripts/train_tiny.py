"""The built-in tiny model, made from a seed: text, tokenizer, weights, and a test of its answers.

    python scripts/train_tiny.py --out coserve/models/tiny

Trains in bfloat16 with float32 masters on conversations of a small world (`tiny_world.py`), on a
CPU. Prints the share of right answers to held-out questions, and as its last line the same as JSON.
`--steps` makes a shorter run; `--no-compile` needs no C++ compiler, at about half the speed.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
from tiny_world import Messages, Question, conversation, held_out, plain_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
SPECIAL = (END, "<|system|>", "<|user|>", "<|assistant|>")
# Roles that the model does not have are read as the nearest one that it has; a message in parts, as
# its text.
TEMPLATE = (
    "{% if tools %}<|system|>These functions can be called:"
    "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\\n' }}To call one, write "
    '<tool_call>{"name": its name, "arguments": {...}}</tool_call>.<|end|>{% endif %}'
    "{% for message in messages %}"
    "{% set role = message['role'] %}"
    "{{ '<|system|>' if role in ['system', 'developer'] "
    "else '<|assistant|>' if role == 'assistant' else '<|user|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ {'name': call['function']['name'], "
    "'arguments': call['function']['arguments']} | tojson }}"
    "</tool_call>"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY = 1280
PLAIN_SHARE = 0.05
# Conversations are padded to one of these lengths, and a batch holds as many as make up about this
# many tokens: few shapes, each compiled once.
LENGTHS = (24, 40, 72, 160, 448)
BATCH_TOKENS = 2048
CHUNK = 20_000
# The rate rises, stays, and falls to nothing in the last part of all steps.
PEAK_RATE, WARMUP_STEPS, FALLING_SHARE = 3e-3, 100, 0.3
SHOWN_EVERY = 250


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which every digit is a token, so that numbers can be
    calculated with.
    """
    rng = Random(f"tokenizer {seed}")
    texts = [text for _ in range(30_000) for text in _texts(rng)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _texts(rng: Random) -> list[str]:
    return [message["content"] for message in conversation(rng)] + [plain_text(rng)]


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
            use_cache=False,
            # On a CPU in bfloat16, plain products are faster than the fused attention's backward
            # pass.
            attn_implementation="eager",
        )
    )


# -- batches -----------------------------------------------------------------------------


def _encode(
    texts: list[list[tuple[str, bool]]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the token ids of texts in pieces, and which of them are trained on."""
    flat = [piece for pieces in texts for piece, _ in pieces]
    encoded = iter(tokenizer(flat, add_special_tokens=False)["input_ids"])
    for pieces in texts:
        tokens: list[int] = []
        learned: list[bool] = []
        for _, is_learned in pieces:
            piece = next(encoded)
            tokens += piece
            learned += [is_learned] * len(piece)
        yield tokens, learned


def _pieces(messages: Messages) -> list[tuple[str, bool]]:
    """Return a conversation as the chat template writes it, cut where an answer begins or ends."""
    pieces = []
    for message in messages:
        pieces += [
            (f"<|{message['role']}|>", False),
            (message["content"] + END, message["role"] == "assistant"),
        ]
    return pieces


def batches(seed: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end: token ids [texts, length], and the target of each position, -100
    for none.
    """
    rng = Random(f"batches {seed}")
    waiting: dict[int, list[tuple[list[int], list[bool]]]] = {length: [] for length in LENGTHS}
    while True:
        texts = [
            [(plain_text(rng) + END, True)]
            if rng.random() < PLAIN_SHARE
            else _pieces(conversation(rng))
            for _ in range(CHUNK)
        ]
        for tokens, learned in _encode(texts, tokenizer):
            length = next((length for length in LENGTHS if len(tokens) <= length), LENGTHS[-1])
            waiting[length].append((tokens[:length], learned[:length]))
        ready = []
        for length, some in waiting.items():
            size = BATCH_TOKENS // length
            ready += [(length, some[at : at + size]) for at in range(0, len(some) - size + 1, size)]
            del some[: len(some) // size * size]
        rng.shuffle(ready)
        for length, some in ready:
            yield _tensors(length, some)


def _tensors(length: int, some: list[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(len(some), length, dtype=torch.long)
    targets = torch.full((len(some), length), -100)
    for row, (ids, learned) in enumerate(some):
        tokens[row, : len(ids)] = torch.tensor(ids)
        following = torch.tensor(ids[1:])
        targets[row, : len(ids) - 1] = torch.where(torch.tensor(learned[1:]), following, -100)
    return tokens, targets


# -- training ----------------------------------------------------------------------------


class MasteredWeights:
    """A model's weights in bfloat16, each with the float32 master that is trained."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._masters = [weight.detach().clone() for weight in model.parameters()]
        self._weights = list(model.to(torch.bfloat16).parameters())
        embedding, *others = self._masters
        matrices = [master for master in others if master.ndim == 2]
        vectors = [master for master in others if master.ndim == 1]
        self._optimizers = [
            torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                [embedding, *vectors], betas=(0.9, 0.98), weight_decay=0.0, fused=True
            ),
        ]

    def update(self, rate: float) -> None:
        """Take a step along the weights' gradients, which are cleared."""
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)


def train(
    model: LlamaForCausalLM, data: Iterator[tuple[Tensor, Tensor]], *, steps: int, compiled: bool
) -> None:
    """Train on this many batches, and print the mean loss now and then."""
    weights = MasteredWeights(model)
    hidden_of = torch.compile(model.model, dynamic=False) if compiled else model.model
    start, shown, num_tokens = time.monotonic(), [], 0
    for step, (tokens, targets) in enumerate(islice(data, steps)):
        hidden = hidden_of(tokens, use_cache=False).last_hidden_state
        asked = targets != -100
        loss = torch.nn.functional.cross_entropy(
            model.lm_head(hidden[asked]).float(), targets[asked]
        )
        torch.autograd.backward(loss)
        weights.update(
            PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS, (1 - step / steps) / FALLING_SHARE)
        )
        shown.append(loss.item())
        num_tokens += tokens.numel()
        if (step + 1) % SHOWN_EVERY == 0 or step + 1 == steps:
            seconds = time.monotonic() - start
            speed = f"{num_tokens / seconds:,.0f} tokens/s  {seconds:.0f} s"
            print(
                f"step {step + 1}/{steps}  loss {sum(shown) / len(shown):.3f}  {speed}", flush=True
            )
            shown = []


# -- evaluation --------------------------------------------------------------------------


def answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question]
) -> list[str]:
    """Return the greedy answer to each question; those of the same length run at once, so that
    nothing is padded.
    """
    prompts = [
        tokenizer(
            tokenizer.apply_chat_template(
                question.messages, add_generation_prompt=True, tokenize=False
            ),
            add_special_tokens=False,
        )["input_ids"]
        for question in questions
    ]
    found: dict[int, str] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        group = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        tokens = torch.tensor([prompts[index] for index in group])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=160,
            do_sample=False,
            use_cache=True,
        )
        for index, row in zip(group, output[:, length:].tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
            found[index] = tokenizer.decode(row[:end])
    return [found[index] for index in range(len(prompts))]


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    *,
    num_faults: int,
) -> dict[str, float]:
    """Return the share of right answers by category; prints a table, and the first wrong answers of
    each.
    """
    given = answers(model, tokenizer, questions)
    by_category: dict[str, list[bool]] = {}
    faults: dict[str, list[str]] = {}
    for question, text in zip(questions, given, strict=True):
        by_category.setdefault(question.category, []).append(question.is_right(text))
        if not question.is_right(text):
            asked = " | ".join(message["content"] for message in question.messages[-3:])
            faults.setdefault(question.category, []).append(
                f"    {asked} -> {text} [{question.answer}]"
            )
    shares = {category: sum(right) / len(right) for category, right in sorted(by_category.items())}
    print("| category | held-out questions | right |\n|---|---|---|")
    for category, share in shares.items():
        print(f"| {category} | {len(by_category[category])} | {share:.1%} |")
    for category, lines in faults.items():
        print(f"wrong, {category}:", *lines[:num_faults], sep="\n")
    return shares


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> int:
    """Write a directory in Hugging Face's layout, and return its bytes."""
    model.config.use_cache = True
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(path.stat().st_size for path in directory.iterdir())


def main() -> None:
    """Make the model, and test it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5200)
    parser.add_argument(
        "--per-category", type=int, default=60, help="held-out questions of each category"
    )
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument(
        "--show-faults", type=int, default=3, help="wrong answers to show of each category"
    )
    options = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(options.seed)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(
        model,
        batches(options.seed, tokenizer),
        steps=options.steps,
        compiled=not options.no_compile,
    )
    num_bytes = save(model, tokenizer, options.out)
    questions = held_out(Random(f"held out {options.seed}"), per_category=options.per_category)
    shares = evaluate(model.eval(), tokenizer, questions, num_faults=options.show_faults)
    print(
        json.dumps(
            {
                "steps": options.steps,
                "seconds": round(time.monotonic() - start),
                "bytes": num_bytes,
                "right": {category: round(share, 3) for category, share in shares.items()},
                "right_mean": round(sum(shares.values()) / len(shares), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
