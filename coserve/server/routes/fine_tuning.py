"""/v1/fine_tuning/jobs, and the deletion of the models that come of them."""

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from coserve.devices.job_messages import OPTIMIZER_FILE
from coserve.engine.checkpoint import POSITION_FILE
from coserve.errors import EngineGoneError
from coserve.jobs.folders import entries
from coserve.jobs.names import SUFFIX, organization
from coserve.jobs.records import AdapterRef, CheckpointRecord, EventRecord, JobRecord, Page
from coserve.jobs.results import ANSWERS, by_step
from coserve.jobs.settings import JobSettings, job_settings
from coserve.jobs.trackers import has_wandb
from coserve.server.bodies import JsonRoute
from coserve.server.context import Context, ServerContext, Tenant
from coserve.server.errors import ApiError, not_found
from coserve.server.responses import json_response
from coserve.server.schemas import Body, List, Name, Texts
from coserve.server.texts import check_texts
from coserve.tuning.objectives import SUPERVISED, objective_names

router = APIRouter(route_class=JsonRoute)

_JOBS = "/v1/fine_tuning/jobs"
_MOST_SEED = 2**31 - 1
_MOST_INTEGRATIONS = 5
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_Whole = int | Literal["auto"] | None
# How many a page may have.
_Limit = Annotated[int, Query(ge=1, le=1000)]


def _hyphenated(suffix: str) -> str:
    """Names have no spaces."""
    return "-".join(suffix.split())


class Hyperparameters(Body):
    """OpenAI's, of supervised fine-tuning; ranges are checked where they are used."""

    n_epochs: _Whole = None
    batch_size: _Whole = None
    learning_rate_multiplier: float | Literal["auto"] | None = None


class Supervised(Body):
    """The method's settings."""

    hyperparameters: Hyperparameters | None = None


class OfObjective(Body):
    """Likewise, of any other: the same hyperparameters, and the objective's own (`coserve.tuning.objectives`)."""

    hyperparameters: dict[str, Any] | None = None


class Method(Body):
    """OpenAI's supervised and dpo, and coserve's other objectives."""

    type: Literal["supervised", "dpo", "orpo", "simpo", "kto", "policy_gradient", "reinforcement"]
    supervised: Supervised | None = None
    dpo: OfObjective | None = None
    orpo: OfObjective | None = None
    simpo: OfObjective | None = None
    kto: OfObjective | None = None
    policy_gradient: OfObjective | None = None
    reinforcement: dict[str, Any] | None = None

    @property
    def objective(self) -> str:
        """Its name in `coserve.tuning.objectives`."""
        return self.type.replace("_", "-")


class Wandb(Body):
    """A project of Weights & Biases, and how the job's run is called there."""

    project: Annotated[str, Field(min_length=1, max_length=128)]
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    entity: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    tags: Annotated[List[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=50)] | None = None


class Integration(Body):
    """Where a job's metrics go as well."""

    type: Literal["wandb"]
    wandb: Wandb


class CreateJobBody(Body):
    """POST /v1/fine_tuning/jobs."""

    model: Name
    training_file: Name
    validation_file: Name | None = None
    suffix: Annotated[str | None, AfterValidator(_hyphenated)] = None
    seed: Annotated[int, Field(ge=0, le=_MOST_SEED)] | None = None
    metadata: Texts | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: Annotated[List[Integration], Field(max_length=_MOST_INTEGRATIONS)] | None = None
    coserve: dict[str, Any] | None = None


@router.post(_JOBS)
async def create_job(body: CreateJobBody, context: Context, tenant: Tenant) -> Response:
    """A new job."""
    # Not here: to match patterns with all of a model's modules takes a moment.
    base, start, settings = await run_in_threadpool(_read, body, context, tenant)
    job = await context.jobs.create(
        tenant,
        model=body.model,
        base=base,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        metadata=body.metadata,
        settings=settings,
        start=start,
        max_jobs=context.limits_of(tenant).max_jobs,
    )
    return json_response(await run_in_threadpool(_job, context, job))


@router.get(_JOBS)
def list_jobs(
    request: Request, context: Context, tenant: Tenant, after: str | None = None, limit: _Limit = 20
) -> Response:
    """A page of them, the newest first; `metadata[key]=value` asks for those with these, `metadata=null` for those
    without any.
    """
    metadata = {}
    for name, value in request.query_params.multi_items():
        if (found := re.fullmatch(r"metadata\[(.*)\]", name, re.DOTALL)) is not None:
            metadata[found[1]] = value
    bare = request.query_params.get("metadata")
    if bare not in (None, "null"):
        raise ApiError("'metadata' must be null, or be given as metadata[key]=value.", param="metadata")
    with context.jobs.store.read() as transaction:
        page = transaction.jobs(tenant, after=after, limit=limit, metadata=metadata, bare=bare == "null")
    return _page(page, _jobs(context, page.items))


@router.get(_JOBS + "/{job_id}")
def retrieve_job(job_id: str, context: Context, tenant: Tenant) -> Response:
    """One of them."""
    return json_response(_job(context, _find(context, tenant, job_id)))


@router.post(_JOBS + "/{job_id}/cancel")
async def cancel_job(job_id: str, context: Context, tenant: Tenant) -> Response:
    """End it at once."""
    await run_in_threadpool(_find, context, tenant, job_id)
    job = await context.jobs.cancel(tenant, job_id)
    return json_response(await run_in_threadpool(_job, context, job))


@router.post(_JOBS + "/{job_id}/pause")
async def pause_job(job_id: str, context: Context, tenant: Tenant) -> Response:
    """Let it rest where it is."""
    await run_in_threadpool(_find, context, tenant, job_id)
    job = await context.jobs.pause(tenant, job_id)
    return json_response(await run_in_threadpool(_job, context, job))


@router.post(_JOBS + "/{job_id}/resume")
async def resume_job(job_id: str, context: Context, tenant: Tenant) -> Response:
    """The inverse."""
    await run_in_threadpool(_find, context, tenant, job_id)
    job = await context.jobs.resume(tenant, job_id)
    return json_response(await run_in_threadpool(_job, context, job))


@router.get(_JOBS + "/{job_id}/events")
def list_events(
    job_id: str, context: Context, tenant: Tenant, after: str | None = None, limit: _Limit = 20
) -> Response:
    """Its events, the newest first."""
    _find(context, tenant, job_id)
    with context.jobs.store.read() as transaction:
        page = transaction.events(tenant, job_id, after=after, limit=limit)
    return _page(page, [_event(event) for event in page.items])


@router.get(_JOBS + "/{job_id}/checkpoints")
def list_checkpoints(
    job_id: str, context: Context, tenant: Tenant, after: str | None = None, limit: _Limit = 10
) -> Response:
    """Its checkpoints, the newest first."""
    _find(context, tenant, job_id)
    with context.jobs.store.read() as transaction:
        page = transaction.checkpoints(tenant, job_id, after=after, limit=limit)
        data = [_checkpoint(each, transaction.metrics(job_id, step=each.step)) for each in page.items]
    return _page(page, data)


@router.get(_JOBS + "/{job_id}/adapter")
def list_adapter_files(
    job_id: str, context: Context, tenant: Tenant, step: Annotated[int, Query(ge=0)] | None = None
) -> Response:
    """The files of the adapter that it has made, in PEFT's format; step: of a checkpoint (default: the newest)."""
    directory = _adapter_directory(context, _find(context, tenant, job_id), step)
    data = [{"name": path.name, "bytes": path.stat().st_size} for path in sorted(_adapter_files(directory))]
    return json_response({"object": "list", "data": data})


@router.get(_JOBS + "/{job_id}/adapter/{name}")
def retrieve_adapter_file(
    job_id: str, name: str, context: Context, tenant: Tenant, step: Annotated[int, Query(ge=0)] | None = None
) -> Response:
    """One of these."""
    directory = _adapter_directory(context, _find(context, tenant, job_id), step)
    found = [path for path in _adapter_files(directory) if path.name == name]
    if not found:
        raise not_found(f"The adapter has no file {name!r}", param="name")
    return FileResponse(found[0], media_type="application/octet-stream")


@router.delete("/v1/models/{model:path}")
async def delete_model(model: str, context: Context, tenant: Tenant) -> Response:
    """Forget a model that a job has made, with its checkpoints; or one of those."""
    name = unquote(model)
    if name in context.base_names or context.loaded.knows(tenant, name):
        raise ApiError(f"The model '{name}' was not made by fine-tuning, and cannot be deleted.", param="model")
    gone = await context.jobs.delete_adapter(tenant, name)
    if not gone:
        raise not_found(f"The model '{name}' does not exist", param="model", code="model_not_found")
    with suppress(EngineGoneError):  # then it is not there either
        for each in gone:
            await context.link.unload_adapter(each)
    return json_response({"id": name, "object": "model", "deleted": True})


# -- from bodies ------------------------------------------------------------------------


def _read(body: CreateJobBody, context: ServerContext, tenant: str) -> tuple[str, AdapterRef | None, JobSettings]:
    """The model underneath, the adapter that the job trains further, and its settings."""
    _check(body)
    base, start = _start(context, tenant, body.model)
    model = context.jobs.models[base]
    settings = job_settings(
        hyperparameters=_hyperparameters(body),
        extension=body.coserve or {},
        seed=secrets.randbelow(_MOST_SEED + 1) if body.seed is None else body.seed,
        architecture=model.architecture,
        max_positions=model.max_positions,
        is_fresh=start is None,
        objective=SUPERVISED if body.method is None else body.method.objective,
        has_validation=body.validation_file is not None,
    )
    _check_data_parallel(settings, base, context)
    integrations = tuple(each.model_dump(exclude_none=True) for each in body.integrations or ())
    check_texts(list(integrations), param="integrations")
    return base, start, replace(settings, integrations=integrations)


def _check_data_parallel(settings: JobSettings, base: str, context: ServerContext) -> None:
    if settings.data_parallel is None:
        return
    asked, num_nodes = settings.data_parallel.num_nodes, context.link.num_nodes
    if base != context.jobs.models.served.name:
        wrong = f"{base} is trained beside the model that serves, on one node: leave it out."
    elif num_nodes < asked:
        nodes = "1 node that is ready" if num_nodes == 1 else f"{num_nodes} nodes that are ready"
        wrong = f"this server has {nodes}: ask for no more, or add some with coserve cluster up."
    else:
        return
    raise ApiError(f"'coserve.data_parallel' is {asked}, and {wrong}", param="coserve.data_parallel")


def _check(body: CreateJobBody) -> None:
    for param, value in body:
        if isinstance(value, str | dict):
            check_texts(value, param=param)
    if body.suffix is not None and SUFFIX.fullmatch(body.suffix) is None:
        raise ApiError(
            "'suffix' must be 1 to 64 letters, digits, dots, hyphens or underscores.",
            param="suffix",
            code="invalid_value",
        )
    if body.integrations and not has_wandb():
        raise ApiError(
            "'integrations' of type wandb need a package on the server: pip install 'coserve[wandb]'.",
            param="integrations",
        )
    if body.method is not None:
        _check_method(body.method)
    metadata = body.metadata or {}
    if len(metadata) > _MOST_PAIRS:
        raise ApiError(f"'metadata' has {len(metadata)} pairs; {_MOST_PAIRS} are allowed.", param="metadata")
    if any(len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE for key, value in metadata.items()):
        raise ApiError(
            f"'metadata' may have keys of {_LONGEST_KEY} and values of {_LONGEST_VALUE} characters.", param="metadata"
        )


def _check_method(method: Method) -> None:
    if method.objective not in objective_names():
        known = ", ".join(f"'{name.replace('-', '_')}'" for name in objective_names())
        raise ApiError(
            f"The method '{method.type}' is not supported: 'method.type' must be one of {known}.", param="method.type"
        )
    for name, value in method:
        if name not in ("type", method.type) and value is not None:
            raise ApiError(f"'method.{name}' does not belong to the method '{method.type}'.", param=f"method.{name}")


def _hyperparameters(body: CreateJobBody) -> dict[str, Any]:
    own = None if body.method is None else getattr(body.method, body.method.type)
    if isinstance(own, OfObjective):
        return own.hyperparameters or {}
    asked = None if own is None else own.hyperparameters
    if asked is not None and body.hyperparameters is not None and asked != body.hyperparameters:
        raise ApiError(
            "'hyperparameters' and 'method.supervised.hyperparameters' differ: give the latter alone.",
            param="hyperparameters",
        )
    given = asked or body.hyperparameters
    return {} if given is None else given.model_dump()


def _start(context: ServerContext, tenant: str, model: str) -> tuple[str, AdapterRef | None]:
    """The model underneath, and the adapter on it that a job trains further; None for a fresh one."""
    jobs = context.jobs
    if model in context.base_names:
        return jobs.models.served.name, None
    if model in jobs.models:
        return model, None
    known = context.find_adapter(tenant, model) or jobs.adapters.find_on_any(tenant, model)
    if known is None or known.base not in jobs.models:
        raise not_found(f"The model '{model}' does not exist", param="model", code="model_not_found")
    return known.base, known.ref


def _find(context: ServerContext, tenant: str, id: str) -> JobRecord:
    with context.jobs.store.read() as transaction:
        job = transaction.job(tenant, id)
    if job is None:
        raise not_found(f"Could not find fine tune: {id}", param="fine_tuning_job_id", code="fine_tune_not_found")
    return job


def _adapter_directory(context: ServerContext, job: JobRecord, step: int | None) -> Path:
    """Of its checkpoint after a step, or of the newest."""
    with context.jobs.store.read() as transaction:
        listed = [each for each in transaction.all_checkpoints(job.id) if each.listed and step in (None, each.step)]
    if not listed:
        which = "" if step is None else f" after step {step}"
        raise not_found(f"Job {job.id} has no checkpoint{which}", param="step")
    return Path(listed[-1].directory)


def _adapter_files(directory: Path) -> list[Path]:
    """Without what only its job needs to resume."""
    return [path for path in entries(directory) if path.is_file() and path.name not in (OPTIMIZER_FILE, POSITION_FILE)]


# -- to JSON ----------------------------------------------------------------------------


def _job(context: ServerContext, job: JobRecord) -> dict[str, Any]:
    [found] = _jobs(context, [job])
    return found


def _jobs(context: ServerContext, jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """As clients see them. Blocks."""
    with context.jobs.store.read() as transaction:
        losses = transaction.last_losses([job.id for job in jobs])
    return [_job_json(context, job, losses.get(job.id)) for job in jobs]


def _job_json(context: ServerContext, job: JobRecord, loss: float | None) -> dict[str, Any]:
    settings = JobSettings.from_data(job.settings)
    hyperparameters, method = settings.hyperparameters(job.num_examples), settings.objective.replace("-", "_")
    return {
        "object": "fine_tuning.job",
        "id": job.id,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "estimated_finish": context.jobs.estimated_finish(job),
        "status": job.status,
        "error": job.error,
        "model": job.model,
        "fine_tuned_model": job.name if job.status == "succeeded" else None,
        "organization_id": f"org-{organization(job.tenant)}",
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "result_files": [] if job.result_file is None else [job.result_file],
        "trained_tokens": job.trained_tokens,
        "hyperparameters": hyperparameters,
        "method": {"type": method, method: {"hyperparameters": hyperparameters}},
        "seed": job.seed,
        "user_provided_suffix": job.suffix,
        "metadata": job.metadata,
        "integrations": list(settings.integrations),
        "coserve": {
            "step": job.num_steps_done,
            "total_steps": job.num_steps or None,
            "train_loss": loss,
            "adapter": job.name,
            "queue_position": context.jobs.queue_position(job),
            "share_validated": context.jobs.share_validated(job),
        },
    }


def _event(event: EventRecord) -> dict[str, Any]:
    return {
        "object": "fine_tuning.job.event",
        "id": event.id,
        "created_at": event.created_at,
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.kind else "message",
        "data": event.data,
    }


def _checkpoint(checkpoint: CheckpointRecord, events: tuple[EventRecord, ...]) -> dict[str, Any]:
    known = by_step(events).get(checkpoint.step, {})
    names = [f"{kind}_{what}" for kind in ("train", "valid", "full_valid") for what in ("loss", "mean_token_accuracy")]
    names += ANSWERS
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": checkpoint.id,
        "created_at": checkpoint.created_at,
        "fine_tuned_model_checkpoint": checkpoint.name,
        "fine_tuning_job_id": checkpoint.job,
        "step_number": checkpoint.step,
        "metrics": {"step": checkpoint.step, **{name: known[name] for name in names if known.get(name) is not None}},
    }


def _page(page: Page, data: list[dict[str, Any]]) -> Response:
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": page.has_more,
        }
    )
