"""The backbone: one frozen copy of a model's weights on one device, with everything that is fixed
once it is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from coserve.errors import ModelError, UnsupportedModelError
from coserve.graph.blocks import split_rows
from coserve.kernels import find_backend
from coserve.kernels.base import Backend
from coserve.kernels.groups.base import RankGroup, Ranks, SingleRank
from coserve.kernels.groups.link_pace import link_flops_per_byte
from coserve.kernels.weights import Weight
from coserve.models.base import Architecture, Part
from coserve.models.families import build_architecture
from coserve.models.local import LocalModel, local_model
from coserve.models.reading import Progress, load_weights
from coserve.models.rope import RotaryTable
from coserve.models.source import ModelSource, find_model
from coserve.models.weights import WeightStorage, absent_weights, random_weights
from coserve.settings import is_whole, shown

# Rows of a block, where results must not depend on the company: about as many as cost little more
# than one, since the weight has to come from memory.
_BLOCK_ROWS = {"cpu": 16}
_MANY_BLOCK_ROWS = 128

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A loaded model, which is read-only; requests and jobs share it."""

    name: str
    """Name of the model, as it was given."""
    architecture: Architecture
    """Architecture of the model."""
    weights: Mapping[Part, Mapping[str, Tensor | Weight]] = field(repr=False)
    """Weights of each part, by the name in its graph."""
    rotary: Mapping[str, RotaryTable]
    """Rotary tables (`Architecture.rotary_tables`)."""
    max_positions: int
    """Number of tokens of the longest sequence that is run."""
    dtype: torch.dtype
    """Compute dtype."""
    device: torch.device
    """Device of the weights."""
    backend: Backend = field(repr=False)
    """Kernel backend."""
    weight_format: str = "dense"
    """Storage of linear weights, such as "dense" or "int8"."""
    block_rows: int | None = None
    """Number of rows in a block of forward passes of requests (see `Context`); None: rows run as
    they come.
    """
    group: RankGroup = field(default_factory=SingleRank, repr=False)
    """The ranks that hold the model together; one holds all of it."""

    @cached_property
    def ranks(self) -> Ranks:
        """Return which rank this is."""
        return Ranks(rank=self.group.rank, size=self.group.size)

    @cached_property
    def local(self) -> LocalModel:
        """Return what of the model runs here."""
        return local_model(self.architecture, self.ranks)

    def local_of(self, architecture: Architecture) -> LocalModel:
        """Return what runs here of this model with another vocabulary.

        Args:
            architecture: the backbone's own, or one made of it by `with_vocabulary`.
        """
        if architecture.vocab_size == self.architecture.vocab_size:
            return self.local
        found = self._resized.get(architecture.vocab_size)
        if found is None:
            found = local_model(architecture, self.ranks, like=self.local)
            self._resized[architecture.vocab_size] = found
        return found

    @cached_property
    def _resized(self) -> dict[int, LocalModel]:
        """The models of adapters that have other vocabularies, by the number of their tokens."""
        return {}

    @property
    def link_flops_per_byte(self) -> float:
        """Return the FLOPs that a rank computes while a gather moves a byte; 0 for one rank, and on
        the meta device.

        All ranks measure it together the first time.
        """
        if self.ranks.size == 1 or self.device.type == "meta":
            return 0.0
        if self.group.link_flops_per_byte is None:
            self.group.link_flops_per_byte = self._measured_link()
        return self.group.link_flops_per_byte

    def _measured_link(self) -> float:
        layers = [self.weights[part].values() for part in self.local.parts if isinstance(part, int)]
        matrices = [
            each
            for weights in layers
            for each in weights
            if isinstance(each, Weight) and len(each.shape) == 2
        ]
        largest = max(matrices, key=lambda matrix: prod(matrix.shape))
        return link_flops_per_byte(
            self.group, self.backend, largest, dtype=self.dtype, device=self.device
        )

    def deterministic(self, *, is_so: bool = True) -> "Backbone":
        """Return a backbone of the same weights whose forward passes of requests give a row the
        same results whatever runs beside it, or need not.

        Raises:
            UnsupportedModelError: this family's results depend on the company.
        """
        if is_so and self.architecture.depends_on:
            raise UnsupportedModelError(
                f"{self.name} is a {self.architecture.config.model_type}, whose results depend on "
                f"{self.architecture.depends_on}; leave --deterministic out"
            )
        return replace(
            self, block_rows=_BLOCK_ROWS.get(self.device.type, _MANY_BLOCK_ROWS) if is_so else None
        )

    def constants(self, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Return what the graphs may read for these rows: tokens and positions, int64 [n], and cos
        and sin of each rotary table, [n, rotated features].
        """
        constants = {"tokens": tokens, "positions": positions}
        for prefix, table in self.rotary.items():
            constants[f"{prefix}cos"], constants[f"{prefix}sin"] = self._angles(table, positions)
        return constants

    def _angles(self, rotary: RotaryTable, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.block_rows is None:
            return rotary.angles(positions, self.dtype)
        parts = [rotary.angles(some, self.dtype) for some in split_rows(positions, self.block_rows)]
        cos, sin = (torch.cat(each)[: positions.shape[0]] for each in zip(*parts, strict=True))
        return cos, sin


def load_backbone(
    model: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    seed: int = 0,
    weights: str = "dense",
    kernels: str | None = None,
    max_positions: int | None = None,
) -> Backbone:
    """Load a model by name (see `find_model`).

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto" for the one in the model's configuration.
        weights: Storage of linear weights: "dense" in the dtype, or "int8" (see `Int8Weight`).
        kernels: Name of a backend (see `find_backend`); None for the best one.
        seed: Seed of the random weights of a `dummy:` model.
        max_positions: Number of tokens of the longest sequence that will be run; None: as long as
            the model was made for. It decides which of LongRoPE's two sets of frequencies is used.
    """
    return build_backbone(
        find_model(model),
        dtype=dtype,
        device=find_device(device),
        seed=seed,
        weight_format=weights,
        kernels=kernels,
        max_positions=max_positions,
    )


def find_device(name: str | torch.device) -> torch.device:
    """Return a device that is there ("auto": a GPU if there is one).

    Raises:
        ModelError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = str(error).splitlines()[0]
        raise ModelError(f"device {str(name)!r} cannot be used here: {reason}") from None
    return device


def build_backbone(
    source: ModelSource,
    *,
    dtype: str,
    device: torch.device,
    seed: int = 0,
    progress: Progress | None = None,
    weight_format: str = "dense",
    kernels: str | None = None,
    max_positions: int | None = None,
    group: RankGroup | None = None,
) -> Backbone:
    """Load the weights of a model that has been found; on the "meta" device it has shapes only,
    whatever its size.

    Args:
        group: The rank's group where several hold the model together: the rank reads and holds only
            its share.

    Raises:
        UnsupportedModelError: the model cannot be divided among the ranks; raised before any weight
            is read.
    """
    architecture, group = build_architecture(source.config), group or SingleRank()
    local = local_model(architecture, Ranks(rank=group.rank, size=group.size))
    most = architecture.max_positions
    if max_positions is None:
        max_positions = most
    if not is_whole(max_positions, 1):
        raise ModelError(
            f"max_positions must be a whole number from 1 to {most}, not {shown(max_positions)}"
        )
    if max_positions > most:
        raise ModelError(f"{max_positions} positions are more than the {most} of {source.name}")
    compute_dtype, rotary = resolve_dtype(source, dtype), architecture.rotary_tables()
    storage = WeightStorage(
        dtype=compute_dtype, weight_format=weight_format, backend=find_backend(device, kernels)
    )
    if device.type == "meta":
        weights = absent_weights(local, storage)
    elif source.directory is None:
        weights = random_weights(local, storage, seed=seed)
    else:
        weights = load_weights(local, source.directory, storage, progress=progress)
    return Backbone(
        name=source.name,
        architecture=architecture,
        weights=weights,
        rotary={prefix: table.up_to(max_positions).to(device) for prefix, table in rotary.items()},
        max_positions=max_positions,
        dtype=compute_dtype,
        device=device,
        backend=storage.backend,
        weight_format=weight_format,
        group=group,
    )


def resolve_dtype(source: ModelSource, dtype: str) -> torch.dtype:
    """Return the compute dtype for a choice of "auto" or a name; a configuration that names none,
    or a wider one, means float32.
    """
    if dtype == "auto":
        named = str(getattr(source.config, "dtype", None)).removeprefix("torch.")
        return DTYPES.get(named, torch.float32)
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]
