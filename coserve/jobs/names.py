"""Names of the models that jobs make: `ft:<base>:<org>:<suffix>:<id>`, as in OpenAI's API."""

import re

from coserve.jobs.records import DEFAULT_TENANT, new_id

# A name is part of a path and of `name@step`, and colons separate its parts.
SUFFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")


_CHECKPOINT = ":ckpt-step-"


def checkpoint_name(model: str, step: int) -> str:
    """Return the name of a job's checkpoint after a step."""
    return f"{model}{_CHECKPOINT}{step}"


def is_checkpoint(name: str) -> bool:
    """Return whether a name is that of a checkpoint, and not of a finished model."""
    return _CHECKPOINT in name


def organization(tenant: str) -> str:
    """Return the name of a tenant as others read it."""
    return "coserve" if tenant == DEFAULT_TENANT else tenant


def model_name(base: str, tenant: str, suffix: str | None) -> str:
    """Return a new model name, with the last part of the base model's path."""
    parts = (base.rstrip("/").rsplit("/", 1)[-1].removeprefix("dummy:"), organization(tenant))
    short = [re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in parts]
    return ":".join(("ft", *short, suffix or "", new_id("", 8)))
