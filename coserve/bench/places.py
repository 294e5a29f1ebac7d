"""Places of a comparison: engines on a device of this machine, or on modelled devices."""

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
# Share of a device's memory for weights and pages; the rest is for the runtime and workspaces.
_MEMORY_SHARE = 0.9
# Standard deviation of the times of equal steps on a device without other users.
MODELLED_NOISE = 0.03


class Place(Protocol):
    """A device on which engines open one after the other, each as if it were the first."""

    @property
    def name(self) -> str: ...

    @property
    def latency(self) -> LatencyModel:
        """Return the latency model that every engine starts with."""
        ...

    def open(self, config: EngineConfig) -> TokenEngine: ...

    def idle(self, engine: TokenEngine, seconds: float) -> None:
        """Let time pass, by the clock of an engine's device."""
        ...

    def close(self, engine: TokenEngine) -> None:
        """End all work of an engine."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelledPlace:
    """A device that computes only how long its steps would take."""

    name: str
    """Name of the device."""
    backbone: Backbone
    """Model without weights."""
    profile: Profile
    """Profile of the model on the device."""
    num_pages: int
    """Number of pages of the pool."""
    noise: float = MODELLED_NOISE
    """Standard deviation of the logarithm of the times of a step's sections."""
    seed: int = 0
    """Seed of the noise."""
    known: LatencyModel | None = None
    """Latency model that every engine starts with; None: that of the profile."""
    true: LatencyModel | None = None
    """Latency model of the true times; None: that of the profile."""
    link_flops_per_byte: float = 0.0
    """FLOPs that a rank computes while a gather moves a byte (`training_programs`)."""

    @property
    def latency(self) -> LatencyModel:
        return LatencyModel(self.profile) if self.known is None else deepcopy(self.known)

    @classmethod
    def of_hardware(cls, backbone: Backbone, hardware: Hardware) -> "ModelledPlace":
        """Return the place of a model on modelled hardware.

        Args:
            backbone: Model on the "meta" device; if it is one rank of several (`on_ranks`), the
                place is all of them.
            hardware: Hardware of each rank.

        Raises:
            BudgetError: The model and some requests need more memory than there is.
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
        """Do nothing: the device goes with the engine."""


@dataclass(kw_only=True)
class TorchPlace:
    """A device of this machine; its engines take turns."""

    name: str
    """Name of the device."""
    device: Device
    """The device."""
    latency: LatencyModel = field(init=False)
    """Latency model that every engine starts with."""

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
        """Let later engines start with what this one knows of the device."""
        self.latency = engine.latency

    def modelled(self, backbone: Backbone, true: LatencyModel | None = None) -> ModelledPlace:
        """Return the modelled device of this one, whose engines know what the next one here would
        know.

        Args:
            backbone: The same model without weights.
            true: Latency model of the true times; None: that of this device.
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
    """Return the tensors of the weights, each once."""
    return [
        *{
            id(one): one for held in backbone.weights.values() for one in weight_tensors(held)
        }.values()
    ]
