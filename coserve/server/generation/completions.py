"""Requests to the engine for a body of /v1/completions, and their answers."""

from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from coserve.devices.grammars.grammar import Grammar
from coserve.devices.messages.steps import TokenLogprob
from coserve.server.bodies.schemas import CompletionBody
from coserve.server.errors import ApiError
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import (
    Generation,
    Usage,
    UsageOptions,
    bad_words,
    check_details,
    check_length,
    check_prompt,
    chunks_of,
    find_model,
    finite,
    new_id,
    now_s,
    priority_of,
    sampling_params,
    slo_of,
    truncated,
)
from coserve.server.generation.structured import asked_grammar, grammar_field
from coserve.server.generation.token_details import TokenDetails
from coserve.server.http.responses import server_sent_event
from coserve.server.text.prompts import TokenPiece

# OpenAI's default.
_MAX_TOKENS = 16
# Maximum number of choices of a request: prompts times n.
_MAX_CHOICES = 2048
# Fields of a choice about its prompt, null unless asked for.
_OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A completion, ready to be sent to the engine."""

    generation: Generation
    """Requests to the engine."""
    echoes: list[str] | None
    """Texts of the prompts, if they are part of the answer."""
    details: TokenDetails
    """What the answer shows of its tokens."""


async def completion_request(
    body: CompletionBody, context: GenerationContext, tenant: str, arrival_s: float
) -> CompletionRequest:
    """Return the completion that a body asks for.

    Args:
        body: The body.
        context: Parts of the server.
        tenant: Tenant that asks.
        arrival_s: Time of arrival, by the engine's clock.

    Raises:
        ApiError: A field is wrong, or the request cannot be admitted.
    """
    _refuse_what_is_not_there(body)
    check_details(body)
    prompts = _prompts(body)
    generation = await _generation(body, prompts, context, tenant, arrival_s)
    # An echo begins with the prompt as it was sent.
    echoes = [
        prompt
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None
        else generation.reader.text(list(tokens))
        for prompt, tokens in zip(prompts, generation.prompts, strict=True)
        if body.echo
    ]
    return CompletionRequest(
        generation=generation,
        echoes=echoes if body.echo else None,
        details=TokenDetails.of(body, generation.reader),
    )


def _refuse_what_is_not_there(body: CompletionBody) -> None:
    if body.suffix:
        raise ApiError(
            "suffix is not supported; leave it out", param="suffix", code="unsupported_parameter"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            "best_of is not supported; leave it out, or give the same number as n",
            param="best_of",
            code="unsupported_parameter",
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def _generation(
    body: CompletionBody,
    prompts: list[str | list[int]],
    context: GenerationContext,
    tenant: str,
    arrival_s: float,
) -> Generation:
    ready = context.admit(tenant)
    model = context.models.name if body.model is None else body.model
    adapter = await find_model(context, tenant, model)
    reader, ready = await context.models.reader_of(adapter, ready)
    max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < 0 or (max_tokens == 0 and not body.echo):
        raise ApiError("max_tokens must be at least 1; 0 needs echo", param="max_tokens")
    if len(prompts) * (body.n or 1) > _MAX_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts, n times each, are more than {_MAX_CHOICES} choices",
            param="n",
        )
    # Before tokenizing, which takes long for text that is far too long.
    for prompt in prompts if body.truncate_prompt_tokens is None else ():
        check_length(reader, prompt, ready, param="prompt")
    whole = [
        await reader.tokens(prompt, special=body.add_special_tokens, param="prompt")
        for prompt in prompts
    ]
    tokens = [tuple(truncated(each, body, ready, max_tokens=max_tokens)) for each in whole]
    for each in tokens:
        check_prompt(each, max_tokens, ready, param="prompt")
    more: dict[str, Any] = {
        "logprobs": body.logprobs,
        "bad_words": await bad_words(body, reader),
        "grammar": await _grammar(body, context, tenant),
    }
    if body.echo and (body.logprobs is not None or not max_tokens):
        more["prompt_logprobs"] = body.logprobs or 0
    return Generation(
        id=new_id("cmpl"),
        created=now_s(),
        model=model,
        prompts=tuple(tokens),
        params=sampling_params(
            body, reader, max_tokens=max_tokens, vocab_size=ready.vocab_size, **more
        ),
        slo=slo_of(body, ready.slo),
        arrival_s=arrival_s,
        tenant=tenant,
        adapter=adapter,
        reader=reader,
        priority=priority_of(body, context, tenant),
    )


async def _grammar(body: CompletionBody, context: GenerationContext, tenant: str) -> Grammar | None:
    """Return the grammar of the texts, if any, after its trial in the sandbox.

    Raises:
        ApiError: It cannot be used.
    """
    asked = asked_grammar(body)
    if asked is None:
        return None
    return await context.grammar_checks.check(asked, tenant=tenant, param=grammar_field(body))


class CompletionWriter:
    """Writer of the answer to one request, from the engine's chunks."""

    def __init__(self, context: GenerationContext, request: CompletionRequest) -> None:
        generation, details = request.generation, request.details
        self._context, self._generation, self._echoes, self._details = (
            context,
            generation,
            request.echoes,
            details,
        )
        self._usage = Usage(num_prompt=sum(map(len, generation.prompts)))
        self._n = generation.params.n
        self._logprobs = [
            _Logprobs(details, generation.params.skip_special_tokens)
            for _ in range(len(generation.prompts) * self._n)
        ]
        self._head = {
            "id": generation.id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
            "system_fingerprint": context.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        # As in vLLM, null unless asked for.
        unasked = dict.fromkeys(_OF_PROMPT)
        choices = [{**_choice(index), **unasked} for index in range(len(self._logprobs))]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                choice = choices[piece["index"]]
                choice["text"] += piece["text"]
                choice |= {name: piece[name] for name in ("finish_reason", "stop_reason")}
                choice["logprobs"] = _joined(choice["logprobs"], piece["logprobs"])
                for name in _OF_PROMPT:
                    if name in piece:
                        choice[name] = piece[name]
                if "token_ids" in piece:
                    choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
        return {**self._head, "choices": choices, "usage": self._usage.to_json()}

    async def events(self, options: UsageOptions) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        head = self._head
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                yield server_sent_event(
                    {**head, "choices": [piece], **options.of_chunk(self._usage)}
                )
        if options.at_end:
            yield server_sent_event({**head, "choices": [], "usage": self._usage.to_json()})

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield choices with what is new in each."""
        begun: set[int] = set()
        waiting: dict[int, list[TokenLogprob]] = {}  # prompts' logprobs, by place
        async with aclosing(chunks_of(self._context, self._generation)) as batches:
            async for place, chunks in batches:
                for chunk in chunks:
                    self._usage.count(chunk)
                    index = place * self._n + chunk.index
                    # They come once for a prompt, and each of its n choices repeats them.
                    if chunk.prompt_logprobs:
                        waiting[place] = list(chunk.prompt_logprobs)
                    piece = {
                        **_choice(
                            index,
                            text=chunk.text,
                            reason=chunk.finish_reason,
                            stop=chunk.stop_reason,
                        ),
                        **self._details.ids(chunk.tokens),
                    }
                    parts = []
                    if index not in begun:
                        begun.add(index)
                        piece |= self._details.prompt_ids(self._generation.prompts[place])
                        piece |= self._details.prompt_logprobs(waiting.get(place, []))
                        if self._echoes is not None:
                            piece["text"] = self._echoes[place] + piece["text"]
                            of_prompt = self._of_prompt(
                                index, place, waiting.get(place, []), self._echoes[place]
                            )
                            parts.append(of_prompt)
                    parts.append(self._logprobs[index].of(chunk.logprobs))
                    if self._generation.params.logprobs is not None:
                        for part in parts:
                            piece["logprobs"] = _joined(piece["logprobs"], part)
                    if piece["text"] or piece["finish_reason"] or chunk.tokens:
                        yield piece

    def _of_prompt(
        self, index: int, place: int, found: list[TokenLogprob], echo: str
    ) -> dict[str, Any]:
        """Return the log-probabilities of an echoed prompt, without one for its first token."""
        return self._logprobs[index].of(
            [None, *found], first=self._generation.prompts[place][0], echo=echo
        )


def _choice(
    index: int, *, text: str = "", reason: str | None = None, stop: str | int | None = None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": stop,
    }


class _Logprobs:
    """Log-probabilities of one choice in the old style: parallel lists, with each token's offset in
    the text.
    """

    def __init__(self, details: TokenDetails, skips_special: bool) -> None:
        self._details, self._prompts, self._offset = details, details.prompts, 0
        self._skips_special = skips_special
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(
        self,
        found: "list[TokenLogprob | None] | tuple[TokenLogprob, ...]",
        first: int = 0,
        echo: str = "",
    ) -> dict[str, Any]:
        """Return log-probabilities of further tokens.

        Args:
            found: The tokens; None for one without a log-probability.
            first: Token of such an entry.
            echo: Text of the prompt, if the tokens are the prompt's.
        """
        lists: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for each in found:
            piece = self._prompts.piece(first if each is None else each.token)
            lists["tokens"].append(
                self._details.name(first if each is None else each.token, piece.name)
            )
            lists["text_offset"].append(self._place(piece, echo))
            lists["token_logprobs"].append(None if each is None else finite(each.logprob))
            lists["top_logprobs"].append(None if each is None else self._top(each))
        return lists

    def _place(self, piece: TokenPiece, echo: str) -> int:
        """Return the offset at which a token begins.

        Several tokens may be parts of one character, and special ones appear only in echoes.
        """
        if piece.is_special and self._skips_special:
            place = self._offset
            self._offset += len(piece.text) if echo.startswith(piece.text, place) else 0
            return place
        if (
            piece.raw and not 0x80 <= piece.raw[0] < 0xC0
        ):  # a new character: an unfinished one before it stays so
            self._offset += len(self._decoder.decode(b"", final=True))
        place = self._offset
        self._offset += len(self._decoder.decode(bytes(piece.raw)))
        return place

    def _top(self, each: TokenLogprob) -> dict[str, float]:
        """Return the top log-probabilities by text: the chosen token, then the likeliest.

        Of tokens with the same text, the likeliest counts.
        """
        top: dict[str, float] = {}
        for token, logprob in each.top:
            top.setdefault(self._name(token), finite(logprob))
        return {self._name(each.token): finite(each.logprob), **top}

    def _name(self, token: int) -> str:
        return self._details.name(token, self._prompts.piece(token).name)


def _joined(before: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    if before is None or more is None:
        return more if before is None else before
    return {name: before[name] + more[name] for name in before}
