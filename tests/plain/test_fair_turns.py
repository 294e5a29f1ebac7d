"""Places that tenants share: a tenant with much to do takes none from the others."""

import asyncio

import pytest

from coserve.server.tenancy.fair_turns import FairTurns, TooManyWaitError


class Holder:
    """Turns that are held until they are told to end, and the order in which they began."""

    def __init__(self, turns: FairTurns) -> None:
        self._turns = turns
        self.began: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def begin(self, name: str) -> "asyncio.Task[None]":
        """Ask for a turn; the tenant is the first letter of the name."""
        self.ends[name] = asyncio.Event()
        return asyncio.ensure_future(self._hold(name))

    async def _hold(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.began.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def turns(num_places: int = 3, *, max_waiting: int = 20, max_wait_s: float = 60.0) -> FairTurns:
    return FairTurns(num_places, max_waiting=max_waiting, max_wait_s=max_wait_s)


def test_the_last_place_is_for_another_tenant():
    async def run() -> None:
        holder = Holder(turns())
        some = [holder.begin(f"a{number}") for number in range(16)]
        await settle()
        assert holder.began == ["a0", "a1"]
        some.append(holder.begin("b0"))
        await settle()
        assert holder.began == ["a0", "a1", "b0"]
        for each in some:
            each.cancel()
        await asyncio.gather(*some, return_exceptions=True)

    asyncio.run(run())


def test_a_tenant_that_waits_is_next_however_many_another_has():
    async def run() -> None:
        holder = Holder(turns())
        some = [holder.begin(name) for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0")]
        await settle()
        assert holder.began == ["a0", "a1", "b0"]
        await holder.end("a0")
        assert holder.began[3] == "c0"  # a tenant without a place
        await holder.end("a1")
        assert holder.began[4] == "a2"
        for each in some:
            each.cancel()
        await asyncio.gather(*some, return_exceptions=True)

    asyncio.run(run())


def test_every_turn_comes_and_none_is_lost():
    async def run() -> None:
        holder = Holder(turns())
        names = [f"{tenant}{number}" for tenant in "abc" for number in range(6)]
        some = [holder.begin(name) for name in names]
        some[5].cancel()  # one that waits
        for name in names:
            await holder.end(name)
        await asyncio.gather(*some, return_exceptions=True)
        assert sorted(holder.began) == sorted(set(names) - {"a5"})
        last = holder.begin("a9")
        await settle()
        assert holder.began[-1] == "a9"
        await holder.end("a9")
        await last

    asyncio.run(run())


def test_a_tenant_that_has_too_much_waiting_is_told_so_alone():
    async def run() -> None:
        holder = Holder(turns(max_waiting=2))
        some = [holder.begin(f"a{number}") for number in range(4)]
        await settle()
        with pytest.raises(TooManyWaitError):
            await holder.begin("a4")
        some.append(holder.begin("b0"))
        await settle()
        assert holder.began[-1] == "b0"
        for each in some:
            each.cancel()
        await asyncio.gather(*some, return_exceptions=True)

    asyncio.run(run())


def test_nobody_waits_for_ever():
    async def run() -> None:
        holder = Holder(turns(max_wait_s=0.01))
        some = [holder.begin(f"a{number}") for number in range(2)]
        await settle()
        with pytest.raises(TooManyWaitError):
            await holder.begin("a2")
        for each in some:
            each.cancel()
        await asyncio.gather(*some, return_exceptions=True)

    asyncio.run(run())
