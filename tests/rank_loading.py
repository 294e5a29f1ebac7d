"""Ranks that load their shares of a model, and what these are compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.threads import run_ranks
from coserve.kernels.weights import Weight
from coserve.models import Backbone, load_backbone
from coserve.models.backbone import build_backbone
from coserve.models.dividing import divided_backbone
from coserve.models.source import find_model

_CPU = torch.device("cpu")


def load_rank(model: str, group: RankGroup, weights: str = "dense") -> Backbone:
    """Return a rank's backbone as a device loads it."""
    return build_backbone(
        find_model(model),
        dtype="float32",
        device=_CPU,
        weight_format=weights,
        kernels="plain",
        group=group,
    )


def assert_ranks_hold_pieces(model: str, size: int, weights: str = "dense") -> Sequence[Backbone]:
    """Load a model on ranks, and compare every tensor bit for bit with what is cut from the whole
    model.

    Returns:
        The ranks' backbones.
    """
    whole = load_backbone(model, dtype="float32", weights=weights, kernels="plain")
    found = run_ranks(
        size, lambda group: (load_rank(model, group, weights), divided_backbone(whole, group))
    )
    for own, expected in found:
        _assert_same_weights(own, expected)
    return [own for own, _ in found]


def _assert_same_weights(found: Backbone, expected: Backbone) -> None:
    assert found.ranks == expected.ranks and found.weights.keys() == expected.weights.keys()
    for part, tensors in expected.weights.items():
        assert found.weights[part].keys() == tensors.keys()
        for name, wanted in tensors.items():
            own = found.weights[part][name]
            assert isinstance(own, Weight) == isinstance(wanted, Weight), name
            for mine, other in zip(_held(own), _held(wanted), strict=True):
                assert mine.dtype == other.dtype and torch.equal(mine, other), f"{part} {name}"


def _held(weight: Tensor | Weight) -> list[Tensor]:
    """Return what is stored; of rows that pad a vocabulary, any scale makes zeros of zeros."""
    if isinstance(weight, Tensor):
        return [weight]
    if len(tensors := weight.tensors()) == 1:
        return list(tensors)
    values, scales = tensors
    return [values, scales * values.any(-1), weight.dense()]
