"""Routes of vLLM for text and tokens: POST /tokenize, POST /detokenize, GET /tokenizer_info."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from coserve.protocol.messages import Ready
from coserve.server.bodies.reader import JsonRoute
from coserve.server.bodies.schemas import ChatBody, DetokenizeBody, TokenizeBody
from coserve.server.chat.prompt import plain_message, template_arguments
from coserve.server.chat.tools import Tools
from coserve.server.context import GenerationPart, Tenant
from coserve.server.errors import ApiError
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import find_model, most_tokens
from coserve.server.http.responses import ignored_header, json_response
from coserve.server.text.prompts import Prompts, num_characters

router = APIRouter(route_class=JsonRoute)
# Counted before the tokenizer sees them: it takes a second or two for as many.
_MAX_CHARACTERS = 1_000_000
# Largest integer that a JSON number represents exactly; transformers writes 1e30 for "no limit".
_LARGEST = 2**53


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, context: GenerationPart, tenant: Tenant) -> Response:
    """Return the token ids of a text, or of a chat in its template."""
    reader, ready = await _reader(context, tenant, body.model)
    _require_tokenizer(context)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give exactly one of prompt and messages", param="prompt")
    template: Any = None
    prompt: Any = body.prompt
    if body.messages is not None:
        prompt = [plain_message(message) for message in body.messages]
        chat = ChatBody.model_construct(
            **body.model_dump(exclude={"messages"}), messages=body.messages
        )
        template = template_arguments(
            chat, Tools(shown=tuple(body.tools or ())), context.prompts.chat_template
        )
    if (length := num_characters(prompt)) > _MAX_CHARACTERS:
        raise ApiError(f"the text has {length} characters; the limit is {_MAX_CHARACTERS}")
    param = "prompt" if body.messages is None else "messages"
    tokens = await reader.tokens(prompt, template, body.add_special_tokens, param=param)
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": most_tokens(ready),
            "tokens": tokens,
            "token_strs": await reader.names(tokens) if body.return_token_strs else None,
        },
        headers=ignored_header(body.ignored),
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, context: GenerationPart, tenant: Tenant) -> Response:
    """Return the text of token ids."""
    reader, ready = await _reader(context, tenant, body.model)
    _require_tokenizer(context)
    if wrong := [token for token in body.tokens if not 0 <= token < ready.vocab_size]:
        raise ApiError(
            f"tokens has {wrong[0]}; the model has {ready.vocab_size} tokens", param="tokens"
        )
    text = await reader.decoded(body.tokens)
    return json_response({"prompt": text}, headers=ignored_header(body.ignored))


@router.get("/tokenizer_info")
async def tokenizer_info(context: GenerationPart) -> Response:
    """Return the settings of the tokenizer, as in tokenizer_config.json."""
    context.require_ready()
    tokenizer = _require_tokenizer(context)
    added = {
        str(token): _added_token(each) for token, each in tokenizer.added_tokens_decoder.items()
    }
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if _is_plain(value)}
    names = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    info = {
        "tokenizer_class": type(tokenizer).__name__,
        **settings,
        **names,
        "added_tokens_decoder": added,
    }
    if context.prompts.chat_template:
        info["chat_template"] = context.prompts.chat_template
    return json_response(info)


async def _reader(
    context: GenerationContext, tenant: str, model: str | None
) -> tuple[Prompts, Ready]:
    """Return the tokenizer of a model, by default of the base, and the engine with its vocabulary
    size.
    """
    adapter = None if model is None else await find_model(context, tenant, model)
    return await context.models.reader_of(adapter, context.require_ready())


def _require_tokenizer(context: GenerationContext) -> Any:
    if (tokenizer := context.prompts.text_tokenizer) is None:
        raise ApiError(f"{context.models.name} has no tokenizer", code="unsupported_parameter")
    return tokenizer


def _is_plain(value: Any) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) < _LARGEST
    return isinstance(value, bool | str)


def _added_token(token: Any) -> dict[str, Any]:
    """Return an added token in the form of tokenizer_config.json."""
    flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"content": token.content, **{name: bool(getattr(token, name)) for name in flags}}
