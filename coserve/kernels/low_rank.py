"""Low-rank adapters (LoRA) as a backend gets them: their factors, and which rows are whose.

A model has places where adapters can sit, numbered through the whole model. Neighbouring places
whose sites read the same rows (the projections of queries, keys and values, say) run as one.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from struct import pack, unpack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coserve.kernels.transfer import int_tensor, on_device

# Numbers of a place in the table of factors.
PLACE_NUMBERS = 9


class LowRankRows(NamedTuple):
    """Addition of one adapter to some columns of all rows of a product: narrow B^T."""

    narrow: Tensor
    """Rows in the adapter's rank, [n, rank]."""
    b: Tensor
    """Factor B [columns, rank]."""
    first: int = 0
    """The first of the columns."""


class LowRankGradient(NamedTuple):
    """Addition of one adapter to the gradient of a product's rows: narrow A."""

    narrow: Tensor
    """Gradient in the adapter's rank, [n, rank]."""
    a: Tensor
    """Factor A [rank, in]."""


@dataclass(frozen=True, kw_only=True)
class PlaceDropout:
    """Dropout of the rows that an adapter reads at a place."""

    p: float
    """Probability with which each feature is dropped."""
    part: int
    """Number of the place's part of the model."""
    salt: int
    """Salt of the place within its part; see `kernels.dropout`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRankFactors:
    """Factors of an adapter at a place, which adds scale * B (A x), or B (A dropout(x))."""

    a: Tensor
    """Factor A [rank, in]."""
    b: Tensor
    """Factor B [out, rank]."""
    scale: float
    """Factor of the result."""
    dropout: PlaceDropout | None = None
    """Dropout of x; None: nothing is dropped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptRows:
    """Places where rows of an adapter that is trained are kept."""

    narrow: Tensor
    """Addresses by place, int64, where the input of B (scale * A x, rounded) is kept, row after
    row; 0: it is not kept.
    """
    dropout_row_ids: Tensor
    """Keys of the rows' dropout, int64 [n]."""


class LowRankAdapter:
    """An adapter by place. The values of its factors may change, and nothing else.

    Args:
        places: its factors at each place; None: it adds nothing there.
    """

    def __init__(self, places: Sequence[LowRankFactors | None]) -> None:
        self.places = tuple(places)
        # Whether rows need ids for dropout; served adapters never drop.
        self.drops = any(factors is not None and factors.dropout is not None for factors in places)
        # A bit for each place at which it sits.
        self.mask = sum(1 << index for index, factors in enumerate(places) if factors is not None)

    @cached_property
    def addresses(self) -> Tensor:
        """Return the table of its factors for kernels that read them by address: int64 [places, 9].

        A place has the addresses of A and B, the rank, the bits of the scale as float64, room for
        the two numbers of `KeptRows`, and its dropout's part, salt and bits of p; zeros where the
        adapter adds nothing.
        """
        return torch.tensor([_numbers(place) for place in self.places], dtype=torch.int64)

    @cached_property
    def device_addresses(self) -> Tensor:
        """Return `addresses` on the device of the factors."""
        return on_device(
            self.addresses, next(place.a.device for place in self.places if place is not None)
        )

    @cached_property
    def max_rank(self) -> int:
        """Return the largest rank of its places."""
        return max([place.a.shape[0] for place in self.places if place is not None], default=0)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype | None]:
        """Return the dtypes of its factors, with None for factors that no kernel can read by their
        addresses, since they are absent or have gaps.
        """
        factors = [
            tensor for place in self.places if place is not None for tensor in (place.a, place.b)
        ]
        # Contiguous factors only, since kernels get an address and no strides.
        return frozenset(
            tensor.dtype if tensor.is_contiguous() and not tensor.is_meta else None
            for tensor in factors
        )


def _numbers(place: LowRankFactors | None) -> Sequence[int]:
    """Return a place's row of the table of factors."""
    if place is None:
        return (0,) * PLACE_NUMBERS
    factors = (place.a.data_ptr(), place.b.data_ptr(), place.a.shape[0], _bits(place.scale))
    drop = place.dropout
    # The two zeros are filled in per step, for adapters whose rows are kept (`AdapterBatch`).
    return (*factors, 0, 0, *((0, 0, 0) if drop is None else (drop.part, drop.salt, _bits(drop.p))))


def _bits(number: float) -> int:
    """Return the bits of a float64 as an int64."""
    return int(unpack("q", pack("d", number))[0])


class AdapterRows:
    """Numbers of rows of several adapters, in their order, made once per step for all products with
    them.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device = tuple(sizes), device
        self.num_rows = sum(self.sizes)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Return the rows of each adapter."""
        ends = list(accumulate(self.sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True))


class AdapterBatch:
    """Adapters, at least one, and the rows of a batch that each of them has, at least one, made
    once per step.

    Args:
        adapters: the adapters.
        rows: the rows of the batch that each adapter has.
        device: the device of the batch.
        kept: places for the rows of the last adapters, which are trained; their rows are
            neighbours.
    """

    def __init__(
        self,
        adapters: Sequence[LowRankAdapter],
        rows: Sequence[Sequence[int]],
        device: torch.device,
        *,
        kept: Sequence[KeptRows] = (),
    ) -> None:
        self.adapters, self._rows, self._kept = tuple(adapters), rows, kept
        # Tables that a backend derives from it, made once for all places.
        self.derived: dict[Hashable, Any] = {}
        assert not any(adapter.drops for adapter in adapters[: len(adapters) - len(kept)])
        self.sizes = AdapterRows(list(map(len, rows)), device)
        self._parts: dict[tuple[int, ...], AdapterBatch] = {}

    @cached_property
    def mask(self) -> int:
        """Return a bit for each place at which some adapter sits."""
        mask = 0
        for adapter in self.adapters:
            mask |= adapter.mask
        return mask

    def at(self, place: int) -> "AdapterBatch":
        """Return the adapters that sit at a place (at least one does), with their rows."""
        which = tuple(
            index
            for index, adapter in enumerate(self.adapters)
            if adapter.places[place] is not None
        )
        if len(which) == len(self.adapters):
            return self
        # Layers mostly have the same adapters, so one smaller batch serves them all.
        if which not in self._parts:
            adapters, rows = zip(
                *((self.adapters[index], self._rows[index]) for index in which), strict=True
            )
            self._parts[which] = AdapterBatch(adapters, rows, self.sizes.device)
        return self._parts[which]

    @property
    def rows_by_adapter(self) -> Sequence[Sequence[int]]:
        """Return the rows of the batch that each adapter has."""
        return self._rows

    @cached_property
    def rows(self) -> Tensor:
        """Return the rows of the batch, adapter by adapter: int64 [n]."""
        return on_device(int_tensor(list(chain.from_iterable(self._rows))), self.sizes.device)

    @cached_property
    def ends(self) -> Tensor:
        """Return the number of rows up to each adapter's last: int64 [adapters], on the CPU."""
        return torch.tensor(list(accumulate(self.sizes.sizes)))

    @cached_property
    def addresses(self) -> Tensor:
        """Return the tables of all factors (`LowRankAdapter.addresses`): int64 [adapters, places,
        9], on the CPU.
        """
        tables = torch.stack([adapter.addresses for adapter in self.adapters])
        # `stack` has copied, so this step's numbers do not stay in the adapters' own tables.
        for own, kept in zip(tables[len(tables) - len(self._kept) :], self._kept, strict=True):
            own[:, 4], own[:, 5] = kept.narrow, kept.dropout_row_ids.data_ptr()
        return tables

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of all factors; None if they have several, or kernels cannot read them
        by address.
        """
        dtypes = frozenset[torch.dtype | None]().union(
            *(adapter.dtypes for adapter in self.adapters)
        )
        return next(iter(dtypes)) if len(dtypes) == 1 else None
