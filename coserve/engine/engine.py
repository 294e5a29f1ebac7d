"""The engine as a library: text in, text out, jobs from files; on torch, in this process."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from coserve.adapters.base import AdapterConfig
from coserve.adapters.methods.lora import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.core import EngineCore, Event
from coserve.engine.device_memory import pool_bytes
from coserve.engine.job import JobEvent
from coserve.engine.prompts import Prompt, load_tokenizer, tokens_of
from coserve.engine.request import Chunk, FinishReason, Slo, TokenLogprob
from coserve.engine.sampling import SamplingParams
from coserve.engine.text import TextStream
from coserve.engine.torch_runner import TorchRunner
from coserve.errors import BudgetError, DataError, JobError, RequestError
from coserve.memory.kv_cache import kv_page_bytes
from coserve.models.backbone import Backbone, build_backbone, find_device
from coserve.models.source import ModelSource, find_model
from coserve.scheduling.latency import LatencyModel
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example, read_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A JSONL file, its lines (as text or as objects), or examples that are tokens already.
Data = str | Path | Iterable[str] | Iterable[Mapping[str, Any]] | Iterable[Example]

# Told what a start is at, how much of it is done, and of how much.
LoadProgress = Callable[[str, int, int], None]

# Steps without a plan after which a job is not waited for any longer.
_MOST_EMPTY_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sequence of a request, when it is over. text: "" without a tokenizer."""

    request: str
    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None


class Engine(EngineCore):
    """One model on one device, serving and fine-tuning. Not to be shared between threads."""

    def __init__(
        self,
        backbone: Backbone,
        config: EngineConfig | None = None,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        end_tokens: Iterable[int] = (),
        latency: LatencyModel | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Take the memory; the first start on a device measures its profile, which takes some seconds.

        Args:
            end_tokens: ids that end a text; those that the model does not have are of no effect.

        Raises:
            BudgetError: memory_bytes is too little for a request.
        """
        config = config or EngineConfig()
        runner = TorchRunner(backbone)
        page_bytes = kv_page_bytes(backbone, config.block_tokens)
        num_pages = (config.memory_bytes or pool_bytes(backbone.device)) // page_bytes
        if num_pages < 2:
            raise BudgetError(f"the page pool needs {2 * page_bytes} bytes or more, for two pages")
        latency = latency or LatencyModel(runner.profile(_stage(progress, "measuring this device")))
        super().__init__(runner, latency, config, num_pages=num_pages)
        self.backbone, self.tokenizer = backbone, tokenizer
        self._ends = frozenset(token for token in end_tokens if 0 <= token < backbone.architecture.vocab_size)

    @classmethod
    def load(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        seed: int = 0,
        progress: LoadProgress | None = None,
    ) -> Self:
        """Load a model: a directory, a hub id, or a `dummy:` preset with random weights (from `seed`).

        Args:
            dtype: "float32", "bfloat16", "float16", or "auto" for the model's own.
            device: such as "cpu" or "cuda:0"; "auto" takes a GPU if there is one.
            progress: told what is being done, how much of it is done, and how much there is.
        """
        source = find_model(model)
        place = find_device(device)
        weights_progress = _stage(progress, "loading weights")
        backbone = build_backbone(source, dtype=dtype, device=place, seed=seed, progress=weights_progress)
        tokenizer = load_tokenizer(source)
        ends = _end_tokens(source, tokenizer)
        return cls(backbone, config, tokenizer=tokenizer, end_tokens=ends, progress=progress)

    # -- requests -------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        slo: Slo | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request (see `add_tokens`); `step` brings its chunks."""
        tokens = self.tokens_of(prompt)
        return self.add_tokens(tokens, params or SamplingParams(), adapter=adapter, slo=slo, request_id=request_id)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> list[Completion]:
        """Answer prompts, all at once; jobs go on meanwhile. Of each prompt, its `n` completions one after the other.

        What else happens meanwhile comes out of the next `step`; so it is with `stream` and `tune`.

        Raises:
            RequestError: one of them cannot be served, or the device failed it; then none is.
        """
        if isinstance(prompts, str):
            raise RequestError("generate takes a list of prompts; for one prompt, a list of one")
        collected = _Collector()
        try:
            for prompt in prompts:
                collected.expect(self.add(prompt, params, adapter=adapter))
            while any(name in self._requests for name in collected.names):
                self._advance()
                for event in self._take(collected.wants):
                    collected.take(event)
        finally:
            for name in collected.names:
                self.cancel(name)
            self._take(collected.wants)
        return [completion for name in collected.names for completion in collected.completions(name)]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[Chunk]:
        """The chunks of one request as they come; closing the iterator early cancels it."""
        name = self.add(prompt, params, adapter=adapter)

        def take() -> list[Chunk]:
            mine = self._take(lambda event: isinstance(event, Chunk) and event.request == name)
            return [chunk for chunk in mine if isinstance(chunk, Chunk)]

        try:
            while name in self._requests:
                self._advance()
                yield from take()
            yield from take()  # if it was cancelled between two steps
        finally:
            self.cancel(name)
            take()

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids; RequestError for text without a tokenizer, or what is no prompt."""
        return tokens_of(prompt, self.tokenizer, self.backbone.name)

    def _end_tokens(self) -> frozenset[int]:
        return self._ends

    def _text_stream(self, prompt: Sequence[int], params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return super()._text_stream(prompt, params)
        return TextStream(self.tokenizer, prompt, params.stop)

    # -- adapters and jobs ------------------------------------------------------------

    def save_adapter(self, label: str, directory: str | Path) -> None:
        """Write a version (`name` or `name@step`) in PEFT's format."""
        self.runner.save_adapter(self.versions.resolve(label).key, str(directory))

    def submit(
        self,
        data: Data,
        config: TuningConfig | None = None,
        *,
        adapter: AdapterConfig | str | None = None,
        name: str | None = None,
        validation: Data | None = None,
    ) -> str:
        """Start a fine-tuning job on data; `step` brings its events. Returns its id.

        Args:
            adapter: a fresh one of this kind (default: LoRA at every linear layer), or the label of one to go on with.
            name: of the adapter that it publishes; requests name it, or `name@step`.

        Raises:
            DataError: lines that cannot be used, by number. JobError, AdapterError: see `submit_examples`.
        """
        config = config or TuningConfig()
        return self.submit_examples(
            self._examples(data, config),
            config,
            adapter=adapter if adapter is not None else LoraConfig(target_modules="all-linear"),
            name=name,
            validation=self._examples(validation, config) if validation is not None else (),
        )

    def tune(
        self,
        data: Data,
        config: TuningConfig | None = None,
        *,
        adapter: AdapterConfig | str | None = None,
        name: str | None = None,
        validation: Data | None = None,
    ) -> list[JobEvent]:
        """Run a job to its end; requests that are there go on meanwhile. Returns its events.

        Raises:
            JobError: it failed; and as `submit`.
        """
        job_id = self.submit(data, config, adapter=adapter, name=name, validation=validation)
        events: list[Event] = []
        num_empty = 0
        while not self.jobs[job_id].is_terminal:
            self._advance()
            num_empty = num_empty + 1 if self.last_plan.is_empty else 0
            if num_empty == _MOST_EMPTY_STEPS:
                self.cancel_job(job_id)
                raise JobError(f"job {job_id} does not move on: policy {self.config.policy} runs no jobs")
            events += self._take(lambda event: isinstance(event, JobEvent) and event.job == job_id)
        if self.jobs[job_id].state != "succeeded":
            raise JobError(f"job {job_id} has {self.jobs[job_id].state}: {self.jobs[job_id].error or ''}")
        return [event for event in events if isinstance(event, JobEvent)]

    def _examples(self, data: Data, config: TuningConfig) -> list[Example]:
        if isinstance(data, str | Path):
            try:
                # Not splitlines: JSON's strings may hold what Unicode calls the end of a line.
                lines: list[Any] = Path(data).read_text("utf-8").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{data} cannot be read as text: {error}") from None
        else:
            lines = list(data)
            if all(isinstance(line, Example) for line in lines):
                return [_cut(example, config.max_sequence_length) for example in lines]
        if self.tokenizer is None:
            raise DataError(f"{self.backbone.name} has no tokenizer: examples must be token ids")
        texts = [_json_line(number, line) for number, line in enumerate(lines, 1)]
        return read_examples(texts, self.tokenizer, max_sequence_length=config.max_sequence_length)


class _Collector:
    """Puts the chunks of some requests together."""

    def __init__(self) -> None:
        self._chunks: dict[str, dict[int, list[Chunk]]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._chunks)

    def expect(self, name: str) -> None:
        """Its chunks are wanted."""
        self._chunks[name] = {}

    def wants(self, event: Event) -> bool:
        return isinstance(event, Chunk) and event.request in self._chunks

    def take(self, event: Event) -> None:
        assert isinstance(event, Chunk)
        self._chunks[event.request].setdefault(event.index, []).append(event)
        if event.finish_reason == "error":
            raise RequestError(f"request {event.request}: {event.error}")

    def completions(self, name: str) -> Iterator[Completion]:
        for index, chunks in sorted(self._chunks[name].items()):
            last = chunks[-1]
            assert last.finish_reason is not None
            yield Completion(
                request=name,
                index=index,
                text="".join(chunk.text for chunk in chunks),
                tokens=tuple(token for chunk in chunks for token in chunk.tokens),
                logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
            )


def _stage(progress: LoadProgress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(stage, done, total)


def _json_line(number: int, line: Any) -> str:
    if isinstance(line, str):
        return line
    try:
        return json.dumps(line)
    except (TypeError, ValueError) as error:
        raise DataError(f"line {number}: is no JSON: {error}") from None


def _cut(example: Example, length: int) -> Example:
    if len(example.tokens) <= length:
        return example
    return Example(tokens=example.tokens[:length], trained=example.trained[:length], truncated=True)


def _end_tokens(source: ModelSource, tokenizer: "PreTrainedTokenizerBase | None") -> set[int]:
    """Ids that end a text, of all that say so: the configuration, the one for generation, the tokenizer."""
    named = [getattr(source.config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    if source.directory is not None:
        with suppress(OSError, ValueError, AttributeError):
            named.append(json.loads((source.directory / "generation_config.json").read_text()).get("eos_token_id"))
    ids = [one for value in named for one in (value if isinstance(value, list | tuple) else [value])]
    return {one for one in ids if isinstance(one, int)}
