"""A pack: several training sequences laid end to end, each attending only within itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from coserve.tuning.examples import Example

UNTRAINED = -100  # the target of a row that has none


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Training sequences end to end: n rows."""

    tokens: Tensor
    """Token ids, int64 [n]."""
    targets: Tensor
    """Token after each row, where that is trained on; UNTRAINED elsewhere. int64 [n]."""
    positions: Tensor
    """Positions, from 0 in every sequence, int64 [n]."""
    bounds: tuple[int, ...]
    """Rows at which sequences start, and the end: (0, …, n)."""

    def __post_init__(self) -> None:
        shapes = {tuple(tensor.shape) for tensor in (self.tokens, self.targets, self.positions)}
        if (
            shapes != {(self.bounds[-1],)}
            or self.bounds[0] != 0
            or any(end <= start for start, end in pairwise(self.bounds))
        ):
            raise ValueError(
                f"a pack of {self.bounds} needs as many tokens, targets and positions, not {shapes}"
            )

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    @property
    def num_trained(self) -> int:
        """Return the number of rows that have a target."""
        return int((self.targets != UNTRAINED).sum())

    @property
    def mean_context_len(self) -> float:
        """Return the mean number of keys that a row attends to."""
        return (
            sum((end - start) * (end - start + 1) / 2 for start, end in pairwise(self.bounds))
            / self.num_rows
        )

    def sequences_within(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Return for every sequence with rows in [start, end) its first row, and its first and
        last-plus-one row in there.
        """
        return [
            (first, max(first, start), min(last, end))
            for first, last in pairwise(self.bounds)
            if first < end and last > start
        ]


def make_pack(sequences: Sequence[tuple[Sequence[int], Sequence[bool] | None]]) -> Pack:
    """Lay sequences end to end: tokens, with marks of those that are trained on (None for all).

    Raises:
        ValueError: There is no sequence, one is empty, or marks are missing.
    """
    if not sequences:
        raise ValueError("a pack of no sequences")
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    bounds = [0]
    for index, (ids, trained) in enumerate(sequences):
        if not ids:
            raise ValueError(f"sequence {index} of a pack has no tokens")
        mask = [True] * len(ids) if trained is None else list(trained)
        if len(mask) != len(ids):
            raise ValueError(
                f"a sequence of {len(ids)} tokens came with {len(mask)} marks of which are trained "
                f"on"
            )
        tokens += ids
        targets += [
            token if mark else UNTRAINED for token, mark in zip(ids[1:], mask[1:], strict=True)
        ] + [UNTRAINED]
        positions += range(len(ids))
        bounds.append(len(tokens))
    return Pack(
        tokens=torch.tensor(tokens),
        targets=torch.tensor(targets),
        positions=torch.tensor(positions),
        bounds=tuple(bounds),
    )


def pack_of(examples: Sequence[Example]) -> Pack:
    """Lay examples end to end."""
    return make_pack([sequence for example in examples for sequence in example.sequences])
