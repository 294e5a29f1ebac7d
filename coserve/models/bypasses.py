"""Adapters of a batch's rows: which bypasses run together, on which rows.

Adapters that are sums of low rank at linear layers (LoRA) run as one, whatever their number,
targets and ranks (`kernels.low_rank.AdapterBatch`), on rows that save nothing within a bypass. All
others are grouped by structure (the same sites, operators and ranks): the bypasses of a group run
as one, with the parameters of each adapter for its own rows (`kernels.base.Grouped`). So the number
of calls in a step grows with the number of structures, not of requests.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from coserve.graph.bypass import AttachedBypass
from coserve.kernels.base import Grouped
from coserve.kernels.low_rank import (
    AdapterBatch,
    AdapterRows,
    KeptRows,
    LowRankAdapter,
    LowRankFactors,
    PlaceDropout,
)
from coserve.models.base import Architecture, Part


@dataclass(frozen=True, kw_only=True)
class BoundBypass:
    """A bypass at a site, with its tensors."""

    bypass: AttachedBypass
    """The bypass."""
    parameters: Mapping[str, Tensor]
    """Parameters and tensors derived from them by name, in the compute dtype."""


class Bypasses:
    """The bypasses of an adapter, by part and site. Only the parameters' values change."""

    def __init__(
        self, parts: Mapping[Part, Mapping[str, BoundBypass]], architecture: Architecture
    ) -> None:
        """Take the bypasses of an adapter. architecture: that of the adapter, whose vocabulary may
        differ from the backbone's.
        """
        self._parts, self._architecture = parts, architecture

    @property
    def architecture(self) -> Architecture:
        """Return the adapter's model, whose vocabulary may be another than the backbone's."""
        return self._architecture

    @property
    def vocab_size(self) -> int:
        """Return the number of logits of the adapter's rows."""
        return self._architecture.vocab_size

    def of(self, part: Part) -> Mapping[str, BoundBypass]:
        """Return the bypasses of a part, by site."""
        return self._parts.get(part, {})

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    @cached_property
    def structure(self) -> Hashable:
        """Return a key that is equal for adapters whose bypasses can run as one, and unique where
        an operator takes the parameters of one.

        Ranks show only in the parameters' shapes: two adapters whose alpha grows with the rank have
        the same operators.
        """
        bypasses = [
            (part, site, b) for part, sites in self._parts.items() for site, b in sites.items()
        ]
        if not all(_can_be_grouped(bound) for _, _, bound in bypasses):
            return object()
        return _interned(
            tuple((part, site, bound.bypass, _shapes(bound)) for part, site, bound in bypasses)
        )

    @cached_property
    def low_rank(self) -> LowRankAdapter | None:
        """Return the adapter as factors of low rank at the model's linear layers, if it is nothing
        else.
        """
        number = self._architecture.parts.index
        found = {
            (part, site): _as_low_rank(bound, number(part))
            for part, sites in self._parts.items()
            for site, bound in sites.items()
        }
        if not all(found.values()) or not found.keys() <= self._places.keys():
            return None
        return LowRankAdapter([found.get(place) for place in self._places])

    @cached_property
    def narrow(self) -> Mapping[tuple[Part, str], int]:
        """Return the tensors that the factors B multiply, by part and name, with their places;
        empty if the adapter is not of low rank.
        """
        return {
            (part, bound.bypass.nodes[-1].input["x"]): self._places[part, site]
            for part, sites in self._parts.items()
            for site, bound in sites.items()
        }

    @cached_property
    def _places(self) -> Mapping[tuple[Part, str], int]:
        """Return the number of each linear layer of the model, by part and node."""
        return {
            place: number for number, place in enumerate(self._architecture.linear_sites.values())
        }


def _shapes(bound: BoundBypass) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, tensor.shape) for name, tensor in sorted(bound.parameters.items()))


def _as_low_rank(bound: BoundBypass, part: int) -> LowRankFactors | None:
    """Return a bypass as factors if it is B (A x), or scale * B (A x), of its site's input with or
    without dropout; None for any other.

    Args:
        part: Number of the bypass's place.
    """
    bypass = bound.bypass
    if bypass.instead is not None or tuple(node.op for node in bypass.nodes) not in _LOW_RANK:
        return None
    first, *middle, last = bypass.nodes
    sources = [bypass.source, *(node.outputs[0][1] for node in bypass.nodes)]
    if [*(node.input["x"] for node in bypass.nodes), bypass.result] != sources:
        return None
    return LowRankFactors(
        a=bound.parameters[first.input["weight"]],
        b=bound.parameters[last.input["weight"]],
        scale=float(middle[0].attribute["factor"]) if middle else 1.0,
        dropout=None
        if first.op == "low_rank"
        else PlaceDropout(p=first.attribute["p"], part=part, salt=first.attribute["salt"]),
    )


# Operators of a bypass of two factors.
_LOW_RANK = frozenset(
    (
        ("low_rank", "low_rank"),
        ("low_rank", "scale", "low_rank"),
        ("dropout_low_rank", "low_rank"),
        ("dropout_low_rank", "scale", "low_rank"),
    )
)


def _can_be_grouped(bound: BoundBypass) -> bool:
    return bound.bypass.instead is None and all(
        slot in node.operator.grouped
        for node in bound.bypass.nodes
        for slot, name in node.inputs
        if name in bound.parameters
    )


@lru_cache(maxsize=256)
def _interned(structure: Hashable) -> object:
    """Return one object for equal structures, which take long to compare; a step compares them
    often.
    """
    return object()


class BypassGroup:
    """The rows of a batch whose adapters have one structure, adapter by adapter."""

    def __init__(self, members: Sequence["_Member"], device: torch.device) -> None:
        """Group rows. members: rows of at least one span, in the order of the batch."""
        adapters = list(dict.fromkeys(member.bypasses for member in members))
        self._members = sorted(members, key=lambda member: adapters.index(member.bypasses))
        self._adapters = adapters
        sizes = dict.fromkeys(adapters, 0)
        for member in members:
            sizes[member.bypasses] += len(member.rows)
        self._sizes = AdapterRows(list(sizes.values()), device)
        rows = [row for member in self._members for row in member.rows]
        whole = range(rows[0], rows[0] + len(rows))
        is_slice = all(map(int.__eq__, rows, whole))
        self._rows = (
            slice(whole.start, whole.stop) if is_slice else torch.tensor(rows, device=device)
        )
        self._places: dict[int, slice] = {}
        start = 0
        for member in self._members:
            if member.own is not None:
                self._places[id(member.own)] = slice(start, start + len(member.rows))
            start += len(member.rows)

    def has_one_adapter_of(self, num_rows: int) -> bool:
        """Return whether all of a batch's rows have the same adapter."""
        return len(self._adapters) == 1 and self._rows == slice(0, num_rows)

    def sites(self, part: Part) -> Collection[str]:
        """Return the sites of its bypasses in a part."""
        return self._adapters[0].of(part)

    def site(self, part: Part, site: str) -> tuple[AttachedBypass, Mapping[str, Any]]:
        """Return the bypass at a site, and its parameters by name: tensors, or `Grouped` of several
        adapters.
        """
        first, *others = (adapter.of(part)[site] for adapter in self._adapters)
        if not others:
            return first.bypass, first.parameters
        names = {
            name
            for node in first.bypass.nodes
            for name in node.input.values()
            if name in first.parameters
        }
        bound = (first, *others)
        return first.bypass, {
            name: Grouped(tensors=tuple(each.parameters[name] for each in bound), rows=self._sizes)
            for name in names
        }

    def take(self, x: Tensor) -> Tensor:
        """Return its rows of a tensor of the batch: a view, if they are neighbours."""
        return x[self._rows]

    def put(self, x: Tensor, y: Tensor) -> None:
        """Write rows that `take` has returned back to a tensor of the batch."""
        if not isinstance(self._rows, slice):
            x.index_copy_(0, self._rows, y)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add to its rows of a tensor of the batch."""
        if isinstance(self._rows, slice):
            x[self._rows] += y
        else:
            x.index_add_(0, self._rows, y)

    def constant(self, part: Part, name: str) -> Tensor:
        """Return a constant of its spans."""
        return torch.cat(
            [member.own.constants(part)[name] for member in self._members if member.own is not None]
        )

    def rows_of(self, own: Any) -> slice | None:
        """Return the place of a group's rows among this group's."""
        return self._places.get(id(own))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Member:
    """The rows of a span in the batch, with its adapter."""

    rows: range
    """Rows in the batch."""
    bypasses: Bypasses
    """Bypasses of their adapter."""
    own: Any
    """The `RowGroup` that the span is part of."""


class RowAdapters:
    """All adapters of a batch's rows: `low_rank` those that run as one, `groups` the others."""

    def __init__(
        self,
        users: Sequence[tuple[int, Bypasses | None, Any]],
        device: torch.device,
        *,
        apart: bool = False,
    ) -> None:
        """Sort the adapters of a batch.

        Args:
            users: (number of rows, bypasses, the `RowGroup` of the span) of each span.
            apart: Whether each adapter is a group of its own, so that no row's results depend on
                which others there are.
        """
        self._device, self._apart = device, apart
        self._rows: dict[LowRankAdapter, list[int]] = {}
        self._others = others = list[tuple[range, Bypasses, Any]]()
        start = 0
        for num_rows, bypasses, own in users:
            if bypasses is not None:
                rows = range(start, start + num_rows)
                low_rank = bypasses.low_rank
                if (
                    apart
                    or (own is not None and own.keeps_inside)
                    or low_rank is None
                    or low_rank.drops
                ):
                    others.append((rows, bypasses, own))
                else:
                    self._rows.setdefault(low_rank, []).extend(rows)
            start += num_rows

    @cached_property
    def groups(self) -> list[BypassGroup]:
        return _groups_of(self._others, self._device, apart=self._apart)

    @property
    def have_requests_apart(self) -> bool:
        """Return whether some of the groups' rows save nothing within their bypasses."""
        return any(own is None or not own.keeps_inside for _, _, own in self._others)

    @cached_property
    def low_rank(self) -> AdapterBatch | None:
        return (
            AdapterBatch(list(self._rows), list(self._rows.values()), self._device)
            if self._rows
            else None
        )

    def with_windows(
        self, windows: Sequence[tuple[LowRankAdapter, range, KeptRows]]
    ) -> AdapterBatch | None:
        """Return the adapters of `low_rank`, and after them those of training windows, with their
        rows.
        """
        if not windows:
            return self.low_rank
        adapters, rows, kept = zip(*windows, strict=True)
        return AdapterBatch(
            [*self._rows, *adapters], [*self._rows.values(), *rows], self._device, kept=kept
        )


def _groups_of(
    users: Sequence[tuple[range, Bypasses, Any]], device: torch.device, *, apart: bool = False
) -> list[BypassGroup]:
    """Return groups of rows.

    Args:
        users: (rows, bypasses, the `RowGroup` of the span) of each span.
        apart: Whether each adapter is a group of its own.
    """
    found: dict[Hashable, list[_Member]] = {}
    for rows, bypasses, own in users:
        found.setdefault(bypasses if apart else bypasses.structure, []).append(
            _Member(rows=rows, bypasses=bypasses, own=own)
        )
    return [BypassGroup(members, device) for members in found.values()]
