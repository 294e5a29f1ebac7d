"""The page pool as the page shows it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What owners of pages are, for those who have not read the code.
_NAMES = {
    "kv": "requests (KV cache)",
    "activations": "jobs (activations)",
    "optimizer": "jobs (optimizers)",
    "weights": "weights of other models",
}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """begin, share: of the pool, from 0 to 1."""

    key: str
    name: str
    num_bytes: int
    begin: float
    share: float


@dataclass(frozen=True, kw_only=True)
class MemoryView:
    """owners: without what is free."""

    owners: tuple[Owner, ...]
    num_bytes: int
    num_free_bytes: int
    num_host_bytes: int
    num_host_used_bytes: int


def memory_view(memory: Mapping[str, Any]) -> MemoryView | None:
    """memory: as `/v1/status` has it. None while there is no engine."""
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
