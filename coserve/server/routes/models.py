"""Routes of /v1/models, and vLLM's routes that load and unload adapters."""

import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from coserve.engine_client.access import EngineAccess
from coserve.errors import AdapterError, EngineGoneError, StoreError
from coserve.jobs.names import is_checkpoint
from coserve.jobs.records import AdapterRecord
from coserve.server.adapters.catalogue import adapter_at, lies_in
from coserve.server.adapters.served import ServedModels
from coserve.server.bodies.reader import JsonRoute
from coserve.server.bodies.schemas import LoadAdapterBody, UnloadAdapterBody
from coserve.server.bodies.texts import check_texts
from coserve.server.context import ConfigPart, EnginePart, GenerationPart, ModelsPart, Tenant
from coserve.server.errors import ApiError, not_found
from coserve.server.generation.generation import most_tokens
from coserve.server.http.responses import json_response

router = APIRouter(route_class=JsonRoute)
# Characters: of what the store keeps, and of what any system takes as a path.
_LONGEST_NAME, _LONGEST_PATH = 256, 4096


@router.get("/v1/models")
async def list_models(
    models: ModelsPart,
    engine: EnginePart,
    config: ConfigPart,
    tenant: Tenant,
    checkpoints: bool = False,
) -> Response:
    """List the base model and all adapters that the tenant can name.

    Args:
        checkpoints: Whether checkpoints of jobs are listed; they can be asked for in any case.
    """
    known = [
        each
        for each in await models.adapters(tenant)
        if checkpoints or not is_checkpoint(each.name)
    ]
    base = _base(models, engine, config.model)
    return json_response(
        {"object": "list", "data": [base, *(_adapter(models, each) for each in known)]}
    )


@router.get("/v1/models/{model:path}")
async def retrieve_model(
    model: str, models: ModelsPart, engine: EnginePart, config: ConfigPart, tenant: Tenant
) -> Response:
    """Return a model."""
    if model in models.base_names:
        return json_response(_base(models, engine, config.model))
    known = await models.look_up(tenant, unquote(model))
    if known is None:
        raise not_found(
            f"The model '{model}' does not exist", param="model", code="model_not_found"
        )
    return json_response(_adapter(models, known))


def _base(models: ServedModels, engine: EngineAccess, root: str) -> dict[str, Any]:
    ready = engine.ready
    return {
        "id": models.name,
        "object": "model",
        "created": models.created,
        "owned_by": "coserve",
        "root": root,
        "parent": None,
        "max_model_len": most_tokens(ready) if ready is not None else None,
    }


def _adapter(models: ServedModels, known: AdapterRecord) -> dict[str, Any]:
    return {
        "id": known.name,
        "object": "model",
        "created": known.created_at,
        "owned_by": "coserve",
        "root": known.root,
        "parent": models.name,
    }


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(
    body: LoadAdapterBody,
    context: GenerationPart,
    models: ModelsPart,
    engine: EnginePart,
    config: ConfigPart,
    tenant: Tenant,
) -> Response:
    """Serve an adapter in PEFT's format."""
    if not body.lora_name or not body.lora_path:
        raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
    name = body.lora_name
    check_texts(name, param="lora_name")
    check_texts(body.lora_path, param="lora_path")
    if len(name) > _LONGEST_NAME:
        raise _invalid(
            f"'lora_name' has {len(name)} characters; {_LONGEST_NAME} are allowed.", "lora_name"
        )
    if "@" in name:
        raise _invalid(
            "'lora_name' must not contain an @, which separates name and version.", "lora_name"
        )
    if name in models.base_names:
        raise _invalid(f"'{name}' is the name of the base model.", "lora_name")
    context.require_ready()
    directory = await run_in_threadpool(_allowed, body.lora_path, config.allow_adapter_paths)
    async with models.loaded.lock:
        there = await models.look_up(tenant, name)
        if there is not None and (
            not body.load_inplace or models.loaded.find(tenant, name) is None
        ):
            raise _invalid(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                f"adapter in place, set 'load_inplace' to true."
            )
        record = adapter_at(str(directory), tenant=tenant, name=name, base=models.name)
        try:
            await engine.load_adapter(record.ref)
        except AdapterError as error:
            raise ApiError(str(error), param="lora_path") from error
        try:
            await run_in_threadpool(models.loaded.add, record)
        except StoreError:
            await _unload(engine, record)
            raise
        if there is not None:
            await _unload(engine, there)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(
    body: UnloadAdapterBody, models: ModelsPart, engine: EnginePart, tenant: Tenant
) -> Response:
    """Stop serving an adapter, also after a restart; requests that use it continue to their end."""
    if not body.lora_name:
        raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    async with models.loaded.lock:
        if not models.loaded.has(tenant, body.lora_name):
            message = f"The lora adapter '{body.lora_name[:_LONGEST_NAME]}' cannot be found."
            raise ApiError(message, status=404, kind="NotFoundError", param="lora_name")
        known = models.loaded.find(tenant, body.lora_name)
        await run_in_threadpool(models.loaded.remove, tenant, body.lora_name)
        if known is not None:
            await _unload(engine, known)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _unload(engine: EngineAccess, adapter: AdapterRecord) -> None:
    with suppress(EngineGoneError):  # an engine that is gone has no adapter
        await engine.unload_adapter(adapter.ref.name)


def _allowed(given: str, allowed: tuple[Path, ...]) -> Path:
    """Return a directory that may be read, with all links resolved. Blocks.

    Raises:
        ApiError: It may not be read, or there is none.
    """
    if not allowed:
        raise ApiError(
            "no path is allowed: start the server with --allow-adapter-paths",
            status=403,
            param="lora_path",
        )
    if len(given) > _LONGEST_PATH:
        raise _invalid(
            f"'lora_path' has {len(given)} characters; {_LONGEST_PATH} are allowed.", "lora_path"
        )
    try:
        path = Path(given).resolve()
        inside = lies_in(path, allowed)
    except (ValueError, OSError, RuntimeError):  # not a path, or links in a circle
        raise _invalid("'lora_path' is not a valid path.", "lora_path") from None
    if not inside:
        raise ApiError("lora_path is not below a directory of --allow-adapter-paths", status=403)
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        message = f"No adapter found for '{given}'."
        raise ApiError(message, status=404, kind="NotFoundError", param="lora_path") from None
    except OSError as error:
        raise _invalid(f"'lora_path' cannot be read: {error.strerror}.", "lora_path") from None
    if not is_directory:
        raise _invalid(
            "'lora_path' is a file: give the directory that PEFT's save_pretrained wrote.",
            "lora_path",
        )
    return path


def _invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(message, kind="InvalidUserInput", param=param)
