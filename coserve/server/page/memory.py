"""The page pool on the page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Names of the owners of pages on the page.
_NAMES = {
    "kv": "requests (KV cache)",
    "activations": "jobs (activations)",
    "optimizer": "jobs (optimizers)",
    "weights": "weights of other models",
}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Part of the page pool that belongs to one owner."""

    key: str
    """Class in the style sheet."""
    name: str
    """Name in the legend."""
    num_bytes: int
    """Its size in bytes."""
    begin: float
    """Start of its part of the bar, from 0 to 1."""
    share: float
    """Its share of the pool, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class MemoryView:
    """The page pool by owner."""

    owners: tuple[Owner, ...]
    """Owners of pages, without free ones."""
    num_bytes: int
    """Size of the pool."""
    num_free_bytes: int
    """Free bytes of the pool."""
    num_host_bytes: int
    """Size of the pool in host memory."""
    num_host_used_bytes: int
    """Used bytes of the pool in host memory."""


def memory_view(memory: Mapping[str, Any]) -> MemoryView | None:
    """Return the page pool by owner; None while there is no engine.

    Args:
        memory: `memory` of `/v1/status`.
    """
    num_pages, page_bytes, num_free = memory["pages"], memory["page_bytes"], memory["free"]
    if not num_pages or num_free is None:
        return None
    owners, begin = list[Owner](), 0.0
    for key, number in sorted(memory["by_owner"].items()):
        share = number / num_pages
        name = _NAMES.get(key, key)
        owners.append(
            Owner(key=key, name=name, num_bytes=number * page_bytes, begin=begin, share=share)
        )
        begin += share
    return MemoryView(
        owners=tuple(owners),
        num_bytes=num_pages * page_bytes,
        num_free_bytes=num_free * page_bytes,
        num_host_bytes=memory["host"]["pages"] * page_bytes,
        num_host_used_bytes=memory["host"]["used"] * page_bytes,
    )
