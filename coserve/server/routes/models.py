"""GET /v1/models: the base, and every adapter that the tenant can name; vLLM's routes that load and unload them."""

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from coserve.errors import AdapterError
from coserve.jobs.records import AdapterRecord
from coserve.server.adapters import adapter_at
from coserve.server.context import Context, ServerContext, Tenant
from coserve.server.errors import ApiError, not_found
from coserve.server.generation import most_tokens
from coserve.server.responses import json_response
from coserve.server.schemas import LoadAdapterBody, UnloadAdapterBody
from coserve.server.texts import check_texts

router = APIRouter()


@router.get("/v1/models")
async def list_models(context: Context, tenant: Tenant) -> Response:
    """The base first."""
    known = await context.adapters(tenant)
    return json_response({"object": "list", "data": [_base(context), *(_adapter(context, each) for each in known)]})


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, context: Context, tenant: Tenant) -> Response:
    """One of them."""
    if model in context.base_names:
        return json_response(_base(context))
    known = await context.look_up(tenant, unquote(model))
    if known is None:
        raise not_found(f"The model '{model}' does not exist", param="model", code="model_not_found")
    return json_response(_adapter(context, known))


def _base(context: ServerContext) -> dict[str, Any]:
    ready = context.link.ready
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "coserve",
        "root": context.config.model,
        "parent": None,
        "max_model_len": most_tokens(ready) if ready is not None else None,
    }


def _adapter(context: ServerContext, known: AdapterRecord) -> dict[str, Any]:
    return {
        "id": known.name,
        "object": "model",
        "created": known.created_at,
        "owned_by": "coserve",
        "root": known.root,
        "parent": context.model_name,
    }


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterBody, context: Context, tenant: Tenant) -> Response:
    """Serve an adapter in PEFT's format."""
    if not body.lora_name or not body.lora_path:
        raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
    name = body.lora_name
    check_texts(name, param="lora_name")
    check_texts(body.lora_path, param="lora_path")
    if "@" in name:
        raise _invalid("'lora_name' must not have an @, which begins a version.")
    if name in context.base_names:
        raise _invalid(f"'{name}' is the name of the base model.")
    directory = _allowed(body.lora_path, context.config.allow_adapter_paths)
    async with context.loaded.lock:
        there = await context.look_up(tenant, name)
        if there is not None and (not body.load_inplace or context.loaded.find(tenant, name) is None):
            raise _invalid(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to true."
            )
        record = adapter_at(str(directory), tenant=tenant, name=name, base=context.model_name)
        try:
            await context.link.load_adapter(record.ref)
        except AdapterError as error:
            raise ApiError(str(error), param="lora_path") from error
        context.loaded.add(record)
        if there is not None:
            await context.link.unload_adapter(there.ref.name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterBody, context: Context, tenant: Tenant) -> Response:
    """Serve it no longer; requests that use it run to their end."""
    if not body.lora_name:
        raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
    async with context.loaded.lock:
        known = context.loaded.find(tenant, body.lora_name)
        if known is None:
            message = f"The lora adapter '{body.lora_name}' cannot be found."
            raise ApiError(message, status=404, kind="NotFoundError", param="lora_name")
        await context.link.unload_adapter(known.ref.name)
        context.loaded.remove(tenant, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(given: str, allowed: tuple[Path, ...]) -> Path:
    """A directory that may be read, with all links followed."""
    if not allowed:
        raise ApiError(
            "no path may be read: start the server with --allow-adapter-paths", status=403, param="lora_path"
        )
    try:
        path = Path(given).resolve()
        inside = any(path.is_relative_to(directory.resolve()) for directory in allowed)
    except (ValueError, OSError, RuntimeError):  # no path at all, or links in a circle
        raise _invalid("'lora_path' is no path.") from None
    if not inside:
        raise ApiError("lora_path does not lie below a directory that --allow-adapter-paths names", status=403)
    if not path.is_dir():
        raise ApiError(f"No adapter found for '{given}'.", status=404, kind="NotFoundError", param="lora_path")
    return path


def _invalid(message: str) -> ApiError:
    return ApiError(message, kind="InvalidUserInput")
