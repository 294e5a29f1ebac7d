"""From a body to the engine's requests, and their chunks back: what both kinds of completions
share.
"""

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
_LEAST_LOGPROB = -9999.0
# Of what is wrong in one field, in one message.
_MOST_NAMED = 8


class HasPriority(Protocol):
    """A body with a priority."""

    @property
    def priority(self) -> int | None:
        """The lowest goes first."""
        ...


# OpenAI takes a top_p of 0, and means the likeliest token: so little probability only that one has.
_LEAST_TOP_P = 1e-6


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Prompts that go to the engine together, one request each; the answer's choices are their
    sequences.

    id, created, model: as the answer shows them. shown_tokens: special tokens that the answer's
    text has, for a parser that reads it. priority, batch_due_s, without_jobs: see `AddRequest`.
    reader: of the adapter's texts, or of the model's.
    """

    id: str
    created: int
    model: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    slo: Slo
    arrival_s: float
    tenant: str
    adapter: AdapterRecord | None
    reader: Prompts
    shown_tokens: tuple[str, ...] = ()
    priority: int = 0
    batch_due_s: float | None = None
    without_jobs: bool = False

    def requests(self) -> list[AddRequest]:
        """For the engine."""
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
    """One that nothing else has."""
    return f"{prefix}{separator}{uuid4().hex}"


async def find_model(context: GenerationContext, tenant: str, name: str) -> AdapterRecord | None:
    """The adapter of a model's name, None for the base; 404 for a name that the tenant does not
    know.
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
    """As the body says; ApiError names the field that is wrong."""
    given = {
        **prompts.defaults,
        **{name: value for name in _SAME if (value := getattr(body, name)) is not None},
    }
    if (top_k := given.get("top_k")) is not None:
        given["top_k"] = min(top_k, vocab_size)
    if given.get("top_p") == 0:
        given["top_p"] = _LEAST_TOP_P
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
            **given,
            **more,
        )
        params.check_vocabulary(vocab_size)
    except ValueError as error:
        raise ApiError(str(error), param=str(error).split()[0]) from None
    return params


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    if wrong := [
        token for token in given if not (token.isascii() and token.isdigit() and len(token) < 20)
    ]:
        named = ", ".join(map(repr, wrong[:_MOST_NAMED]))
        raise ValueError(f"logit_bias must map token ids to numbers, not {named}")
    return {int(token): bias for token, bias in given.items()}


def slo_of(body: SamplingBody, default: Slo) -> Slo:
    """A request's SLOs: its own, or the server's."""
    if body.slo is None:
        return default
    ttft_ms, tpot_ms = body.slo.ttft_ms, body.slo.tpot_ms
    return Slo(
        ttft_s=default.ttft_s if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=default.tpot_s if tpot_ms is None else tpot_ms / 1e3,
    )


def priority_of(body: HasPriority, context: GenerationContext, tenant: str) -> int:
    """As the body says; before others go those of operators alone."""
    asked = body.priority or 0
    return asked if context.keys.ring.is_operator(tenant) else max(0, asked)


async def bad_words(body: SamplingBody, prompts: Prompts) -> tuple[tuple[int, ...], ...]:
    """Their tokens."""
    check_texts(body.bad_words, param="bad_words")
    return await prompts.words(body.bad_words or ())


def check_details(body: SamplingBody) -> None:
    """ApiError for what a stream cannot say."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs are not available in a stream", param="prompt_logprobs")


def truncated(tokens: list[int], body: SamplingBody, ready: Ready, *, max_tokens: int) -> list[int]:
    """The prompt, or the part of it that is asked for (-1: as much as there is room for); the end,
    unless `truncation_side` is right.
    """
    if (most := body.truncate_prompt_tokens) is None:
        return tokens
    if most == -1:
        most = max(1, most_tokens(ready) - max_tokens)
    return (
        tokens[:most] if body.truncation_side == "right" else tokens[max(0, len(tokens) - most) :]
    )


def check_length(prompts: Prompts, prompt: Prompt, ready: Ready, *, param: str) -> None:
    """What would be too long however it were tokenized, before that is tried. As vLLM does it: no
    token of the model has more than `longest_token` characters.
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
    """What the engine would refuse, in OpenAI's words and before anything is sent."""
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
    """Prompt and output of one request together, by the model's positions and the pool's pages."""
    return min(ready.max_positions, (ready.num_pages - ready.num_state_pages) * ready.block_tokens)


async def chunks_of(
    context: GenerationContext, generation: Generation
) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
    """The chunks of each prompt as they come; closing this cancels what is not over.

    Raises:
        ApiError: there is no good end.
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
    """Counts of an answer. slo: what it was served by, if the SLO that it asked for is beyond the
    device.
    """

    num_prompt: int
    num_output: int = 0
    num_cached: int = 0
    slo: Slo | None = None

    def count(self, chunk: Chunk) -> None:
        """Some more tokens."""
        self.num_output += len(chunk.tokens)
        self.slo = self.slo or chunk.slo
        if chunk.finish_reason is not None and chunk.index == 0:
            self.num_cached += chunk.num_cached_tokens

    def to_json(self) -> dict[str, Any]:
        """As OpenAI gives it; with `slo`, in milliseconds, where the request's own could not be
        held by this device.
        """
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
    """Where a stream says the counts: in an event of their own at its end, and in each (vLLM's
    `continuous_usage_stats`).
    """

    at_end: bool = False
    in_each: bool = False

    @classmethod
    def of(cls, options: StreamOptions | None) -> Self:
        """As a body says; vLLM's is of effect beside OpenAI's alone."""
        at_end = options is not None and bool(options.include_usage)
        return cls(
            at_end=at_end,
            in_each=at_end and options is not None and bool(options.continuous_usage_stats),
        )

    def of_chunk(self, usage: Usage) -> dict[str, Any]:
        """What an event has that is not the last."""
        return {"usage": usage.to_json() if self.in_each else None} if self.at_end else {}


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def now_s() -> int:
    """Seconds since 1970."""
    return int(time.time())
