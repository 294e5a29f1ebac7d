"""Requests for tokens: their parameters, their chunks, and their token counts."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self
from uuid import uuid4

from coserve.devices.grammars.grammar import CANNOT_FOLLOW
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import AddRequest
from coserve.engine.prompts import Prompt
from coserve.engine.request import Chunk
from coserve.errors import CoserveError
from coserve.jobs.records import AdapterRecord
from coserve.protocol.messages import Ready
from coserve.scheduling.slo import Slo
from coserve.server.bodies.schemas import SamplingBody, StreamOptions
from coserve.server.bodies.texts import check_texts
from coserve.server.errors import ApiError, as_api_error, not_found
from coserve.server.generation.context import GenerationContext
from coserve.server.text.prompts import Prompts, num_characters

# Fields of SamplingParams that a body has by the same name.
_SAME = (
    *(
        "temperature",
        "top_p",
        "n",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "top_k",
        "min_p",
    ),
    *(
        "repetition_penalty",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "include_stop_str_in_output",
    ),
    "cache_salt",
)
# JSON has no infinity; OpenAI writes this for a token that cannot come.
_MIN_LOGPROB = -9999.0
# Maximum number of wrong values that an error message names.
_MAX_NAMED = 8


class HasPriority(Protocol):
    """A body with a priority."""

    @property
    def priority(self) -> int | None:
        """Priority; the lowest goes first."""
        ...


# OpenAI takes a top_p of 0, and means the likeliest token: so little probability only that one has.
_MIN_TOP_P = 1e-6


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Prompts that go to the engine together, one request each.

    The choices of the answer are their sequences.
    """

    id: str
    """Id of the answer."""
    created: int
    """Unix time that the answer shows."""
    model: str
    """Name of the model that the answer shows."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""
    params: SamplingParams
    """Parameters of sampling."""
    slo: Slo
    """SLO by which it is judged."""
    arrival_s: float
    """Time of arrival, by the engine's clock."""
    tenant: str
    """Tenant that asks."""
    adapter: AdapterRecord | None
    """Adapter; None: the base model."""
    reader: Prompts
    """Tokenizer of the adapter or the model."""
    shown_tokens: tuple[str, ...] = ()
    """Special tokens that the answer's text keeps, for its parser."""
    priority: int = 0
    """See `AddRequest`."""
    batch_due_s: float | None = None
    """See `AddRequest`."""
    without_jobs: bool = False
    """See `AddRequest`."""

    def requests(self) -> list[AddRequest]:
        """Return the requests to the engine."""
        ref = None if self.adapter is None else self.adapter.ref
        names = (
            [self.id]
            if len(self.prompts) == 1
            else [f"{self.id}-{i}" for i in range(len(self.prompts))]
        )
        return [
            AddRequest(
                id=name,
                prompt=list(prompt),
                params=self.params,
                arrival_s=self.arrival_s,
                slo=self.slo,
                adapter=ref,
                tenant=self.tenant,
                priority=self.priority,
                batch_due_s=self.batch_due_s,
                without_jobs=self.without_jobs,
            )
            for name, prompt in zip(names, self.prompts, strict=True)
        ]


def new_id(prefix: str, separator: str = "-") -> str:
    """Return a unique id."""
    return f"{prefix}{separator}{uuid4().hex}"


async def find_model(context: GenerationContext, tenant: str, name: str) -> AdapterRecord | None:
    """Return the adapter of a model's name; None for the base.

    Raises:
        ApiError: The tenant cannot use a model of this name (404).
    """
    if name in context.models.base_names:
        return None
    check_texts(name, param="model")
    adapter = await context.models.look_up(tenant, name)
    if adapter is None:
        model = await asyncio.to_thread(context.models.only_trained, tenant, name)
        reason = "does not exist or you do not have access to it."
        if model is not None:
            reason = (
                f"is not served: this server only trains {model}; start another server with it."
            )
        raise not_found(f"The model `{name}` {reason}", param="model", code="model_not_found")
    return adapter


def sampling_params(
    body: SamplingBody, prompts: Prompts, *, max_tokens: int, vocab_size: int, **more: Any
) -> SamplingParams:
    """Return the parameters of sampling that a body asks for.

    Args:
        body: The body.
        prompts: Tokenizer, with the model's defaults.
        max_tokens: Maximum number of tokens of the answer.
        vocab_size: Number of tokens of the vocabulary.
        more: Further fields of `SamplingParams`.

    Raises:
        ApiError: A field is wrong.
    """
    values = {
        **prompts.defaults,
        **{name: value for name in _SAME if (value := getattr(body, name)) is not None},
    }
    if (top_k := values.get("top_k")) is not None:
        # A larger one keeps all tokens as well.
        values["top_k"] = min(top_k, vocab_size)
    if values.get("top_p") == 0:
        values["top_p"] = _MIN_TOP_P
    stop = () if body.stop is None else body.stop
    check_texts(stop, param="stop")
    check_texts(body.cache_salt, param="cache_salt")
    if body.prompt_logprobs is not None:
        more["prompt_logprobs"] = body.prompt_logprobs
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids or ())),
            allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
            logit_bias=_logit_bias(body.logit_bias or {}),
            **values,
            **more,
        )
        params.check_vocabulary(vocab_size)
    except ValueError as error:
        # Messages of `SamplingParams` begin with the name of the field.
        raise ApiError(str(error), param=str(error).split()[0]) from None
    return params


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """Return biases by token id, from JSON's string keys."""
    # No vocabulary has 20 digits of tokens, and int() refuses very long numbers.
    if wrong := [
        token for token in given if not (token.isascii() and token.isdigit() and len(token) < 20)
    ]:
        named = ", ".join(map(repr, wrong[:_MAX_NAMED]))
        raise ValueError(f"logit_bias must map token ids to numbers, not {named}")
    return {int(token): bias for token, bias in given.items()}


def slo_of(body: SamplingBody, default: Slo) -> Slo:
    """Return a request's SLO: its own, or the server's."""
    if body.slo is None:
        return default
    ttft_ms, tpot_ms = body.slo.ttft_ms, body.slo.tpot_ms
    return Slo(
        ttft_s=default.ttft_s if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=default.tpot_s if tpot_ms is None else tpot_ms / 1e3,
    )


def priority_of(body: HasPriority, context: GenerationContext, tenant: str) -> int:
    """Return a body's priority; only operators' requests may go before others."""
    asked = body.priority or 0
    return asked if context.keys.ring.is_operator(tenant) else max(0, asked)


async def bad_words(body: SamplingBody, prompts: Prompts) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of a body's bad words."""
    check_texts(body.bad_words, param="bad_words")
    return await prompts.words(body.bad_words or ())


def check_details(body: SamplingBody) -> None:
    """Check that a stream can contain what is asked for.

    Raises:
        ApiError: It cannot.
    """
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs are not available in a stream", param="prompt_logprobs")


def truncated(tokens: list[int], body: SamplingBody, ready: Ready, *, max_tokens: int) -> list[int]:
    """Return the part of a prompt that is asked for; -1: as much as fits.

    It is the end of the prompt, unless `truncation_side` is right.
    """
    if (most := body.truncate_prompt_tokens) is None:
        return tokens
    if most == -1:
        most = max(1, most_tokens(ready) - max_tokens)
    return (
        tokens[:most] if body.truncation_side == "right" else tokens[max(0, len(tokens) - most) :]
    )


def check_length(prompts: Prompts, prompt: Prompt, ready: Ready, *, param: str) -> None:
    """Check that a prompt is not too long, whatever its tokens are, before it is tokenized.

    As in vLLM, no token of the model has more than `longest_token` characters.

    Raises:
        ApiError: It is too long.
    """
    most, characters = most_tokens(ready) * prompts.longest_token, num_characters(prompt)
    if characters > most > 0:
        raise ApiError(
            f"This model's maximum context length is {most_tokens(ready)} tokens, which {most} "
            f"characters at most can be. However, your prompt has {characters} characters. Please "
            f"reduce the length of the prompt.",
            param=param,
            code="context_length_exceeded",
        )


def check_prompt(tokens: Sequence[int], max_tokens: int, ready: Ready, *, param: str) -> None:
    """Check the tokens of a prompt before they are sent.

    Raises:
        ApiError: The engine would refuse them; the message is OpenAI's.
    """
    if not tokens:
        raise ApiError("the prompt has no tokens", param=param)
    most = most_tokens(ready)
    if len(tokens) + max_tokens > most:
        raise ApiError(
            f"This model's maximum context length is {most} tokens. However, you requested "
            f"{len(tokens) + max_tokens} tokens ({len(tokens)} in the prompt, {max_tokens} for the "
            f"completion). Please reduce the length of the prompt or the completion.",
            param=param,
            code="context_length_exceeded",
        )
    wrong = next((token for token in tokens if not 0 <= token < ready.vocab_size), None)
    if wrong is not None:
        raise ApiError(
            f"token {wrong} of the prompt is out of vocabulary; the model has {ready.vocab_size} "
            f"tokens",
            param=param,
        )


def most_tokens(ready: Ready) -> int:
    """Return the maximum number of tokens of prompt and output, by the model's positions and the
    pool.
    """
    return min(ready.max_positions, (ready.num_pages - ready.num_state_pages) * ready.block_tokens)


async def chunks_of(
    context: GenerationContext, generation: Generation
) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
    """Yield the chunks of each prompt as they arrive; closing the generator cancels the requests.

    Yields:
        The place of a prompt, and its new chunks.

    Raises:
        ApiError: A request failed.
    """
    adapter = None if generation.adapter is None else generation.adapter.name
    stream = context.open(
        generation.requests(),
        tenant=generation.tenant,
        adapter=adapter,
        slo=generation.slo,
        reader=generation.reader,
        shown_tokens=generation.shown_tokens,
    )
    trace = (
        None
        if context.tracing is None
        else context.tracing.open(generation.id, generation.model, stream.requests)
    )
    places = {request.id: place for place, request in enumerate(stream.requests)}
    try:
        async for batch in stream.batches():
            by_place: dict[int, list[Chunk]] = {}
            for chunk in batch:
                _check(chunk)
                by_place.setdefault(places[chunk.request], []).append(chunk)
            for place, chunks in by_place.items():
                if trace is not None:
                    trace.take(place, chunks)
                yield place, chunks
    except CoserveError as error:
        # Batches see by the cause whether the engine has died.
        raise as_api_error(error) from error
    finally:
        context.close(stream)
        if trace is not None:
            trace.close()


def _check(chunk: Chunk) -> None:
    if chunk.finish_reason == "error":
        if (chunk.error or "").startswith(CANNOT_FOLLOW):
            raise ApiError(chunk.error or "")
        raise ApiError(chunk.error or "the engine failed", status=500, kind="server_error")
    if chunk.finish_reason == "cancelled":
        raise ApiError(
            "the request was cancelled",
            status=503,
            kind="server_error",
            headers={"Retry-After": "2"},
        )


@dataclass
class Usage:
    """Token counts of an answer."""

    num_prompt: int
    """Tokens of the prompts."""
    num_output: int = 0
    """Generated tokens."""
    num_cached: int = 0
    """Prompt tokens from the prefix cache."""
    slo: Slo | None = None
    """SLO in place of the request's own, if the device cannot meet that."""

    def count(self, chunk: Chunk) -> None:
        """Count the tokens of a chunk."""
        self.num_output += len(chunk.tokens)
        self.slo = self.slo or chunk.slo
        # All n sequences report the cached tokens of their one prompt.
        if chunk.finish_reason is not None and chunk.index == 0:
            self.num_cached += chunk.num_cached_tokens

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's form, with `slo` in milliseconds if the request's own was relaxed."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self.slo is not None:
            usage["slo"] = {"ttft_ms": 1e3 * self.slo.ttft_s, "tpot_ms": 1e3 * self.slo.tpot_s}
        return usage


@dataclass(frozen=True, kw_only=True)
class UsageOptions:
    """Events of a stream that have token counts."""

    at_end: bool = False
    """Whether a last event has them."""
    in_each: bool = False
    """Whether each event has them (vLLM's `continuous_usage_stats`)."""

    @classmethod
    def of(cls, options: StreamOptions | None) -> Self:
        """Return the options of a body; vLLM's has an effect only together with OpenAI's."""
        at_end = options is not None and bool(options.include_usage)
        return cls(
            at_end=at_end,
            in_each=at_end and options is not None and bool(options.continuous_usage_stats),
        )

    def of_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the fields of an event other than the last."""
        return {"usage": usage.to_json() if self.in_each else None} if self.at_end else {}


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB


def now_s() -> int:
    """Return the Unix time in whole seconds."""
    return int(time.time())
