"""Jobs on devices whose model is divided among ranks, which are threads here, and what they train
together."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from devices import Driver
from ranks import together
from support import make_backbone, random_sequences
from torch import Tensor

from coserve.adapters.base import AdapterConfig
from coserve.devices.loading import torch_device
from coserve.devices.messages.steps import PackSums, Update
from coserve.devices.torch.device import TorchDevice
from coserve.devices.torch.trainer import TorchTrainer
from coserve.engine.checks import with_virtual_tokens
from coserve.graph.layouts import AnyState, State
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.threads import run_ranks
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import Backbone, load_backbone
from coserve.models.dividing import divided_backbone
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.examples import Example

FAST = Hardware(name="fast", flops_per_s=1e14, bytes_per_s=1e14, call_s=1e-8)
# With a larger eps than usual: Adam divides by the size of a gradient, and one that is zero but for
# rounding would be as large as any.
CONFIG = TuningConfig(
    seed=3, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3, weight_decay=0.01)
)
T = TypeVar("T")
# With which rounding does not grow over hundreds of steps.
SLOW = replace(CONFIG, optimizer=replace(CONFIG.optimizer, learning_rate=1e-3))
Sequences = Sequence[tuple[Sequence[int], Sequence[bool]]]


@dataclass(frozen=True, kw_only=True)
class TrainedJob:
    """Result of a job on one rank, or on the only one."""

    before: dict[str, Tensor]
    """Its parameters at first, by name."""
    after: dict[str, Tensor]
    """Its parameters at last, by name."""
    version: dict[str, Tensor]
    """The parameters of the adapter that is published at the end."""
    states: dict[str, AnyState]
    """How ranks divide what is trained."""
    sums: list[PackSums]
    """Of its packs."""
    norms: list[float | None]
    """Gradient norms of its steps."""


@cache
def _profile() -> Profile:
    """Return a profile by which nothing here is planned."""
    return roofline_profile(make_backbone("llama"), FAST)


def make_driver(backbone: Backbone) -> Driver:
    """Return a driver of a device with this model, or what a rank has of it."""
    device = torch_device(
        backbone,
        memory_bytes=1500 * kv_page_bytes(backbone, 4),
        block_tokens=4,
        profile=_profile(),
    )
    return Driver(device)


def trainer_of(driver: Driver, job: str) -> TorchTrainer:
    assert isinstance(driver.device, TorchDevice)
    return driver.device._trainers[job]


def parameters_of(trainer: TorchTrainer) -> dict[str, Tensor]:
    """Return copies of what a job trains."""
    replaced = trainer._reparametrization
    trained = trainer.adapter.masters if replaced is None else replaced.parameters
    return {name: value.clone() for name, value in trained.items()}


def packs(num: int, virtual: int = 0) -> list[Sequences]:
    """Return packs of three sequences, with virtual tokens before each."""
    found: list[Sequences] = []
    for number in range(num):
        lengths = (7 + number % 3, 11, 5)
        examples = [
            Example(tokens=tuple(ids), trained=tuple(marks))
            for ids, marks in random_sequences(lengths, seed=number)
        ]
        found.append([(e.tokens, e.trained) for e in with_virtual_tokens(examples, virtual, 100)])
    return found


def num_trained(sequences: Sequences) -> int:
    return sum(sum(trained[1:]) for _, trained in sequences)


def train_job(
    backbone: Backbone,
    config: AdapterConfig,
    tuning: TuningConfig = CONFIG,
    *,
    num_steps: int = 3,
    packs_per_step: int = 1,
    rows: int = 9,
    before_update: Callable[[TorchTrainer, int], Any] = lambda trainer, step: None,
) -> TrainedJob:
    """Train some optimizer steps on a device, in pieces of at most `rows` rows."""
    driver = make_driver(backbone)
    opened = driver.open_trainer("job", tuning, adapter=config.to_peft())
    trainer = trainer_of(driver, "job")
    before, sums, norms = parameters_of(trainer), list[PackSums](), list[float | None]()
    found = packs(num_steps * packs_per_step, config.num_virtual_tokens)
    for step in range(num_steps):
        trained = 0
        for sequences in found[step * packs_per_step : (step + 1) * packs_per_step]:
            result = driver.train("job", opened, sequences, window=rows, tasklet=rows)
            sums.append(result.packs["job"])
            trained += num_trained(sequences)
        before_update(trainer, step)
        norms.append(driver.step(updates=[Update("job", trained, num_steps)]).norms["job"])
        driver.reuse_pages()
    return TrainedJob(
        before=before,
        after=parameters_of(trainer),
        version=trainer.version().masters,
        states=dict(trainer.states),
        sums=sums,
        norms=norms,
    )


def on_ranks(whole: Backbone, size: int, run: Callable[[Backbone], T]) -> list[T]:
    """Return what a function gives on every rank of a model."""
    return run_ranks(size, lambda group: run(divided_backbone(whole, group)))


def train_directory(
    group: RankGroup, directory: str, config: AdapterConfig, num_steps: int
) -> TrainedJob:
    """Train a model in files on one rank of several, or on the only one."""
    backbone = load_backbone(directory, dtype="float32", kernels="plain")
    if group.size > 1:
        backbone = divided_backbone(backbone, group)
    return train_job(backbone, config, SLOW, num_steps=num_steps, rows=1000)


def own_copy(backbone: Backbone) -> Backbone:
    """Return the same model with weights of its own, which training may change."""
    return replace(backbone, weights=deepcopy(backbone.weights))


def put_together(
    pieces: Sequence[dict[str, Tensor]], like: dict[str, Tensor], states: dict[str, AnyState]
) -> dict[str, Tensor]:
    """Return whole parameters from those of all ranks; those that several ranks hold must be equal
    bit for bit."""
    return {
        name: together(
            [each[name] for each in pieces],
            value.shape,
            states.get(name, State.WHOLE),
            is_summed=False,
        )
        for name, value in like.items()
    }


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return how far two sets of parameters are from each other."""
    assert found.keys() == expected.keys()
    return math.sqrt(sum(float((found[name] - expected[name]).square().sum()) for name in expected))


def assert_trained_alike(found: Sequence[TrainedJob], alone: TrainedJob, bar: float = 1e-5) -> None:
    """Compare what ranks have trained with what one rank has: losses, norms, and parameters put
    together."""
    for each in found[1:]:
        assert (each.sums, each.norms) == (found[0].sums, found[0].norms), "ranks differ"
    for ours, theirs in zip(found[0].sums, alone.sums, strict=True):
        assert abs(ours.loss - theirs.loss) <= 1e-5 * abs(theirs.loss)
        assert (ours.num_correct, ours.num_trained) == (theirs.num_correct, theirs.num_trained)
    for own, norm in zip(found[0].norms, alone.norms, strict=True):
        assert own == norm if own is None or norm is None else abs(own - norm) <= 1e-5 * norm
    states = found[0].states
    before = put_together([each.before for each in found], alone.before, states)
    after = put_together([each.after for each in found], alone.after, states)
    moved = distance(alone.after, alone.before)
    assert distance(before, alone.before) <= 1e-6 * distance(
        before, {k: torch.zeros_like(v) for k, v in before.items()}
    )
    error = distance(after, alone.after) / moved
    assert error < bar, f"{error} of the distance moved"
