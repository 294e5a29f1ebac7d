"""How /v1/status sees the disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from homes import HandMade

from coserve.server.observability.storage import Storage


def test_all_who_ask_at_once_are_told_the_same(tmp_path: Path):
    home = HandMade(tmp_path / "home")

    async def ask() -> list[dict[str, Any]]:
        storage = Storage(home.store, home.path)
        return await asyncio.gather(*(storage.check() for _ in range(3)))

    first, *others = asyncio.run(ask())
    assert first["writable"] and first["problem"] is None and first["free_bytes"] > 0
    assert others == [first, first]
    home.close()


def test_one_look_serves_all_who_ask_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home, looks = HandMade(tmp_path / "home"), list[int]()
    look = home.store.check_room

    def counted() -> None:
        looks.append(1)
        look()

    monkeypatch.setattr(home.store, "check_room", counted)

    async def ask() -> None:
        storage = Storage(home.store, home.path)
        await asyncio.gather(storage.check(), storage.check())
        await storage.check()

    asyncio.run(ask())
    assert looks == [1]
    home.close()
