"""Settings of a new fine-tuning job, from its body."""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from coserve.adapters.methods import changes_model
from coserve.adapters.peft_directory import read_config
from coserve.engine.commands import AdapterRef
from coserve.errors import AdapterError
from coserve.jobs.manager import JobManager
from coserve.jobs.metrics.trackers import has_wandb
from coserve.jobs.names import SUFFIX
from coserve.jobs.settings import JobSettings, job_settings
from coserve.server.adapters.served import ServedModels
from coserve.server.bodies.texts import check_texts
from coserve.server.errors import ApiError, not_found
from coserve.server.fine_tuning.schemas import MAX_SEED, CreateJobBody, MethodBody, OfObjective
from coserve.tuning.objectives import SUPERVISED, method_names

_MAX_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


def read_job_request(
    body: CreateJobBody,
    tenant: str,
    *,
    jobs: JobManager,
    models: ServedModels,
    num_nodes: int,
) -> tuple[str, AdapterRef | None, JobSettings]:
    """Return what a new job trains. Blocks: matching patterns with all modules of a model takes a
    moment.

    Args:
        body: The body.
        tenant: Tenant that asks.
        jobs: Job manager.
        models: Models that requests can name.
        num_nodes: Number of nodes that are ready.

    Returns:
        The name of the model underneath, the adapter that the job trains further (None: a new one),
        and the settings.

    Raises:
        ApiError: A field is wrong.
    """
    _check(body)
    base, start = _start(jobs, models, tenant, body.model)
    model = jobs.models[base]
    settings = job_settings(
        hyperparameters=_hyperparameters(body),
        extension=body.coserve or {},
        seed=secrets.randbelow(MAX_SEED + 1) if body.seed is None else body.seed,
        architecture=model.architecture,
        max_positions=model.max_positions,
        is_fresh=start is None,
        num_virtual=0 if start is None else _num_virtual(start),
        objective=SUPERVISED if body.method is None else body.method.objective,
        has_validation=body.validation_file is not None,
    )
    _check_data_parallel(settings, num_nodes, serves=base == jobs.models.served.name, base=base)
    integrations = tuple(each.model_dump(exclude_none=True) for each in body.integrations or ())
    check_texts(list(integrations), param="integrations")
    return base, start, replace(settings, integrations=integrations)


def _num_virtual(start: AdapterRef) -> int:
    """Return the number of virtual tokens of an adapter; 0 if no directory says it."""
    try:
        return (
            0 if start.directory is None else read_config(Path(start.directory)).num_virtual_tokens
        )
    except AdapterError:  # the job will fail with this error
        return 0


def _check_data_parallel(settings: JobSettings, num_nodes: int, *, base: str, serves: bool) -> None:
    asked = 1 if settings.data_parallel is None else settings.data_parallel.num_nodes
    if changes_model(settings.adapter) and num_nodes > 1 and asked != num_nodes:
        wrong = (
            f"full fine-tuning changes the weights that all nodes serve: ask for all {num_nodes} "
            f"that are ready."
        )
    elif settings.data_parallel is None:
        return
    elif not serves:
        wrong = f"{base} is trained beside the model that serves, on one node: leave it out."
    elif num_nodes < asked:
        nodes = "1 node that is ready" if num_nodes == 1 else f"{num_nodes} nodes that are ready"
        wrong = f"this server has {nodes}: ask for no more, or add some with coserve cluster up."
    else:
        return
    raise ApiError(
        f"'coserve.data_parallel' is {asked}, and {wrong}", param="coserve.data_parallel"
    )


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
            "'integrations' of type wandb need a package on the server: pip install "
            "'coserve[wandb]'.",
            param="integrations",
        )
    if body.method is not None:
        _check_method(body.method)
    metadata = body.metadata or {}
    if len(metadata) > _MAX_PAIRS:
        raise ApiError(
            f"'metadata' has {len(metadata)} pairs; {_MAX_PAIRS} are allowed.", param="metadata"
        )
    if any(
        len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE for key, value in metadata.items()
    ):
        raise ApiError(
            f"'metadata' may have keys of {_LONGEST_KEY} and values of {_LONGEST_VALUE} "
            f"characters.",
            param="metadata",
        )


def _check_method(method: MethodBody) -> None:
    if method.type not in method_names():
        known = ", ".join(f"'{name}'" for name in method_names())
        raise ApiError(
            f"The method '{method.type}' is not supported: 'method.type' must be one of {known}.",
            param="method.type",
        )
    for name, value in method:
        if name not in ("type", method.type) and value is not None:
            raise ApiError(
                f"'method.{name}' does not belong to the method '{method.type}'.",
                param=f"method.{name}",
            )


def _hyperparameters(body: CreateJobBody) -> dict[str, Any]:
    own = None if body.method is None else getattr(body.method, body.method.type)
    if isinstance(own, OfObjective):
        return own.hyperparameters or {}
    asked = None if own is None else own.hyperparameters
    if asked is not None and body.hyperparameters is not None and asked != body.hyperparameters:
        raise ApiError(
            "'hyperparameters' and 'method.supervised.hyperparameters' differ: give the latter "
            "alone.",
            param="hyperparameters",
        )
    chosen = asked or body.hyperparameters
    return {} if chosen is None else chosen.model_dump()


def _start(
    jobs: JobManager, models: ServedModels, tenant: str, model: str
) -> tuple[str, AdapterRef | None]:
    """Return the base model, and the adapter that a job trains further; None for a new one."""
    if model in models.base_names:
        return jobs.models.served.name, None
    if model in jobs.models:
        return model, None
    known = models.find_adapter(tenant, model) or jobs.adapters.find_on_any(tenant, model)
    if known is None or known.base not in jobs.models:
        raise not_found(
            f"The model '{model}' does not exist", param="model", code="model_not_found"
        )
    return known.base, known.ref
