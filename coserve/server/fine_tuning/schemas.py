"""Bodies of /v1/fine_tuning/jobs."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from coserve.server.bodies.schemas import Body, List, Name, Texts
from coserve.tuning.objectives import SUPERVISED, method_names

MOST_SEED = 2**31 - 1
_MOST_INTEGRATIONS = 5
_Whole = int | Literal["auto"] | None


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
    """The settings of any other method: the same hyperparameters, and the objective's own."""

    hyperparameters: dict[str, Any] | None = None


class MethodBody(Body):
    """What the methods of all objectives have in common."""

    type: str
    supervised: Supervised | None = None

    @property
    def objective(self) -> str:
        """The objective's name in `coserve.tuning.objectives`."""
        return self.type.replace("_", "-")


def method_body() -> type[MethodBody]:
    """Make the body of a method from the registry of objectives: each is a type, with settings of
    that name.

    OpenAI's `reinforcement` is a known name, too, so that the answer to it says which methods there
    are.
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
    """A project of Weights & Biases, and how the job's run is called there."""

    project: Annotated[str, Field(min_length=1, max_length=128)]
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    entity: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    tags: (
        Annotated[List[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=50)]
        | None
    ) = None


class Integration(Body):
    """Where a job's metrics go as well."""

    type: Literal["wandb"]
    wandb: Wandb


class CreateJobBody(Body):
    """POST /v1/fine_tuning/jobs."""

    model: Name
    training_file: Name
    validation_file: Name | None = None
    suffix: Annotated[str, AfterValidator(_hyphenated)] | None = None
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] | None = None
    metadata: Texts | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: Annotated[List[Integration], Field(max_length=_MOST_INTEGRATIONS)] | None = None
    coserve: dict[str, Any] | None = None
