"""Models that are divided among ranks, which are threads here, and what they give together."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support import make_backbone, random_sequences, random_tokens, worst_error
from torch import Tensor

from coserve.adapters import Adapter
from coserve.adapters.attached import AdapterGraphs
from coserve.adapters.base import AdapterConfig
from coserve.engine.checks import with_virtual_tokens
from coserve.graph.layouts import FIRST, WHOLE, AnyState
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.threads import run_ranks
from coserve.models import Backbone, CachedSequence, forward, logits
from coserve.models.dividing import divided_backbone
from coserve.tuning import TrainingPass, run_alone, training_programs
from coserve.tuning.examples import Example
from coserve.tuning.pack import pack_of

# Families with heads that two ranks cannot share, or four cannot.
REFUSED = {
    ("falcon-alibi", 2),
    ("mpt-clipped", 2),
    ("falcon-alibi", 4),
    ("mpt-clipped", 4),
    ("qwen3.5-tied", 4),
}


# Parameters that say how fast a gated delta layer's state decays.
DECAY = re.compile(r"\.(in_proj_a|in_proj_ba|A_log|dt_bias)\b")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a backward pass on one rank, or on the only one."""

    gradients: dict[str, Tensor]
    """Gradients by parameter."""
    loss: float
    """Sum of the losses."""
    logits: Tensor
    """Logits of requests' rows with the adapter."""
    graphs: AdapterGraphs
    """Graphs of the adapter."""


def whole_backbone(name: str, kernels: str = "plain") -> Backbone:
    return make_backbone(name, kernels=kernels)


def cached_logits(backbone: Backbone) -> Tensor:
    """Return the logits of a prompt in pieces, and of single tokens after it."""
    sequence = CachedSequence(backbone, 12)
    pieces = torch.split(random_tokens(12, 3), [7, 1, 3, 1])
    return torch.cat(
        [logits(backbone, forward(backbone, [sequence.extend(piece)])) for piece in pieces]
    )


def divided_logits(whole: Backbone, size: int) -> list[Tensor]:
    """Return the logits of each rank."""
    return run_ranks(size, lambda group: cached_logits(divided_backbone(whole, group)))


def train(
    backbone: Backbone, config: AdapterConfig, masters: Mapping[str, Tensor], **settings: Any
) -> Trained:
    """Run a pack of four sequences forward and backward, in windows, and requests' rows with the
    adapter.

    Args:
        backbone: a rank's, or a whole one.
        config: the adapter's method.
        masters: its parameters, whole.
        settings: of `training_programs`.
    """
    return train_adapter(Adapter(backbone, config, masters=masters), **settings)


def train_adapter(adapter: Adapter, **settings: Any) -> Trained:
    """Do what `train` does with an adapter that is there."""
    backbone, config = adapter.backbone, adapter.config
    examples = [
        Example(tokens=tuple(ids), trained=tuple(marks))
        for ids, marks in random_sequences((7, 11, 1, 5))
    ]
    pack = pack_of(with_virtual_tokens(examples, config.num_virtual_tokens, 100))
    training = TrainingPass(adapter, training_programs(adapter, **settings), pack, dropout_seed=3)
    run_alone(training, forward_rows=5, backward_rows=7)
    virtual = -1 - torch.arange(config.num_virtual_tokens)
    tokens = torch.cat([virtual, random_tokens(9, 4)])
    bypasses = adapter.bypasses()
    hidden = forward(backbone, [CachedSequence(backbone, len(tokens), bypasses).extend(tokens)])
    rows = logits(backbone, hidden, [(len(tokens), bypasses)])
    return Trained(
        gradients=training.gradients, loss=training.sums.loss, logits=rows, graphs=adapter.graphs
    )


def random_masters(whole: Backbone, config: AdapterConfig) -> dict[str, Tensor]:
    """Return parameters none of which is what it is at first."""
    generator = torch.Generator().manual_seed(1)
    fresh = Adapter(whole, config).masters
    return {
        name: value + 0.15 * torch.randn(value.shape, generator=generator)
        for name, value in fresh.items()
    }


def train_divided(
    whole: Backbone, config: AdapterConfig, size: int, **settings: Any
) -> tuple[Trained, Trained]:
    """Return what one rank gives that holds the whole model, and what several give together.

    settings: of `training_programs`, for the several.
    """
    masters = random_masters(whole, config)
    alone = train(whole, config, masters)
    found = run_ranks(
        size, lambda group: train(divided_backbone(whole, group), config, masters, **settings)
    )
    return alone, put_together(found, {name: value.shape for name, value in masters.items()})


def put_together(found: Sequence[Trained], shapes: Mapping[str, tuple[int, ...]]) -> Trained:
    """Return what ranks give together. shapes: those of the whole parameters."""
    graphs = found[0].graphs
    gradients = {
        name: together(
            [each.gradients[name] for each in found],
            shape,
            graphs.states.get(name, WHOLE),
            is_summed=name in graphs.summed,
        )
        for name, shape in shapes.items()
    }
    for each in found[1:]:
        assert torch.equal(each.logits, found[0].logits) and each.loss == found[0].loss, (
            "ranks differ"
        )
    return Trained(gradients=gradients, loss=found[0].loss, logits=found[0].logits, graphs=graphs)


def together(
    pieces: Sequence[Tensor], shape: tuple[int, ...], state: AnyState, *, is_summed: bool
) -> Tensor:
    """Return the whole gradient of a parameter from those of all ranks.

    Args:
        pieces: each rank's gradient.
        shape: that of the whole.
        state: the parameter's.
        is_summed: whether ranks that hold the same entry add up their gradients of it; else these
            must be equal.
    """
    if isinstance(state, Cut):
        whole = torch.zeros(shape)
        for rank, piece in enumerate(pieces):
            one = torch.zeros(shape) if is_summed else whole.clone()
            state.put(one, piece, rank)
            whole = whole + one if is_summed else one
        for rank, piece in enumerate([] if is_summed else pieces):
            again = whole.clone()
            state.put(again, piece, rank)
            assert torch.equal(again, whole), "gradients of copies differ, and nothing adds them up"
        return whole
    if is_summed:
        return torch.stack(list(pieces)).sum(0)
    if state is FIRST:
        assert not any(piece.any() for piece in pieces[1:]), "a rank trains what rank 0 alone holds"
    else:
        assert all(torch.equal(piece, pieces[0]) for piece in pieces), (
            "a whole gradient differs between ranks"
        )
    return pieces[0]


def assert_gradients_agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare gradients to 1e-5; to 1e-4 those of a state's decay, which are sums of large terms
    that cancel."""
    decay = {name for name in expected if DECAY.search(name)}
    for names, bar in ((expected.keys() - decay, 1e-5), (decay, 1e-4)):
        if names:
            assert found.keys() == expected.keys()
            own, theirs = (
                {name: each[name] for name in sorted(names)} for each in (found, expected)
            )
            assert worst_error(own, theirs) < bar


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())
