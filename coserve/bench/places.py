"""Where a comparison takes place: engines on a device that is here, or on modelled ones."""

import time
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from coserve.devices.base import Device
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.errors import BudgetError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models.backbone import Backbone
from coserve.models.weights import weight_tensors
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import modelled_link_flops_per_byte, roofline_profile

_BLOCK_TOKENS = 16
# Of a device's memory, what weights and pages may take: the rest is for the runtime and for what
# steps work in.
_MEMORY_SHARE = 0.9
# What steps of the same kind differ by on a device that nobody else uses.
MODELLED_NOISE = 0.03


class Place(Protocol):
    """A device to open one engine after the other on, each as if it were the first."""

    @property
    def name(self) -> str: ...

    @property
    def latency(self) -> LatencyModel:
        """What every engine knows of the device at its start."""
        ...

    def open(self, config: EngineConfig) -> TokenEngine: ...

    def idle(self, engine: TokenEngine, seconds: float) -> None:
        """Let time pass, by the clock of an engine's device."""
        ...

    def close(self, engine: TokenEngine) -> None:
        """End all that an engine does."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelledPlace:
    """A device that says how long its steps would take.

    noise: standard deviation of the logarithm of what the sections of a step take; seed: its.
    known: what every engine knows of the device at its start; true: what steps take; by the profile
    where they are None.
    """

    name: str
    backbone: Backbone
    profile: Profile
    num_pages: int
    noise: float = MODELLED_NOISE
    seed: int = 0
    known: LatencyModel | None = None
    true: LatencyModel | None = None
    link_flops_per_byte: float = 0.0
    """FLOPs that a rank computes while a gather moves a byte (`training_programs`)."""

    @property
    def latency(self) -> LatencyModel:
        return LatencyModel(self.profile) if self.known is None else deepcopy(self.known)

    @classmethod
    def of_hardware(cls, backbone: Backbone, hardware: Hardware) -> "ModelledPlace":
        """Return the place of a model on modelled hardware.

        Args:
            backbone: the model, on the "meta" device; of one rank of several (`on_ranks`), the
                place is all of them.
            hardware: of each rank.

        Raises:
            BudgetError: the model and some requests need more memory than there is.
        """
        size = backbone.ranks.size
        name = hardware.name if size == 1 else f"{size} x {hardware.name}"
        bytes_of_weights = sum(tensor.nbytes for tensor in _tensors(backbone))
        left = _MEMORY_SHARE * hardware.memory_bytes - bytes_of_weights
        num_pages = int(left / kv_page_bytes(backbone, _BLOCK_TOKENS))
        if num_pages < 64:
            raise BudgetError(
                f"{backbone.name} has {bytes_of_weights / 1e9:.0f} GB of weights"
                f"{'' if size == 1 else ' a device'}, which leaves too little of the "
                f"{hardware.memory_bytes / 1e9:.0f} GB of "
                f"{name if size == 1 else f'each of {name}'}"
            )
        return cls(
            name=name,
            backbone=backbone,
            profile=roofline_profile(backbone, hardware),
            num_pages=num_pages,
            link_flops_per_byte=modelled_link_flops_per_byte(backbone, hardware),
        )

    def open(self, config: EngineConfig) -> TokenEngine:
        device = ModelledDevice(
            self.backbone,
            self.profile,
            num_pages=self.num_pages,
            block_tokens=_BLOCK_TOKENS,
            noise=self.noise,
            seed=self.seed,
            latency=self.true,
            link_flops_per_byte=self.link_flops_per_byte,
        )
        return TokenEngine(device, self.latency, config)

    def idle(self, engine: TokenEngine, seconds: float) -> None:
        device = engine.device
        assert isinstance(device, ModelledDevice)
        device.clock.advance(seconds)

    def close(self, engine: TokenEngine) -> None:
        """Nothing: the device goes with the engine."""


@dataclass(kw_only=True)
class TorchPlace:
    """A device that is here; its engines take turns."""

    name: str
    device: Device
    latency: LatencyModel = field(init=False)

    def __post_init__(self) -> None:
        self.latency = LatencyModel(self.device.info.profile)

    def open(self, config: EngineConfig) -> TokenEngine:
        return TokenEngine(self.device, deepcopy(self.latency), config)

    def idle(self, engine: TokenEngine, seconds: float) -> None:
        time.sleep(seconds)

    def close(self, engine: TokenEngine) -> None:
        for request in [each.request for each in engine.requests]:
            engine.cancel(request)
        for job in list(engine.jobs):
            engine.cancel_job(job)
        while engine.has_work:
            engine.step()
        engine.flush_commands()

    def learn(self, engine: TokenEngine) -> None:
        """Have later engines start with what this one knows of the device."""
        self.latency = engine.latency

    def modelled(self, backbone: Backbone, true: LatencyModel | None = None) -> ModelledPlace:
        """Its model, whose engines know what the next one here would. backbone: the same, of shapes
        alone. true: what steps take; None: what is known of them.
        """
        return ModelledPlace(
            name=f"{self.name}, modelled",
            backbone=backbone,
            profile=self.latency.profile,
            num_pages=self.device.info.num_pages,
            known=deepcopy(self.latency),
            true=(true or self.latency).as_seen(),
        )


def num_parameters(whole: Backbone) -> int:
    """Return the number of weights of a model that one rank holds."""
    return sum(tensor.numel() for tensor in _tensors(whole))


def _tensors(backbone: Backbone) -> list[Tensor]:
    """Of its weights, each once."""
    return [
        *{
            id(one): one for held in backbone.weights.values() for one in weight_tensors(held)
        }.values()
    ]
