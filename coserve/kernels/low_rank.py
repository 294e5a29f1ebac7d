"""What crosses to a backend for adapters that are sums of low rank (LoRA): their factors, and which
rows are whose.

A model has places where adapters can sit, numbered through the whole model; neighbouring places
whose sites read the same rows (the projections of queries, keys and values, say) are run as one.
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
    """What one adapter adds to some columns of all rows of a product: narrow B^T; narrow [n, rank],
    b [columns, rank]. first: the first of these columns.
    """

    narrow: Tensor
    b: Tensor
    first: int = 0


class LowRankGradient(NamedTuple):
    """What one adapter adds to the gradient of a product's rows: narrow A; narrow [n, rank], a
    [rank, in].
    """

    narrow: Tensor
    a: Tensor


@dataclass(frozen=True, kw_only=True)
class PlaceDropout:
    """What a place drops of its rows: each feature with probability p. part: the number of its part
    of the model; salt: see `kernels.dropout`.
    """

    p: float
    part: int
    salt: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """What an adapter adds to a place: scale * B (A x), or B (A dropout(x)); a [rank, in], b [out,
    rank].
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: PlaceDropout | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptRows:
    """Of an adapter that is trained, for its rows: where what B multiplies (scale * A x, rounded)
    is kept, addresses by place, int64, row after row (0: nowhere); and the keys of their dropout,
    int64 [n].
    """

    narrow: Tensor
    dropout_row_ids: Tensor


class LowRankAdapter:
    """An adapter by place (None: it has nothing there). The values of its factors may change, and
    nothing else.
    """

    def __init__(self, places: Sequence[LowRank | None]) -> None:
        self.places = tuple(places)
        self.drops = any(factors is not None and factors.dropout is not None for factors in places)
        # A bit for each place at which it sits.
        self.mask = sum(1 << index for index, factors in enumerate(places) if factors is not None)

    @cached_property
    def addresses(self) -> Tensor:
        """Where its factors lie, for kernels that are told: int64 [places, 9], with the addresses
        of A and B, the rank, the bits of the scale as float64, room for what `KeptRows` says, and
        of its dropout the part, the salt and the bits of p; zeros where it has nothing.
        """
        return torch.tensor([_numbers(place) for place in self.places], dtype=torch.int64)

    @cached_property
    def device_addresses(self) -> Tensor:
        """The same, on the device of the factors."""
        return on_device(
            self.addresses, next(place.a.device for place in self.places if place is not None)
        )

    @cached_property
    def max_rank(self) -> int:
        """The largest of its places."""
        return max([place.a.shape[0] for place in self.places if place is not None], default=0)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype | None]:
        """Of its factors; None: of those that no kernel can read by their addresses, absent or with
        gaps.
        """
        factors = [
            tensor for place in self.places if place is not None for tensor in (place.a, place.b)
        ]
        return frozenset(
            tensor.dtype if tensor.is_contiguous() and not tensor.is_meta else None
            for tensor in factors
        )


def _numbers(place: LowRank | None) -> Sequence[int]:
    """Of a place, in the table of factors."""
    if place is None:
        return (0,) * PLACE_NUMBERS
    factors = (place.a.data_ptr(), place.b.data_ptr(), place.a.shape[0], _bits(place.scale))
    drop = place.dropout
    return (*factors, 0, 0, *((0, 0, 0) if drop is None else (drop.part, drop.salt, _bits(drop.p))))


def _bits(number: float) -> int:
    """Of a float64, as an int64."""
    return int(unpack("q", pack("d", number))[0])


class AdapterRows:
    """How many rows each of several adapters has, in their order: made once per step, for all
    products with them.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device = tuple(sizes), device
        self.num_rows = sum(self.sizes)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The rows of each."""
        ends = list(accumulate(self.sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True))


class AdapterBatch:
    """Adapters, at least one, and the rows of a batch that each of them has, at least one: made
    once per step.
    """

    def __init__(
        self,
        adapters: Sequence[LowRankAdapter],
        rows: Sequence[Sequence[int]],
        device: torch.device,
        *,
        kept: Sequence[KeptRows] = (),
    ) -> None:
        """rows: of the batch, those of each adapter. kept: of the last of the adapters, which are
        trained; their rows are neighbours.
        """
        self.adapters, self._rows, self._kept = tuple(adapters), rows, kept
        # What a backend derives from it, made once for all places.
        self.derived: dict[Hashable, Any] = {}
        assert not any(adapter.drops for adapter in adapters[: len(adapters) - len(kept)])
        self.sizes = AdapterRows(list(map(len, rows)), device)
        self._parts: dict[tuple[int, ...], AdapterBatch] = {}

    @cached_property
    def mask(self) -> int:
        """A bit for each place at which some adapter sits."""
        mask = 0
        for adapter in self.adapters:
            mask |= adapter.mask
        return mask

    def at(self, place: int) -> "AdapterBatch":
        """Those that sit at a place, at which some do."""
        which = tuple(
            index
            for index, adapter in enumerate(self.adapters)
            if adapter.places[place] is not None
        )
        if len(which) == len(self.adapters):
            return self
        if which not in self._parts:
            adapters, rows = zip(
                *((self.adapters[index], self._rows[index]) for index in which), strict=True
            )
            self._parts[which] = AdapterBatch(adapters, rows, self.sizes.device)
        return self._parts[which]

    @property
    def rows_by_adapter(self) -> Sequence[Sequence[int]]:
        """Which rows of the batch are each adapter's."""
        return self._rows

    @cached_property
    def rows(self) -> Tensor:
        """Adapter by adapter, which rows of the batch are its: int64 [n]."""
        return on_device(int_tensor(list(chain.from_iterable(self._rows))), self.sizes.device)

    @cached_property
    def ends(self) -> Tensor:
        """How many rows there are up to each adapter's last: int64 [adapters], on the CPU."""
        return torch.tensor(list(accumulate(self.sizes.sizes)))

    @cached_property
    def addresses(self) -> Tensor:
        """Of all factors (see `LowRankAdapter`): int64 [adapters, places, 9], on the CPU."""
        found = torch.stack([adapter.addresses for adapter in self.adapters])
        for own, kept in zip(found[len(found) - len(self._kept) :], self._kept, strict=True):
            own[:, 4], own[:, 5] = kept.narrow, kept.dropout_row_ids.data_ptr()
        return found

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """Of all factors, if kernels can read them by their addresses."""
        dtypes = frozenset[torch.dtype | None]().union(
            *(adapter.dtypes for adapter in self.adapters)
        )
        return next(iter(dtypes)) if len(dtypes) == 1 else None
