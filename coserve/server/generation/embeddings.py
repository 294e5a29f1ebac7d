"""Answers of /v1/embeddings: each input's last hidden state after the final norm, at length 1."""

import base64
import math
import struct
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coserve.devices.sampling_params import SamplingParams
from coserve.server.bodies.schemas import List, Name, RequestBody
from coserve.server.errors import ApiError
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import (
    Generation,
    check_length,
    check_prompt,
    chunks_of,
    find_model,
    most_tokens,
    new_id,
    now_s,
    priority_of,
)

_MAX_INPUTS = 2048


class EmbeddingBody(RequestBody):
    """Body of POST /v1/embeddings."""

    unused: ClassVar[frozenset[str]] = frozenset({"user"})
    """Fields without effect."""

    model: Name
    """Model or adapter."""
    input: (
        str
        | Annotated[List[int], Field(min_length=1)]
        | Annotated[List[str], Field(min_length=1, max_length=_MAX_INPUTS)]
        | Annotated[List[List[int]], Field(min_length=1, max_length=_MAX_INPUTS)]
    )
    """Text or token ids, or several of them."""
    encoding_format: Literal["float", "base64"] | None = None
    """Format of the vectors: lists of numbers, or base64 of little-endian float32."""
    dimensions: int | None = None
    """Not supported."""
    user: str | None = None
    """Without effect."""
    # As vLLM has them.
    add_special_tokens: bool | None = None
    """Whether the tokenizer's special tokens are added (vLLM)."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Number of first tokens of each input that are kept; -1: as many as fit (vLLM)."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    """Priority; the lowest goes first (vLLM)."""


async def embedding_request(
    body: EmbeddingBody, context: GenerationContext, tenant: str, arrival_s: float
) -> Generation:
    """Return the requests that a body asks for.

    Raises:
        ApiError: A field is wrong, or the request cannot be admitted.
    """
    if body.dimensions is not None:
        raise ApiError(
            "dimensions is not supported: a model's states have one width; leave it out",
            param="dimensions",
            code="unsupported_parameter",
        )
    ready = context.admit(tenant)
    adapter = await find_model(context, tenant, body.model)
    reader, ready = await context.models.reader_of(adapter, ready)
    is_one = isinstance(body.input, str) or isinstance(body.input[0], int)
    inputs: list[Any] = [body.input] if is_one else list(body.input)
    prompts = []
    for prompt in inputs:
        if body.truncate_prompt_tokens is None:
            check_length(reader, prompt, ready, param="input")
        tokens = await reader.tokens(prompt, special=body.add_special_tokens, param="input")
        if (most := body.truncate_prompt_tokens) is not None:
            # Every request has room for one token of output.
            tokens = tokens[: most_tokens(ready) - 1 if most == -1 else most]
        check_prompt(tokens, 1, ready, param="input")
        prompts.append(tuple(tokens))
    return Generation(
        id=new_id("embd"),
        created=now_s(),
        model=body.model,
        prompts=tuple(prompts),
        params=SamplingParams(max_tokens=1, temperature=0, embeds=True),
        slo=ready.slo,
        arrival_s=arrival_s,
        tenant=tenant,
        adapter=adapter,
        reader=reader,
        priority=priority_of(body, context, tenant),
    )


async def embeddings(
    body: EmbeddingBody, generation: Generation, context: GenerationContext
) -> dict[str, Any]:
    """Return the answer.

    Raises:
        ApiError: The engine's device has no hidden states.
    """
    vectors: list[tuple[float, ...]] = [()] * len(generation.prompts)
    async with aclosing(chunks_of(context, generation)) as batches:
        async for place, chunks in batches:
            for chunk in chunks:
                vectors[place] = chunk.embedding or vectors[place]
    if not all(vectors):
        raise ApiError(
            f"The model `{generation.model}` has no embeddings on this server.",
            code="unsupported_parameter",
        )
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encoded(_normed(vector), body.encoding_format),
        }
        for index, vector in enumerate(vectors)
    ]
    num_tokens = sum(map(len, generation.prompts))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    head = {
        "id": generation.id,
        "object": "list",
        "created": generation.created,
        "model": generation.model,
    }
    return {**head, "data": data, "usage": usage}


def _normed(vector: Sequence[float]) -> list[float]:
    length = math.sqrt(math.fsum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]


def _encoded(vector: list[float], encoding: str | None) -> list[float] | str:
    """Return a vector in its format; OpenAI's clients ask for base64 of little-endian float32 by
    default.
    """
    if encoding != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
