"""Bodies of /v1/fine_tuning/jobs."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from coserve.server.bodies.schemas import Body, List, Name, Texts
from coserve.tuning.objectives import SUPERVISED, method_names

MAX_SEED = 2**31 - 1
_MAX_INTEGRATIONS = 5
_Whole = int | Literal["auto"] | None


def _hyphenated(suffix: str) -> str:
    """Return a suffix with hyphens in place of spaces, which names cannot have."""
    return "-".join(suffix.split())


class Hyperparameters(Body):
    """OpenAI's hyperparameters of supervised fine-tuning; their ranges are checked on use."""

    n_epochs: _Whole = None
    """Number of epochs."""
    batch_size: _Whole = None
    """Number of examples per optimizer step."""
    learning_rate_multiplier: float | Literal["auto"] | None = None
    """Factor of the default learning rate."""


class Supervised(Body):
    """Settings of supervised fine-tuning."""

    hyperparameters: Hyperparameters | None = None
    """Hyperparameters."""


class OfObjective(Body):
    """Settings of any other method."""

    hyperparameters: dict[str, Any] | None = None
    """The same hyperparameters, and the objective's own."""


class MethodBody(Body):
    """Fields that the methods of all objectives share."""

    type: str
    """Name of the method."""
    supervised: Supervised | None = None
    """Settings of the method supervised."""

    @property
    def objective(self) -> str:
        """Name of the objective in `coserve.tuning.objectives`."""
        return self.type.replace("_", "-")


def method_body() -> type[MethodBody]:
    """Return the class of a method's body, made from the registry of objectives.

    Each objective is a type, with settings of that name. OpenAI's `reinforcement` is a known name,
    too, so that the error about it lists the methods.
    """
    names = method_names()
    settings: dict[str, Any] = {
        name: (OfObjective | None, None) for name in names if name != SUPERVISED
    }
    settings["reinforcement"] = (dict[str, Any] | None, None)
    types = Literal[(*names, "reinforcement")]  # type: ignore[valid-type]
    return create_model("Method", __base__=MethodBody, type=(types, ...), **settings)


if TYPE_CHECKING:
    Method = MethodBody
else:
    Method = method_body()


class Wandb(Body):
    """A project of Weights & Biases."""

    project: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the project."""
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Name of the job's run."""
    entity: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Owner of the project."""
    tags: (
        Annotated[List[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=50)]
        | None
    ) = None
    """Tags of the job's run."""


class Integration(Body):
    """Another destination of a job's metrics."""

    type: Literal["wandb"]
    """Kind of the destination."""
    wandb: Wandb
    """The project."""


class CreateJobBody(Body):
    """Body of POST /v1/fine_tuning/jobs."""

    model: Name
    """Model or adapter to train."""
    training_file: Name
    """File of examples."""
    validation_file: Name | None = None
    """File of examples for validation."""
    suffix: Annotated[str, AfterValidator(_hyphenated)] | None = None
    """Part of the new model's name."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Seed of the order of examples and of new weights (default: random)."""
    metadata: Texts | None = None
    """The client's own data."""
    method: Method | None = None
    """Method, with its hyperparameters (default: supervised)."""
    hyperparameters: Hyperparameters | None = None
    """Hyperparameters, by their older place."""
    integrations: Annotated[List[Integration], Field(max_length=_MAX_INTEGRATIONS)] | None = None
    """Further destinations of metrics."""
    coserve: dict[str, Any] | None = None
    """Settings beyond OpenAI's."""
