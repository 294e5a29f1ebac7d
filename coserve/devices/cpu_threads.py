"""How many threads of a CPU a model is worth."""

from math import prod

import torch

from coserve.models.families import build_architecture
from coserve.models.source import find_model

# Threads meet at the end of every product. Those of smaller models take microseconds, so that threads wait for one
# another longer than they compute; and far longer yet if another process has one of their cores for a moment.
_FEW_WEIGHTS = 16_000_000


def worthwhile_threads(model: str) -> int:
    """One for a model of few weights, otherwise as many as PyTorch would use."""
    shapes = build_architecture(find_model(model, with_weights=False).config).weight_shapes
    return 1 if sum(map(prod, shapes.values())) < _FEW_WEIGHTS else torch.get_num_threads()
