"""Requests of batches that are under way at once: as many as the nodes that there are run."""

import asyncio
from collections.abc import Awaitable, Callable

from coserve.server.batches.places import BatchPlaces


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_there_are_more_places_when_nodes_have_come_and_fewer_when_they_have_gone():
    async def test() -> None:
        most = 2
        places = BatchPlaces(lambda: most)
        taken = list[int]()

        async def take(number: int) -> None:
            await places.acquire("a")
            taken.append(number)

        tasks = [asyncio.create_task(take(number)) for number in range(8)]
        await settled()
        assert taken == [0, 1]
        most = 4
        places.grow()
        await settled()
        assert taken == [0, 1, 2, 3], "who has waited longest"
        most = 3
        places.release("a")
        await settled()
        assert taken == [0, 1, 2, 3], "one of four is given back, and three there may be"
        places.release("a")
        await settled()
        assert taken == [0, 1, 2, 3, 4]
        most = 5
        places.release("a")
        await settled()
        assert taken == [0, 1, 2, 3, 4, 5, 6, 7]
        await asyncio.gather(*tasks)

    run(test)


def test_who_is_cancelled_while_waiting_leaves_the_place_to_others():
    async def test() -> None:
        places = BatchPlaces(lambda: 1)
        await places.acquire("a")
        first, second = (asyncio.create_task(places.acquire("a")) for _ in range(2))
        await settled()
        places.release("a")
        first.cancel()
        await settled()
        assert first.cancelled() and second.done()

    run(test)


def test_a_free_place_goes_to_the_tenant_with_the_fewest():
    async def test() -> None:
        places, taken = BatchPlaces(lambda: 4), list[str]()

        async def take(tenant: str) -> None:
            await places.acquire(tenant)
            taken.append(tenant)

        tasks = [asyncio.create_task(take("many")) for _ in range(20)]
        await settled()
        tasks += [asyncio.create_task(take("few")) for _ in range(3)]
        for _ in range(4):
            await settled()
            places.release("many")
        await settled()
        assert taken == ["many"] * 4 + ["few"] * 2 + ["many"] * 2, "two each"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)
