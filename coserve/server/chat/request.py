"""Requests to the engine for a chat's body, on all routes that take chats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coserve.devices.grammars.grammar import Grammar
from coserve.devices.sampling_params import MAX_LOGPROBS
from coserve.protocol.messages import Ready
from coserve.server.bodies.schemas import ChatBody
from coserve.server.chat import reasoning
from coserve.server.chat.answer_reader import ChatFrame
from coserve.server.chat.prompt import frame_of, plain_message, template_arguments
from coserve.server.chat.tools import Tools, grammar_of_calls, tools_of
from coserve.server.errors import ApiError
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import (
    Generation,
    bad_words,
    check_details,
    check_length,
    check_prompt,
    find_model,
    most_tokens,
    new_id,
    now_s,
    priority_of,
    sampling_params,
    slo_of,
    truncated,
)
from coserve.server.generation.structured import asked_grammar, grammar_field
from coserve.server.generation.token_details import TokenDetails
from coserve.server.text.prompts import Prompts


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A chat, ready to be sent to the engine."""

    generation: Generation
    """Requests to the engine."""
    tools: Tools
    """Tools that the answer may call."""
    frame: ChatFrame
    """Context in which the answer's text begins."""
    details: TokenDetails
    """What the answer shows of its tokens."""


async def chat_request(
    body: ChatBody,
    context: GenerationContext,
    tenant: str,
    arrival_s: float,
    *,
    id: str | None = None,
) -> ChatRequest:
    """Return the chat that a body asks for.

    Args:
        body: The body.
        context: Parts of the server.
        tenant: Tenant that asks.
        arrival_s: Time of arrival, by the engine's clock.
        id: Id of the answer (default: a new one).

    Raises:
        ApiError: A field is wrong, or the request cannot be admitted.
    """
    _refuse_what_is_not_there(body)
    check_details(body)
    ready = context.admit(tenant)
    tools = tools_of(body, context)
    generation = await _generation(
        body, tools, context, ready, tenant, arrival_s, id or new_id("chatcmpl")
    )
    return ChatRequest(
        generation=generation,
        tools=tools,
        frame=frame_of(body, generation.prompts[0], generation.reader),
        details=TokenDetails.of(body, generation.reader),
    )


def _refuse_what_is_not_there(body: ChatBody) -> None:
    if body.functions:
        raise ApiError(
            "functions is not supported: use tools", param="functions", code="unsupported_parameter"
        )
    for name in ("audio", "web_search_options", "moderation"):
        if getattr(body, name):
            raise ApiError(
                f"{name} is not supported; leave it out", param=name, code="unsupported_parameter"
            )
    if body.function_call not in (None, "none", "auto"):
        raise ApiError("function_call must be none or auto: use tools", param="function_call")
    for place, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            name = f"messages[{place}].content"
            raise ApiError(
                f"Missing required parameter: '{name}'.",
                param=name,
                code="missing_required_parameter",
            )
    if body.modalities not in (None, ["text"]):
        raise ApiError(
            'modalities must be ["text"]', param="modalities", code="unsupported_parameter"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise ApiError(
            f"top_logprobs must be a whole number from 0 to {MAX_LOGPROBS}, not "
            f"{body.top_logprobs}",
            param="top_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")


async def _generation(
    body: ChatBody,
    tools: Tools,
    context: GenerationContext,
    ready: Ready,
    tenant: str,
    arrival_s: float,
    id: str,
) -> Generation:
    model = context.models.name if body.model is None else body.model
    adapter = await find_model(context, tenant, model)
    reader, ready = await context.models.reader_of(adapter, ready)
    messages = [plain_message(message) for message in body.messages]
    if body.truncate_prompt_tokens is None:
        check_length(reader, [*messages, *tools.shown], ready, param="messages")
    template = template_arguments(body, tools, reader.chat_template)
    tokens = await reader.tokens(messages, template, body.add_special_tokens, param="messages")
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(body, limit)
    if asked is not None and asked < 1:
        raise ApiError(f"{limit} must be at least 1, not {asked}", param=limit)
    # Without a limit, one token of output has to fit.
    tokens = truncated(tokens, body, ready, max_tokens=asked or 1)
    max_tokens = asked if asked is not None else max(1, most_tokens(ready) - len(tokens))
    check_prompt(tokens, max_tokens, ready, param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Generation(
        id=id,
        created=now_s(),
        model=model,
        prompts=(tuple(tokens),),
        params=sampling_params(
            body,
            reader,
            max_tokens=max_tokens,
            vocab_size=ready.vocab_size,
            logprobs=logprobs,
            bad_words=await bad_words(body, reader),
            grammar=await _grammar(body, tools, context, tenant, reader, tokens),
        ),
        slo=slo_of(body, ready.slo),
        arrival_s=arrival_s,
        tenant=tenant,
        adapter=adapter,
        reader=reader,
        priority=priority_of(body, context, tenant),
        shown_tokens=(
            reasoning.BEGIN,
            reasoning.END,
            *(() if tools.parser is None else tools.parser.markers),
        ),
    )


async def _grammar(
    body: ChatBody,
    tools: Tools,
    context: GenerationContext,
    tenant: str,
    reader: Prompts,
    prompt: Sequence[int],
) -> Grammar | None:
    """Return the grammar of the answer, which begins after the reasoning, if there is any.

    An answer that must call tools has no other content, whatever else was asked for.
    """
    grammar = grammar_of_calls(body, tools) if tools.must_call else asked_grammar(body)
    if grammar is None:
        return None
    frame = frame_of(body, prompt, reader)
    if frame.inside_reasoning or frame.may_reason:
        grammar = replace(
            grammar, after=reasoning.END, begun_by="" if frame.inside_reasoning else reasoning.BEGIN
        )
    param = "tools" if tools.must_call else grammar_field(body)
    return await context.grammar_checks.check(grammar, tenant=tenant, param=param)
