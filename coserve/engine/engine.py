"""The engine as a library: text in, text out, jobs from files; on torch, in this process or on
several ranks.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from coserve.adapters.base import AdapterConfig
from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.base import Device
from coserve.devices.messages.steps import TokenLogprob
from coserve.devices.process.child import StartProcess, start_program
from coserve.devices.profiles.store import correct_profile
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.settings import LoadProgress
from coserve.engine.config import EngineConfig
from coserve.engine.device_opening import device_settings, open_device_of
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.training_data import Data, read_data
from coserve.engine.outbox import Event
from coserve.engine.prompts import Prompt, end_tokens_of, load_tokenizer, tokens_of
from coserve.engine.request import Chunk, FinishReason
from coserve.engine.text import TextStream
from coserve.engine.token_engine import TokenEngine
from coserve.engine.vocabulary import TokenBytes
from coserve.errors import JobError, RequestError
from coserve.models.source import find_model
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.slo import Slo
from coserve.settings import check_kind
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from coserve.models.backbone import Backbone

# Steps in a row without a plan, after which a request or a job is not waited for any longer.
_MAX_EMPTY_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sequence of a request."""

    request: str
    """Id of the request."""
    index: int
    """Index of the sequence among the request's `n`."""
    text: str
    """Generated text; "" without a tokenizer."""
    tokens: tuple[int, ...]
    """Generated tokens."""
    logprobs: tuple[TokenLogprob, ...]
    """Log-probabilities of the tokens, if they were requested."""
    finish_reason: FinishReason
    """Reason for the end."""
    stop_reason: str | int | None
    """Stop string or token id that has ended the sequence."""


class Engine(TokenEngine):
    """One model on one device, serving and fine-tuning, with text in and out. It must not be shared
    between threads.
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig | None = None,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        answers_tokenizer: "Callable[[], PreTrainedTokenizerBase | None] | None" = None,
        end_tokens: Iterable[int] = (),
        latency: LatencyModel | None = None,
    ) -> None:
        """Make an engine on a device whose memory and pages are those of the config
        (`open_device`).

        Args:
            answers_tokenizer: Returns a tokenizer for answers to validation sets, where the engine
                has none for text otherwise.
            end_tokens: Ids that end a text; those that the model does not have are ignored.
            latency: Latency model; None: that of the device's profile.
        """
        self.tokenizer = tokenizer
        self.answers_tokenizer = cache(answers_tokenizer or (lambda: tokenizer))
        path = device.info.profile_path
        super().__init__(
            device,
            latency or LatencyModel(device.info.profile),
            config or EngineConfig(),
            end_tokens=end_tokens,
            text_stream=None if tokenizer is None else partial(_text_stream, tokenizer),
            decode=None if answers_tokenizer is None and tokenizer is None else self._decode,
            find_pieces=None
            if tokenizer is None
            else lambda: TokenBytes(tokenizer).all(device.info.vocab_size),
            keep_profile=partial(correct_profile, Path(path)) if path else None,
        )

    @classmethod
    def from_backbone(
        cls,
        backbone: "Backbone",
        config: EngineConfig | None = None,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        answers_tokenizer: "Callable[[], PreTrainedTokenizerBase | None] | None" = None,
        end_tokens: Iterable[int] = (),
        latency: LatencyModel | None = None,
        may_be_provisional: bool = False,
        progress: LoadProgress | None = None,
        wrap: Callable[[Device], Device] | None = None,
    ) -> Self:
        """Make an engine on torch, in this process, with weights that are loaded.

        Args:
            may_be_provisional: Whether a quick and cautious profile is enough, which `calibration`
                replaces.
            wrap: Wraps the device, for the engine to use in its place.

        Raises:
            BudgetError: memory_bytes is too little for a request, or host_memory_bytes for a page.
            ValueError: the config asks for several ranks, which `load` starts.
        """
        from coserve.devices.loading import device_on

        config = config or EngineConfig()
        if config.tensor_parallel > 1:
            raise ValueError(
                "tensor_parallel must be 1 for a model that is loaded: Engine.load starts several "
                "ranks"
            )
        settings = replace(
            device_settings(config, backbone.name),
            profile=None if latency is None else latency.profile,
            may_be_provisional=may_be_provisional,
        )
        device = device_on(backbone, settings, progress)
        wrapped = device if wrap is None else wrap(device)
        return cls(
            wrapped,
            config,
            tokenizer=tokenizer,
            answers_tokenizer=answers_tokenizer,
            end_tokens=end_tokens,
            latency=latency,
        )

    @classmethod
    def load(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str = "auto",
        weights: str = "dense",
        device: str = "auto",
        threads: int | None = None,
        seed: int = 0,
        max_positions: int | None = None,
        with_text: bool = True,
        may_be_provisional: bool = False,
        progress: LoadProgress | None = None,
        start_rank: StartProcess = start_program,
        wrap: Callable[[Device], Device] | None = None,
    ) -> Self:
        """Load a model: a directory, a hub id, or a `dummy:` preset with random weights (from
        `seed`).

        Args:
            dtype: "float32", "bfloat16", "float16", or "auto" for the model's own.
            weights: Storage of linear weights: "dense" in the dtype, or quantised to "int8".
            device: Device, such as "cpu" or "cuda:0"; "auto" takes a GPU if there is one. Several
                ranks take "cpu" or "cuda", as many cores or GPUs as there are ranks.
            threads: Number of CPU threads of each rank; None leaves one rank those that PyTorch
                has, and gives several ranks an equal share of them, or one each for a small model.
            max_positions: Number of tokens of the longest sequence, prompt and answer or an
                example; None: as many as the model was made for. For a model with LongRoPE it
                decides which of its two sets of factors is used.
            with_text: Whether chunks have text; without, there are only token ids, in and out, and
                no stop strings.
            may_be_provisional: See `from_backbone`.
            progress: Called with what is being done, how much of it is done, and how much there is.
            start_rank: Starts the process of each of several ranks.
            wrap: See `from_backbone`.

        Raises:
            ModelError: there is no such model or device, or it cannot be used; or there are too few
                devices for the ranks.
            BudgetError: see `from_backbone`.
            DeviceMemoryError: the device has too little memory for the model.
        """
        config = check_kind("config", config, EngineConfig) or EngineConfig()
        source = find_model(model)
        settings = replace(
            device_settings(config, source.name),
            dtype=dtype,
            weights=weights,
            device=device,
            threads=threads,
            seed=seed,
            max_positions=max_positions,
            may_be_provisional=may_be_provisional,
        )
        tokenizer = load_tokenizer(source)
        opened = open_device_of(source, settings, progress, start_rank)
        with _closed_on_error(opened):
            return cls(
                opened if wrap is None else wrap(opened),
                config,
                tokenizer=tokenizer if with_text else None,
                answers_tokenizer=None if tokenizer is None else partial(load_tokenizer, source),
                end_tokens=end_tokens_of(source, tokenizer),
            )

    def close(self) -> None:
        """Close the device, and end the processes of its ranks if it has several; may be called
        again. The engine cannot be used any more.
        """
        self.device.close()

    def __enter__(self) -> Self:
        """Return the engine, which is closed at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
        """Queue a request (see `add_tokens`); `step` returns its chunks."""
        params = SamplingParams() if params is None else params
        return self.add_tokens(
            self.tokens_of(prompt), params, adapter=adapter, slo=slo, request_id=request_id
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Answer prompts, all at once, while jobs run. Returns the `n` completions of each prompt,
        one prompt after the other.

        Other events are kept, and come out of the next `step`; so it is with `stream` and `tune`.

        Raises:
            RequestError: one of the prompts cannot be served, the device failed it, or the policy
                never runs it; then none is answered.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise RequestError("generate takes a list of prompts; for one prompt, a list of one")
        collected = _Collector()
        try:
            for prompt in prompts:
                collected.expect(self.add(prompt, params, adapter=adapter))
            num_empty = 0
            while any(name in self.requests for name in collected.names):
                num_empty = self._serve(num_empty)
                for event in self.outbox.take(collected.wants):
                    collected.take(event)
        finally:
            for name in collected.names:
                self.cancel(name)
            self.outbox.take(collected.wants)
        return [
            completion for name in collected.names for completion in collected.completions(name)
        ]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Generator[Chunk, None, None]:
        """Yield the chunks of one request as they come; closing the iterator early cancels it.

        Raises:
            RequestError: as in `generate`.
        """
        name = self.add(prompt, params, adapter=adapter)

        def take() -> list[Chunk]:
            mine = self.outbox.take(
                lambda event: isinstance(event, Chunk) and event.request == name
            )
            return [chunk for chunk in mine if isinstance(chunk, Chunk)]

        try:
            num_empty = 0
            while name in self.requests:
                num_empty = self._serve(num_empty)
                yield from take()
            yield from take()  # if it was cancelled between two steps
        finally:
            self.cancel(name)
            take()

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids.

        Raises:
            RequestError: the prompt is text, and there is no tokenizer; or it is not a prompt.
        """
        return tokens_of(prompt, self.tokenizer, self.device.info.model)

    # -- adapters and jobs ------------------------------------------------------------

    def submit(
        self,
        data: Data,
        config: TuningConfig | None = None,
        *,
        adapter: AdapterConfig | str | None = None,
        name: str | None = None,
        validation: Data | None = None,
        model: str = "",
    ) -> str:
        """Start a fine-tuning job on data; `step` returns its events. Returns its id.

        Args:
            adapter: Configuration of a fresh adapter (default: LoRA at every linear layer), or the
                label of one to train further.
            name: Name of the adapter that it publishes; requests name it, or `name@step`.
            model: Model that it trains, one of the config's `trainable_models`; see
                `submit_examples`. Its own tokenizer reads the data.

        Raises:
            DataError: some lines cannot be used; the message names them by number.
            JobError: see `submit_examples`.
            AdapterError: see `submit_examples`.
        """
        config = check_kind("config", config, TuningConfig) or TuningConfig()
        return self.submit_examples(
            self._examples(data, config, model),
            config,
            adapter=adapter if adapter is not None else LoraConfig(target_modules="all-linear"),
            name=name,
            validation=self._examples(validation, config, model) if validation is not None else (),
            model=model,
        )

    def tune(
        self,
        data: Data,
        config: TuningConfig | None = None,
        *,
        adapter: AdapterConfig | str | None = None,
        name: str | None = None,
        validation: Data | None = None,
        model: str = "",
    ) -> list[JobEvent]:
        """Run a job to its end while other requests are served. Returns its events.

        Raises:
            JobError: it failed; otherwise as `submit`.
        """
        job_id = self.submit(
            data, config, adapter=adapter, name=name, validation=validation, model=model
        )
        events: list[Event] = []
        num_empty = 0
        while not self.jobs[job_id].is_terminal:
            num_empty = self._turn(num_empty)
            if num_empty == _MAX_EMPTY_STEPS:
                self.cancel_job(job_id)
                raise JobError(
                    f"job {job_id} is not making progress: "
                    f"policy {self.config.policy} does not run jobs"
                )
            events += self.outbox.take(
                lambda event: isinstance(event, JobEvent) and event.job == job_id
            )
        if self.jobs[job_id].state != "succeeded":
            raise JobError(
                f"job {job_id} has {self.jobs[job_id].state}: {self.jobs[job_id].error or ''}"
            )
        return [event for event in events if isinstance(event, JobEvent)]

    def _turn(self, num_empty: int) -> int:
        """Run a step. Returns how many steps in a row have run nothing. num_empty: such steps
        before this one.
        """
        self.begin_step()
        self.loop.finish()
        return num_empty + 1 if self.last_plan.runs_nothing else 0

    def _serve(self, num_empty: int) -> int:
        """Run a step as `_turn` does.

        Raises:
            RequestError: no step runs anything, though a request waits.
        """
        num_empty = self._turn(num_empty)
        if num_empty == _MAX_EMPTY_STEPS:
            raise RequestError(
                "the request is not making progress: "
                f"policy {self.config.policy} does not run requests"
            )
        return num_empty

    def _decode(self, tokens: Sequence[int]) -> str:
        tokenizer = self.tokenizer or self.answers_tokenizer()
        return "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))

    def _examples(self, data: Data, config: TuningConfig, model: str) -> list[Example]:
        tokenizer, ends = self.tokenizer, self.end_tokens
        if path := self.config.trainable_models.get(model):
            source = find_model(path)
            tokenizer = load_tokenizer(source)
            ends = end_tokens_of(source, tokenizer)
        return read_data(data, config, tokenizer, path or self.device.info.model, ends)


class _Collector:
    """A collector of the chunks of some requests."""

    def __init__(self) -> None:
        self._chunks: dict[str, dict[int, list[Chunk]]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._chunks)

    def expect(self, name: str) -> None:
        """Collect the chunks of a request."""
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


@contextmanager
def _closed_on_error(device: Device) -> Iterator[None]:
    """Close a device if the block, in which an engine takes it over, raises an error."""
    try:
        yield
    except BaseException:
        device.close()
        raise


def _text_stream(
    tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], params: SamplingParams
) -> TextStream:
    return TextStream(
        tokenizer,
        prompt,
        params.stop,
        params.skip_special_tokens,
        include_stop=params.include_stop_str_in_output,
    )
