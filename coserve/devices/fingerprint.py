"""Fingerprints of weights: two devices with the same one hold the same model, whatever ranks divide
it on either.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from coserve.graph.layouts import WHOLE, AnyState
from coserve.kernels.cuts import Cut
from coserve.models.backbone import Backbone
from coserve.models.weights import weight_tensors

# Of a tensor's values in each dimension: no more than twice as many are read.
_MAX_SAMPLES = 32


class _Held(NamedTuple):
    """Tensor of a rank, and how it is a piece of the whole one."""

    tensor: Tensor
    """What the rank holds."""
    state: AnyState
    """How ranks divide the whole tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        shape = [*self.tensor.shape]
        if isinstance(self.state, Cut):
            shape[self.state.dim] = self.state.width
        return tuple(shape)


def fingerprint(backbone: Backbone) -> str:
    """Return a digest of some values out of every tensor; "" where there are shapes alone.

    Models that were trained differently differ in all tensors. All ranks of a group call this.
    """
    held = list(_held(backbone))
    if any(each.tensor.is_meta for each in held):
        return ""
    group, digest = backbone.group, blake2b(digest_size=16)
    own = [_samples(each, group.rank) for each in held]
    everywhere = [own]
    if group.size > 1:
        gathered = group.all_gather_on_hosts(torch.cat([_as_bytes(each) for each in own]))
        sizes = [each.nbytes for each in own]
        everywhere = []
        for of_rank in gathered:
            parts = zip(torch.split(of_rank, sizes), own, strict=True)
            everywhere.append([part.view(like.dtype).view(like.shape) for part, like in parts])
    for number, each in enumerate(held):
        some = _combined(each, [samples[number] for samples in everywhere])
        digest.update(repr((each.shape, each.tensor.dtype)).encode())
        digest.update(_as_bytes(some).numpy().tobytes())
    return digest.hexdigest()


def _held(backbone: Backbone) -> Iterator[_Held]:
    """Yield every tensor once, in the order of the whole model's."""
    seen = set[int]()
    for part, weights in backbone.weights.items():
        for name, weight in weights.items():
            state = backbone.local.state(part, name)
            for tensor in weight_tensors({name: weight}):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _Held(tensor, _state_of(tensor, weight, state))


def _state_of(tensor: Tensor, weight: object, state: AnyState) -> AnyState:
    """Return the state of one of a weight's tensors: scales have no columns, and are whole where
    columns are cut.
    """
    rows = getattr(weight, "shape", tensor.shape)
    missing = len(rows) - tensor.ndim
    if not missing or not isinstance(state, Cut):
        return state
    return state.along(state.dim + missing) if state.dim + missing < 0 else WHOLE


def _samples(held: _Held, rank: int) -> Tensor:
    """Return values at places that do not depend on the ranks, on the host; zeros at places of
    other ranks.
    """
    steps = [max(1, size // _MAX_SAMPLES) for size in held.shape]
    if not isinstance(held.state, Cut):
        return held.tensor[tuple(slice(None, None, step) for step in steps)].cpu().contiguous()
    cut, dim = held.state, held.tensor.ndim + held.state.dim
    places = torch.arange(0, cut.width, steps[dim])
    some = held.tensor[
        tuple(
            slice(None, None, step) if at != dim else slice(None) for at, step in enumerate(steps)
        )
    ]
    shape = [*some.shape]
    shape[dim] = len(places)
    samples, start = torch.zeros(shape, dtype=some.dtype), 0
    for run in cut.runs[rank]:
        own = (places >= run.start) & (places < run.stop)
        values = some.index_select(dim, (places[own] - run.start + start).to(some.device))
        samples.index_copy_(dim, own.nonzero()[:, 0], values.cpu())
        start += run.stop - run.start
    return samples


def _combined(held: _Held, samples: list[Tensor]) -> Tensor:
    """Return the samples of the whole tensor from those of all ranks."""
    if not isinstance(held.state, Cut) or len(samples) == 1:
        return samples[0]  # rank 0's, of what it alone holds, too
    cut, dim = held.state, held.tensor.ndim + held.state.dim
    places = torch.arange(0, cut.width, max(1, cut.width // _MAX_SAMPLES))
    whole = samples[0].clone()
    for rank, own in enumerate(samples):
        for run in cut.runs[rank]:
            at = ((places >= run.start) & (places < run.stop)).nonzero()[:, 0]
            whole.index_copy_(dim, at, own.index_select(dim, at))
    return whole


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
