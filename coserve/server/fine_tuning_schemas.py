"""Bodies of /v1/fine_tuning/jobs."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from coserve.server.schemas import Body, List, Name, Texts

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
    suffix: Annotated[str, AfterValidator(_hyphenated)] | None = None
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] | None = None
    metadata: Texts | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: Annotated[List[Integration], Field(max_length=_MOST_INTEGRATIONS)] | None = None
    coserve: dict[str, Any] | None = None
