"""LoRA that starts from a part of the weight itself: PiSSA (arXiv 2404.02948) and OLoRA (arXiv
2406.01775).

The factors start as B0 A0, a principal part of the weight W, and B A is trained beside W - s B0 A0.
All adapters share the weight here, so that is W + s (B A - B0 A0): a LoRA of twice the rank, with
the factors (B, -B0) and (A, A0), of which half is trained. PEFT saves the same for an adapter that
leaves the model's weights as they are (`path_initial_model_for_weight_conversion` of its
`save_pretrained`).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.places import Site
from coserve.adapters.reparametrization import Reparametrization
from coserve.errors import AdapterError
from coserve.graph.layouts import AnyState
from coserve.kernels.cuts import Cut

LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"
_SUBSPACE_ITERATIONS = re.compile(r"pissa_niter_(\d{1,3})")


def is_principal(initial: object) -> bool:
    """Return whether PEFT's `init_lora_weights` asks for factors of the weight."""
    return isinstance(initial, str) and (
        initial in ("pissa", "olora") or bool(_SUBSPACE_ITERATIONS.fullmatch(initial))
    )


def principal_factors(site: Site, initial: str, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return A0 [rank, in] and B0 [out, rank], float32.

    scaling * B0 A0 is the part of the weight that is taken (PiSSA), or B0 A0 with B0 orthonormal
    (OLoRA). Where ranks divide the model, the factors are whole, and all ranks must call this.

    Raises:
        AdapterError: the rank is above the weight's.
    """
    key = (initial, rank, scaling)
    kept: dict[Any, tuple[Tensor, Tensor]] = site.__dict__.setdefault("principal_factors", {})
    if key in kept:  # A and B of a site are asked for one after the other
        return kept.pop(key)
    shape, group = site.place.weights["weight"], site.backbone.group
    if rank > min(shape):
        raise AdapterError(
            f"init_lora_weights={initial!r} with rank {rank} at {site.place.module}: its weight "
            f"has "
            f"{list(shape)}, so the rank may be {min(shape)} at most"
        )
    weight = site.whole_weight
    if group.rank:  # which takes rank 0's, bit for bit
        found = weight.new_zeros((rank, shape[1])), weight.new_zeros((shape[0], rank))
    else:
        found = _factors(weight, initial, rank, scaling)
    a, b = group.sum_several(found, site.place.module)
    kept[key] = a, b
    return a, b


def _factors(weight: Tensor, initial: str, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    if initial == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if (found := _SUBSPACE_ITERATIONS.fullmatch(initial)) is not None:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)  # asked for again, it must be the same
            left, singular, right = torch.svd_lowrank(weight, rank, niter=int(found[1]))
        right = right.T
    else:
        left, singular, right = torch.linalg.svd(weight, full_matrices=False)
    root = (singular[:rank] / scaling).sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


class TrainedHalf(Reparametrization):
    """The first half of the factors of a LoRA of twice the rank; the other half is its initial
    value.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.parameters, self._rest = {}, {}
        for name, master in adapter.masters.items():
            if (axis := _rank_axis(name)) is None:
                self.parameters[name] = master.clone()
            else:
                self.parameters[name], self._rest[name] = (
                    half.clone() for half in master.chunk(2, axis)
                )

    def state_of(self, name: str, states: Mapping[str, AnyState]) -> AnyState:
        """Return how ranks divide a half of a factor: as all of it, since no cut goes along the
        rank.
        """
        state, axis = super().state_of(name, states), _rank_axis(name)
        assert axis is None or not isinstance(state, Cut) or state.dim != axis - 2, (
            f"{name} is cut along its rank"
        )
        return state

    def compose(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            name: value
            if (axis := _rank_axis(name)) is None
            else torch.cat((value, self._rest[name]), axis)
            for name, value in parameters.items()
        }


def beside_weight(
    masters: Mapping[str, Tensor], initial: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return factors and their initial values as a LoRA of twice the rank beside the unchanged
    weight.
    """
    return {
        name: value
        if (axis := _rank_axis(name)) is None
        else torch.cat((value, initial[name] if axis == 0 else -initial[name]), axis)
        for name, value in masters.items()
    }


def _rank_axis(name: str) -> int | None:
    """Return the dimension of a factor that is the rank; None for any other tensor."""
    return 0 if name.endswith(LORA_A) else 1 if name.endswith(LORA_B) else None
