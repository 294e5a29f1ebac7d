"""A small model with a tokenizer and a chat template, and a real `coserve up` that serves it."""

import copy
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import torch
from forked import ForkedCommand
from openai import OpenAI
from peft import LoraConfig, get_peft_model
from processes import children_of, is_sandbox
from support import random_weights_
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from coserve.server.tenancy.keys import digest_of

_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
_TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today?",
    "One copy of the weights serves and learns at the same time. Ünïcödé — 日本語 😀 12345 67890",
]
START_S = 120.0


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text, and tokens that are parts of characters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", chat_template=_TEMPLATE
    )


@cache
def model() -> Any:
    """The transformers model."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer().eos_token_id,
        bos_token_id=None,
    )
    return random_weights_(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ).eval()


@cache
def model_directory() -> Path:
    """Where it is saved, as the hub lays models out."""
    directory = Path(mkdtemp(prefix="coserve-served-")) / "small"
    model().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def _child_of(pid: int) -> int:
    """Return the only child that is no sandbox."""
    children = [child for child in children_of(pid) if not is_sandbox(child)]
    assert len(children) == 1, children
    return children[0]


class Served:
    """A server in a process of its own."""

    def __init__(
        self,
        *options: str,
        home: Path | None = None,
        model: str | None = None,
        max_files: int | None = None,
        before: str = "",
    ) -> None:
        """max_files: that the server's process may have open. before: Python that it runs first."""
        self._clients: dict[str, OpenAI] = {}
        self.home = home or Path(mkdtemp(prefix="coserve-home-"))
        self.home.mkdir(parents=True, exist_ok=True)
        # Of its own, so that a test sees what this server leaves over, and no other one's.
        self.temporary = Path(mkdtemp(prefix="coserve-tmp-"))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "TMPDIR": str(self.temporary),
        }
        self.log = self.home / "server.log"
        self.process = ForkedCommand(
            *("up", model or str(model_directory()), "--port", "0"),
            *(
                "--dtype",
                "float32",
                "--memory",
                "16MB",
                "--measure-first",
                "--home",
                str(self.home),
                *options,
            ),
            environment=environment,
            stderr=self.log,
            max_files=max_files,
            before=before,
        )
        self.start_line = self._first_line()
        found = re.search(r"(https?://\S+)/v1", self.start_line)
        assert found, self.start_line
        self.url = found[1]

    def _first_line(self) -> str:
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.stop()
            raise AssertionError(f"the server did not start: {self.log.read_text()}")
        return line

    def logged(self) -> str:
        """Return what it has logged, without the lines that every start has."""
        lines = self.log.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if "coserve.start: " not in line)

    def client(self, api_key: str = "none") -> OpenAI:
        """The real client; without its own repeats, so that tests see the first answer."""
        if api_key not in self._clients:
            self._clients[api_key] = OpenAI(
                base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60
            )
        return self._clients[api_key]

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **settings)

    def post(self, path: str, **settings: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=60, **settings)

    def fork_server_pid(self) -> int:
        """Of the process that forks engines."""
        return _child_of(self.process.pid)

    def sandbox_pid(self) -> int | None:
        """Return the process in which the server tries grammars, if there is one now."""
        return next((child for child in children_of(self.process.pid) if is_sandbox(child)), None)

    def engine_pid(self) -> int:
        """Of the engine's process."""
        return _child_of(self.fork_server_pid())

    def wait_until(self, question: Any, *, limit_s: float = 60.0) -> Any:
        """Ask until the answer is true; what it is."""
        until_s = time.monotonic() + limit_s
        while not (answer := question()):
            assert time.monotonic() < until_s, (
                f"it never came true; the log: {self.log.read_text()}"
            )
            time.sleep(0.02)
        return answer

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; its status."""
        for client in self._clients.values():
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self.process.stdout.close()
        return self.process.wait()


@contextmanager
def serving(*options: str, **settings: Any) -> Iterator[Served]:
    """A server as long as it is needed."""
    served = Served(*options, **settings)
    try:
        yield served
    finally:
        served.stop()


def keys_file(directory: Path, text: str, **keys: str) -> Path:
    """For `--api-keys-file`: keys by tenant, and more text."""
    path = directory / "keys.toml"
    lines = [f'"{digest_of(key)}" = "{tenant}"' for tenant, key in keys.items()]
    path.write_text("\n".join(["[keys]", *lines, text]))
    return path


def is_alive(pid: int) -> bool:
    """Whether a process is there, and not only its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def chat_tokens(text: str) -> list[int]:
    """Of a chat with one message."""
    rendered = tokenizer().apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer()(rendered, add_special_tokens=False)["input_ids"])


def expected(
    prompt: list[int], max_tokens: int, model_: Any = None
) -> tuple[list[int], list[float]]:
    """Transformers' greedy tokens, up to the end of the text, and their log-probabilities."""
    network = model_ or model()
    ids, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(max_tokens):
            scores = network(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            token = int(scores.argmax())
            ids.append(token)
            logprobs.append(float(scores[token]))
            if token == tokenizer().eos_token_id:
                break
    return ids[len(prompt) :], logprobs


def prompt_ranks(prompt: list[int]) -> list[int]:
    """By transformers' scores, where each token of a prompt but the first stands among all that
    could come there."""
    with torch.inference_mode():
        scores = model()(torch.tensor([prompt])).logits[0, :-1].float()
    own = scores.gather(1, torch.tensor(prompt[1:])[:, None])
    return (scores >= own).sum(-1).tolist()  # type: ignore[no-any-return]


@cache
def adapter_root() -> Path:
    """Below it lie directories that the server may read."""
    return Path(mkdtemp(prefix="coserve-adapters-"))


@cache
def peft_model(name: str = "pirate", *, seed: int = 1) -> Any:
    """A LoRA with random weights on the model, saved below `adapter_root`."""
    made = get_peft_model(
        copy.deepcopy(model()),
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj", "down_proj"],
            task_type="CAUSAL_LM",
        ),
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in made.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    made.save_pretrained(adapter_root() / name)
    return made.eval()
