"""Exchange of a data-parallel job's tensors between nodes, and their combination; see
`coserve.tuning.shard`.

Everything is combined in the order that all nodes are given, so that all come to the same values,
bit for bit where they compute alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coserve.adapters.held_tensors import HeldTensors
from coserve.adapters.tensor_files import open_tensors
from coserve.errors import AdapterError
from coserve.tuning.optimizer import AdapterOptimizer
from coserve.tuning.shard import Shard

# In a contribution's directory.
CONTRIBUTION_FILE = "contribution.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExchangePosition:
    """Contributions that a node has taken in, and what they have made."""

    base: Mapping[str, Tensor]
    """Values that all contributions so far have made."""
    read: tuple[Mapping[str, Tensor], ...]
    """Contributions that are read and not taken in."""
    num_taken: int
    """Number of contributions that are taken in."""


class TorchExchange:
    """One node's side of the exchange."""

    def __init__(self, shard: Shard, trained: Mapping[str, Tensor], held: HeldTensors) -> None:
        """Begin with nothing read.

        Args:
            shard: This node's part of the job.
            trained: Tensors that gradients are of, or that make progress; float32, by name.
            held: How they are pieces of whole tensors.
        """
        self._shard, self._trained, self.held = shard, trained, held
        # What all contributions so far have made, in the order of all nodes.
        self._base: Mapping[str, Tensor] = {}
        # What that is once `note_taken` is called.
        self._next_base: Mapping[str, Tensor] | None = None
        # On the CPU; not taken in yet.
        self._read: tuple[Mapping[str, Tensor], ...] = ()
        self.num_taken = 0
        """Contributions that were taken in so far."""

    @property
    def gives_gradients(self) -> bool:
        """Return whether contributions are gradients; else they are progress."""
        return self._shard.gives_gradients

    def begin(self) -> None:
        """Note that all nodes hold the same values now."""
        if not self._shard.gives_gradients:
            self._base = {name: tensor.detach().clone() for name, tensor in self._trained.items()}

    @torch.inference_mode()
    def take(
        self, gradients: Mapping[str, Tensor] | None, moments: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return what the other nodes are to have.

        That is the complete gradients (None: there are none), or how far the values have come since
        nodes last exchanged them, and the optimizer's moments.
        """
        if self._shard.gives_gradients:
            return dict(gradients or {})
        progress = {name: tensor - self._base[name] for name, tensor in self._trained.items()}
        # Copies: training goes on while the contribution is written.
        return progress | {name: tensor.clone() for name, tensor in moments.items()}

    def read(self, directories: tuple[str, ...]) -> None:
        """Read contributions (this rank's pieces), in place of what was read before and not taken
        in.

        May be called from any thread.

        Raises:
            AdapterError: A file cannot be used; nothing has changed.
        """
        contributions = []
        shapes = {
            name: self.held.whole_shape(name, tensor) for name, tensor in self._trained.items()
        }
        for directory in directories:
            path = Path(directory) / CONTRIBUTION_FILE
            with open_tensors(path) as file:
                for name, header in file.headers.items():
                    # Moments are named after their parameter and a slash (`name/moment`).
                    if header.shape != shapes.get(name.rpartition("/")[0] or name):
                        raise AdapterError(
                            f"{path} is no contribution to this job: {name}, {list(header.shape)}"
                        )
                contributions.append({name: self.held.read(file, name) for name in file.headers})
        self._read = tuple(contributions)

    @torch.inference_mode()
    def advance(self, up_to: int, optimizer: AdapterOptimizer, *, meets: bool) -> None:
        """Set the values to what the contributions up to this one have made, and where nodes meet,
        the moments.

        `note_taken` is to follow; until then this can be repeated.
        """
        # What was read begins after what was taken in.
        contributions = self._read[: up_to - self.num_taken]
        # A copy: until `note_taken`, the step can be repeated from the same base.
        base = {name: tensor.clone() for name, tensor in self._base.items()}
        for contribution in contributions:
            for name, tensor in base.items():
                # The mean of the nodes' progress, added one by one in the order that all nodes
                # have.
                tensor.add_(contribution[name].to(tensor.device), alpha=1.0 / self._shard.count)
        means: dict[str, Tensor] = {}
        if meets:
            last = contributions[-self._shard.count :]  # one of each node
            for name in optimizer.moments:
                means[name] = torch.stack([each[name] for each in last]).mean(0)
        # Changed last, when nothing more can fail; what was trained since is replaced.
        for name, tensor in self._trained.items():
            tensor.copy_(base[name])
        for name, mean in means.items():
            optimizer.moments[name].copy_(mean)
        self._next_base = base

    @torch.inference_mode()
    def sum_of(self, up_to: int) -> dict[str, Tensor]:
        """Return the sum of the gradients up to this contribution; `note_taken` is to follow, and
        until then it can be repeated.
        """
        total: dict[str, Tensor] = {}
        for gradients in self._read[: up_to - self.num_taken]:
            for name, gradient in gradients.items():
                device = self._trained[name].device
                if name in total:
                    total[name].add_(gradient.to(device))
                else:  # a copy, since what was read may be summed again
                    total[name] = gradient.to(device, copy=True)
        return total

    def note_taken(self, up_to: int) -> None:
        """Note that the contributions up to this one have been taken in."""
        if self._next_base is not None:
            self._base, self._next_base = self._next_base, None
        self._read = self._read[up_to - self.num_taken :]
        self.num_taken = up_to

    @property
    def position(self) -> ExchangePosition:
        """Return where the node stands, for `return_to`."""
        return ExchangePosition(base=self._base, read=self._read, num_taken=self.num_taken)

    def return_to(self, position: ExchangePosition) -> None:
        """Return to a position, to take in the contributions since then again.

        Trained values stay as they are: `advance` computes them from the position's base.
        """
        self._base, self._read = position.base, position.read
        self.num_taken, self._next_base = position.num_taken, None
