"""What models that jobs make are called: `ft:<base>:<org>:<suffix>:<id>`, as OpenAI calls them."""

import re

from coserve.jobs.records import DEFAULT_TENANT, new_id

# A name is part of a path and of `name@step`, and its parts are told apart by colons.
SUFFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")


_CHECKPOINT = ":ckpt-step-"


def checkpoint_name(model: str, step: int) -> str:
    """Of a job's model as it was after a step."""
    return f"{model}{_CHECKPOINT}{step}"


def is_checkpoint(name: str) -> bool:
    """Whether it is the name of one, and not of a finished model."""
    return _CHECKPOINT in name


def organization(tenant: str) -> str:
    """The name of a tenant in what others read."""
    return "coserve" if tenant == DEFAULT_TENANT else tenant


def model_name(base: str, tenant: str, suffix: str | None) -> str:
    """A new name. base: the model's, of which the last part of a path is taken."""
    parts = (base.rstrip("/").rsplit("/", 1)[-1].removeprefix("dummy:"), organization(tenant))
    short = [re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in parts]
    return ":".join(("ft", *short, suffix or "", new_id("", 8)))
