"""Settings of jobs, from a client's request: OpenAI's hyperparameters, and the `coserve` extension.

"auto" (or nothing) means, with n examples: n_epochs 3, or as many as make a hundred uses of
examples, up to 10; batch_size n / 16, from 1 to 16; learning_rate_multiplier 1. The multiplier is a
factor on `coserve.optimizer.learning_rate`, whose default is 1e-4.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn, TypeVar

import msgspec

from coserve.adapters.base import AdapterConfig
from coserve.adapters.methods import method
from coserve.errors import AdapterError, JobError
from coserve.models.base import Architecture
from coserve.settings import MOST_WHOLE, check_number, check_whole, shown
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.early_stopping import TOKEN_ACCURACY, EarlyStopping
from coserve.tuning.evaluation import LOSS, EvaluationConfig
from coserve.tuning.objectives import (
    SUPERVISED,
    check_trains,
    make_objective,
    objective_class,
    objective_names,
)
from coserve.tuning.shard import SYNCHRONIZATIONS, DataParallel, Synchronization

_Settings = TypeVar("_Settings")
# Hyperparameters of every method, by OpenAI's names.
_COMMON_HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
_SHORTEST_SEQUENCE, _LONGEST_SEQUENCE = 2, 1024
_SYNCHRONIZE_EVERY_STEPS = 8
_MAX_MULTIPLIER = 1e6
# Far beyond useful values: a larger one is a mistake that would fail a job much later.
_MAX_OPTIMIZER_VALUES = {"learning_rate": 1e3, "eps": 1, "weight_decay": 1e3, "max_grad_norm": 1e9}
# Longest part of a client's field name that a message repeats.
_LONGEST_NAME = 64


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The `coserve` field of a request for a job."""

    adapter: Mapping[str, Any] | None = None
    """`type` (the name of a file of `adapters/methods/`), and that method's settings."""
    optimizer: Mapping[str, Any] | None = None
    """Fields of `OptimizerConfig`."""
    max_sequence_length: int | None = None
    """Number of tokens to which an example is cut (None: 1,024, or what the model allows)."""
    shuffle: bool = True
    """Whether each epoch has its own order of examples."""
    checkpoint_every_steps: int = 50
    """Optimizer steps from one listed checkpoint to the next (0: one after the last step alone)."""
    evaluate_every_steps: int | None = None
    """Optimizer steps from one evaluation to the next (None: one with every checkpoint)."""
    evaluation: Mapping[str, Any] | None = None
    """Fields of `EvaluationConfig`."""
    best_metric: str | None = None
    """Metric that decides which evaluation is the best, see `TuningConfig` (None: that of
    `evaluation`).
    """
    keep_best: bool = False
    """Whether the model is the checkpoint of the best evaluation, not the last one."""
    early_stopping: Mapping[str, Any] | None = None
    """Fields of `EarlyStopping` (None: the job makes all of its steps)."""
    live: bool = False
    """Whether every step is served at once."""
    strict: bool = False
    """Whether a file is refused if the prompt alone of an example is too long; otherwise such
    examples are left out.
    """
    max_recompute: float = 0.0
    """Limit of recomputation of activations, see `TuningConfig`."""
    data_parallel: int = 1
    """Number of a cluster's nodes among which the job is divided."""
    synchronization: str = "synchronous"
    """Strategy by which nodes exchange updates, see `coserve.tuning.shard`."""
    synchronize_every_steps: int | None = None
    """Optimizer steps from one exchange to the next (None: 1 if synchronous, else 8)."""


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings of a job, as they are stored."""

    adapter: dict[str, Any] | None = None
    """PEFT's configuration of a new adapter; None: the job trains another one further."""
    n_epochs: int | None = None
    """Number of epochs; None: auto."""
    batch_size: int | None = None
    """Number of examples of an optimizer step; None: auto."""
    learning_rate_multiplier: float | None = None
    """Factor on the learning rate; None: auto."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Settings of the optimizer."""
    max_sequence_length: int = _LONGEST_SEQUENCE
    """Number of tokens to which an example is cut."""
    shuffle: bool = True
    """Whether each epoch has its own order of examples."""
    seed: int = 0
    """Seed of initial values, of dropout and of the order of examples."""
    checkpoint_every_steps: int = 50
    """Optimizer steps from one listed checkpoint to the next (0: one after the last step alone)."""
    evaluate_every_steps: int = 50
    """Optimizer steps from one evaluation to the next (0: one after the last step alone)."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """How the validation set is evaluated."""
    best_metric: str = LOSS
    """Metric that decides which evaluation is the best."""
    keep_best: bool = False
    """Whether the model is the checkpoint of the best evaluation, not the last one."""
    early_stopping: EarlyStopping | None = None
    """Rule by which the job ends early (None: it makes all of its steps)."""
    live: bool = False
    """Whether every step is served at once."""
    strict: bool = False
    """Whether a file is refused if the prompt alone of an example is too long."""
    max_recompute: float = 0.0
    """Limit of recomputation of activations, see `TuningConfig`."""
    objective: str = SUPERVISED
    """Name of the objective, see `coserve.tuning.objectives`."""
    objective_settings: dict[str, float] = field(default_factory=dict)
    """Hyperparameters of the objective that the client gave."""
    integrations: tuple[dict[str, Any], ...] = ()
    """Experiment trackers, as in OpenAI's API."""
    data_parallel: DataParallel | None = None
    """Division among nodes; None: the job is not divided."""

    def tuning_config(self, num_examples: int) -> TuningConfig:
        """Return the configuration of training, with every "auto" resolved."""
        n_epochs = self.n_epochs or min(10, max(3, -(-100 // num_examples)))
        rate = self.optimizer.learning_rate * (self.learning_rate_multiplier or 1.0)
        return TuningConfig(
            num_epochs=n_epochs,
            batch_size=self.batch_size or min(16, max(1, num_examples // 16)),
            max_sequence_length=self.max_sequence_length,
            shuffle=self.shuffle,
            seed=self.seed,
            evaluate_every_steps=self.evaluate_every_steps,
            evaluation=self.evaluation,
            best_metric=self.best_metric,
            early_stopping=self.early_stopping,
            live=self.live,
            max_recompute=self.max_recompute,
            objective=self.objective,
            objective_settings=self.objective_settings,
            optimizer=replace(self.optimizer, learning_rate=rate),
        )

    def hyperparameters(self, num_examples: int) -> dict[str, Any]:
        """Return the hyperparameters as a job shows them: "auto" until the examples have been
        counted.
        """
        if not num_examples:
            known: dict[str, Any] = {}
            for name in _COMMON_HYPERPARAMETERS:
                value = getattr(self, name)
                known[name] = "auto" if value is None else value
            return known | self._objective_settings()
        config = self.tuning_config(num_examples)
        return {
            "n_epochs": config.num_epochs,
            "batch_size": config.batch_size,
            "learning_rate_multiplier": self.learning_rate_multiplier or 1.0,
        } | self._objective_settings()

    def _objective_settings(self) -> dict[str, Any]:
        """Return the objective's hyperparameters, with defaults for those that were not given."""
        objective = make_objective(self.objective, self.objective_settings)
        return (
            {}
            if objective is None
            else {each.name: getattr(objective, each.name) for each in fields(objective)}
        )

    def to_data(self) -> dict[str, Any]:
        """Return the settings as plain data, which `from_data` converts back."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "JobSettings":
        return msgspec.convert(data, cls)


def job_settings(
    *,
    hyperparameters: Mapping[str, Any],
    extension: Mapping[str, Any],
    seed: int,
    architecture: Architecture,
    is_fresh: bool,
    max_positions: int | None = None,
    num_virtual: int = 0,
    objective: str = SUPERVISED,
    has_validation: bool = False,
) -> JobSettings:
    """Return the settings of a job, after all checks.

    Args:
        hyperparameters: OpenAI's hyperparameters and those of the objective; "auto" and None mean
            auto.
        extension: The `coserve` field.
        seed: Seed of the job.
        architecture: Architecture of the model, which the adapter must fit.
        is_fresh: Whether the job makes a new adapter; otherwise it trains one further.
        max_positions: Longest example in tokens; None: as long as the model was made for.
        num_virtual: Number of virtual tokens of the adapter that is trained further.
        objective: Name of the objective.
        has_validation: Whether there is a validation file.

    Raises:
        JobError: The message names the field, and what would be right.
    """
    asked = _build(Extension, extension, "coserve")
    _check_extension(asked)
    if is_fresh and _trains_model(asked.adapter) and not asked.live:
        _refuse(
            "coserve.live",
            "must be true for full fine-tuning: there is one copy of the weights, which serves",
        )
    if is_fresh and _trains_model(asked.adapter):
        _check_full(objective)
    if not is_fresh and asked.adapter is not None:
        _refuse(
            "coserve.adapter",
            "must not be given where the model is an adapter: that one is trained further",
        )
    every = asked.checkpoint_every_steps
    evaluation = _evaluation(
        {} if asked.evaluation is None else asked.evaluation, objective, has_validation
    )
    early_stopping = _early_stopping(asked, evaluation, has_validation=has_validation)
    if asked.keep_best and is_fresh and _trains_model(asked.adapter):
        _refuse(
            "coserve.keep_best",
            "must be false for full fine-tuning: what is trained is the one copy that serves",
        )
    known = _hyperparameters(hyperparameters)
    own = {
        name: value
        for name, value in hyperparameters.items()
        if name not in _COMMON_HYPERPARAMETERS and value not in (None, "auto")
    }
    with _errors_about("method"):
        make_objective(objective, own)
    adapter_fields = {} if asked.adapter is None else asked.adapter
    adapter = _adapter(adapter_fields, architecture, objective) if is_fresh else None
    num_virtual = num_virtual if adapter is None else adapter.num_virtual_tokens
    length = _sequence_length(
        asked.max_sequence_length, max_positions or architecture.max_positions, num_virtual
    )
    settings = JobSettings(
        adapter=None if adapter is None else adapter.to_peft(),
        optimizer=_build(
            OptimizerConfig,
            _with_tuples({} if asked.optimizer is None else asked.optimizer),
            "coserve.optimizer",
        ),
        max_sequence_length=length,
        shuffle=asked.shuffle,
        seed=seed,
        checkpoint_every_steps=every,
        evaluate_every_steps=every
        if asked.evaluate_every_steps is None
        else asked.evaluate_every_steps,
        evaluation=evaluation,
        best_metric=evaluation.metric if asked.best_metric is None else asked.best_metric,
        keep_best=asked.keep_best,
        early_stopping=early_stopping,
        live=asked.live,
        strict=asked.strict,
        max_recompute=float(asked.max_recompute),
        objective=objective,
        objective_settings=own,
        data_parallel=_data_parallel(asked),
        **known,
    )
    with _errors_about("hyperparameters"):
        optimizer = settings.tuning_config(1).optimizer
    for name, most in _MAX_OPTIMIZER_VALUES.items():
        with _errors_about(f"coserve.optimizer.{name}"):
            check_number(f"coserve.optimizer.{name}", getattr(optimizer, name), least=0, most=most)
    return settings


def _check_extension(asked: Extension) -> None:
    """Raise JobError for a number or a flag that is out of its range."""
    for name, value, least in (
        ("checkpoint_every_steps", asked.checkpoint_every_steps, 0),
        ("evaluate_every_steps", asked.evaluate_every_steps, 0),
        ("max_sequence_length", asked.max_sequence_length, _SHORTEST_SEQUENCE),
    ):
        if value is not None or name == "checkpoint_every_steps":
            _check_whole(f"coserve.{name}", value, least, MOST_WHOLE)
    for name in ("shuffle", "live", "strict", "keep_best"):
        if not isinstance(getattr(asked, name), bool):
            _refuse(f"coserve.{name}", f"must be true or false, not {shown(getattr(asked, name))}")
    with _errors_about("coserve.max_recompute"):
        check_number("coserve.max_recompute", asked.max_recompute, least=0, most=1)


def _data_parallel(asked: Extension) -> DataParallel | None:
    _check_whole("coserve.data_parallel", asked.data_parallel, 1, MOST_WHOLE)
    where, known = "coserve.synchronization", SYNCHRONIZATIONS
    if asked.synchronization not in known:
        _refuse(where, f"must be one of {', '.join(known)}, not {shown(asked.synchronization)}")
    synchronization: Synchronization = known[known.index(asked.synchronization)]
    every, is_synchronous = asked.synchronize_every_steps, synchronization == "synchronous"
    if every is not None:
        _check_whole("coserve.synchronize_every_steps", every, 1, MOST_WHOLE)
        if is_synchronous and every > 1:
            _refuse(
                "coserve.synchronize_every_steps",
                "goes with local-sgd or asynchronous; synchronous is every step",
            )
    if asked.data_parallel == 1:
        return None
    every = every or (1 if is_synchronous else _SYNCHRONIZE_EVERY_STEPS)
    return DataParallel(
        num_nodes=asked.data_parallel, synchronization=synchronization, every_steps=every
    )


def _hyperparameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that are not auto."""
    known: dict[str, Any] = {}
    for name, most in (("n_epochs", 50), ("batch_size", 256)):
        if (value := values.get(name)) not in (None, "auto"):
            _check_whole(f"hyperparameters.{name}", value, 1, most)
            known[name] = value
    if (factor := values.get("learning_rate_multiplier")) not in (None, "auto"):
        with _errors_about("hyperparameters.learning_rate_multiplier"):
            check_number(
                "hyperparameters.learning_rate_multiplier", factor, above=0, most=_MAX_MULTIPLIER
            )
        known["learning_rate_multiplier"] = float(factor)
    return known


def _evaluation(values: Any, objective: str, has_validation: bool) -> EvaluationConfig:
    where = "coserve.evaluation"
    config = _build(EvaluationConfig, values, where)
    if config.asks and objective != SUPERVISED:
        _refuse(f"{where}.metric", f"{config.metric} goes with the method supervised alone")
    if config.asks and not has_validation:
        _refuse(
            f"{where}.metric", f"{config.metric} needs a validation_file, whose questions are asked"
        )
    return config


def _early_stopping(
    asked: Extension, evaluation: EvaluationConfig, *, has_validation: bool
) -> EarlyStopping | None:
    """Return the rule by which a job ends early.

    Raises:
        JobError: A setting needs evaluations that the job does not have.
    """
    every = (
        asked.checkpoint_every_steps
        if asked.evaluate_every_steps is None
        else asked.evaluate_every_steps
    )
    for name, is_asked in (
        ("keep_best", asked.keep_best),
        ("early_stopping", asked.early_stopping is not None),
    ):
        if is_asked and not has_validation:
            _refuse(f"coserve.{name}", "needs a validation_file, by which models are compared")
        if is_asked and not every:
            _refuse(f"coserve.{name}", "needs evaluate_every_steps above 0")
        if is_asked and asked.data_parallel > 1:
            _refuse(f"coserve.{name}", "does not go with data_parallel above 1")
    if asked.keep_best and asked.live:
        _refuse("coserve.keep_best", "does not go with live, which serves every step")
    metrics = dict.fromkeys((LOSS, TOKEN_ACCURACY, evaluation.metric))
    if asked.best_metric is not None and asked.best_metric not in metrics:
        _refuse(
            "coserve.best_metric",
            f"must be one of {', '.join(metrics)}, not {shown(asked.best_metric)}",
        )
    if asked.early_stopping is None:
        return None
    return _build(EarlyStopping, asked.early_stopping, "coserve.early_stopping")


def _adapter(
    values: Mapping[str, Any], architecture: Architecture, objective: str
) -> AdapterConfig:
    where = "coserve.adapter"
    if not isinstance(values, Mapping):
        _refuse(where, f"must be an object, not {shown(values)}")
    try:
        kind = method(values.get("type", "lora"))
    except ValueError as error:
        _refuse(f"{where}.type", str(error))
    asked = {name: value for name, value in values.items() if name != "type"}
    config = _build(kind, {**kind.job_defaults, **asked}, where)
    for name, wrong in config.misfits(architecture):
        _refuse(f"{where}.{name[:_LONGEST_NAME]}", wrong)
    try:
        sites = config.sites(architecture)
    except AdapterError as error:
        raise JobError(f"{where}: {error}", param=f"{where}.target_modules") from None
    try:
        check_trains(
            objective, config, trains_head=any(part == "head" for part, _ in sites.values())
        )
    except AdapterError as error:
        raise JobError(f"{where}: {error}", param=where) from None
    return config


def _sequence_length(asked: int | None, positions: int, num_virtual: int) -> int:
    """Return the length to which examples are cut, with room for an adapter's virtual tokens."""
    if (room := positions - num_virtual) < _SHORTEST_SEQUENCE:
        _refuse(
            "coserve.adapter.num_virtual_tokens",
            f"is {num_virtual}; that leaves {max(0, room)} of {positions} positions for an "
            f"example, "
            f"which needs {_SHORTEST_SEQUENCE}",
        )
    length = asked or min(_LONGEST_SEQUENCE, room)
    if length > room:
        beside = f", {num_virtual} of them for virtual tokens" if num_virtual else ""
        _refuse(
            "coserve.max_sequence_length",
            f"is {length}; the model has {positions} positions{beside}",
        )
    return length


def _trains_model(adapter: Any) -> bool:
    try:
        return isinstance(adapter, Mapping) and method(adapter.get("type", "lora")).is_model
    except ValueError:  # `_adapter` reports it
        return False


def _check_full(objective: str) -> None:
    """Raise JobError if full fine-tuning cannot train for an objective."""
    with _errors_about("method"):
        kind = objective_class(objective)
    if kind is not None and kind.needs_reference:
        others = ", ".join(
            each.replace("-", "_") for each in objective_names() if not _needs_reference(each)
        )
        _refuse(
            "coserve.adapter",
            f"must not be full for {objective}, which compares with the model as it was: full "
            f"fine-tuning changes "
            f"that; train an adapter, or for one of {others}",
        )


def _needs_reference(objective: str) -> bool:
    kind = objective_class(objective)
    return kind is not None and kind.needs_reference


def _build(kind: type[_Settings], values: Any, where: str) -> _Settings:
    """Build a settings class from a client's object; JobError names the field."""
    if not isinstance(values, Mapping):
        _refuse(where, f"must be an object, not {shown(values)}")
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    if unknown := [name for name in values if name not in known]:
        _refuse(f"{where}.{unknown[0][:_LONGEST_NAME]}", f"is not known; known: {', '.join(known)}")
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise JobError(f"{where}: {error}", param=where) from None


def _with_tuples(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    with _errors_about(name):
        check_whole(name, value, least, most)


@contextmanager
def _errors_about(name: str) -> Iterator[None]:
    """Turn ValueError into a JobError about a field."""
    try:
        yield
    except ValueError as error:
        raise JobError(str(error), param=name) from None


def _refuse(name: str, what: str) -> NoReturn:
    raise JobError(f"{name} {what}", param=name)
