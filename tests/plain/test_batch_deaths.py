"""Which lines of batches are blamed for deaths: with the real turns, and processes that die of some
lines."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from random import Random

import pytest

from coserve.server.batches.deaths import LineDeaths, after_death, next_group
from coserve.server.batches.turns import BatchTurns

Line = tuple[str, str]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(limited())


def test_a_line_is_guilty_only_of_two_deaths_while_it_was_alone_after_two_others():
    once = after_death(None, num_lines=1)
    twice = after_death(once, num_lines=1)
    assert not once.is_suspect and twice.is_suspect and not twice.is_guilty
    alone = after_death(twice, num_lines=1)
    assert not alone.is_guilty
    assert after_death(alone, num_lines=1).is_guilty
    assert not after_death(alone, num_lines=2).is_guilty


def test_a_suspect_that_a_process_died_of_alone_is_tried_next():
    """So a process that is killed from outside, again and again, costs no line that can end before
    the next time."""
    few = {("b", str(n)): LineDeaths(num=3, num_lines=4) for n in range(4)}
    deaths = few | {("b", "last"): LineDeaths(num=4, num_lines=1, num_alone=1)}
    assert next_group(list(deaths), deaths) == [("b", "last")]
    assert len(next_group(list(few), few)) == 1


def test_groups_of_suspects_become_smaller_and_the_smallest_comes_first():
    many = LineDeaths(num=2, num_lines=40)
    deaths = {("b", str(n)): many for n in range(40)}
    assert len(next_group(list(deaths), deaths)) == 3
    for line in [("b", "7"), ("b", "8"), ("b", "9")]:
        deaths[line] = after_death(deaths[line], num_lines=3)
    assert next_group(list(deaths), deaths) == [("b", "7")]
    assert next_group([("b", "none")], deaths) == ()


class Engine:
    """Answers lines after a while, unless it dies of one of them: then all that are with it are
    lost."""

    def __init__(self, deadly: Collection[Line], rng: Random) -> None:
        self.turns, self.deadly, self.rng = BatchTurns(), deadly, rng
        self.num_deaths = 0
        self.with_it: dict[Line, asyncio.Future[bool]] = {}
        self.beside_suspects: list[bool] = []

    async def ask(self, line: Line) -> str:
        """Ask a line until it is answered or set aside."""
        while True:
            async with self.turns.turn(line) as is_suspect:
                self.beside_suspects.append(is_suspect)
                lost = self.with_it[line] = asyncio.get_running_loop().create_future()
                for _ in range(self.rng.randrange(1, 8)):
                    await asyncio.sleep(0)
                if line in self.deadly and not lost.done():
                    self.die()
                self.with_it.pop(line, None)
                if not lost.done():
                    return "answered"
                if self.turns.died(line).is_guilty:
                    return "set aside"
            await asyncio.sleep(0)

    def die(self) -> None:
        self.num_deaths += 1
        self.turns.engine_died()
        for lost in self.with_it.values():
            if not lost.done():
                lost.set_result(True)
        self.with_it.clear()


@pytest.mark.parametrize(
    ("num_lines", "num_deadly"), [(1, 1), (2, 1), (16, 16), (300, 1), (512, 1), (512, 5), (40, 0)]
)
def test_lines_that_kill_are_set_aside_and_all_others_are_answered(num_lines: int, num_deadly: int):
    async def test() -> None:
        rng = Random(num_lines + num_deadly)
        lines = [(f"batch {number % 7}", str(number)) for number in range(num_lines)]
        deadly = rng.sample(lines, num_deadly)
        engine = Engine(deadly, rng)
        ends = await asyncio.gather(*map(engine.ask, lines))
        assert {line for line, end in zip(lines, ends, strict=True) if end == "set aside"} == set(
            deadly
        )
        # Two make suspects; then each that is deadly costs one for every size of its group, at most
        # 32, 2, 1, and 1.
        assert engine.num_deaths <= 2 + 4 * num_deadly
        assert engine.turns.num_under_way == engine.turns.num_waiting == 0
        assert any(engine.beside_suspects) == (num_deadly > 0)

    run(test)


def test_suspects_run_apart_from_all_others():
    async def test() -> None:
        turns, order = BatchTurns(), list[str]()
        turns.add_deaths({("b", "suspect"): LineDeaths(num=2, num_lines=1)})

        async def hold(name: str, ended: asyncio.Event) -> None:
            async with turns.turn(("b", name)):
                order.append(name)
                await ended.wait()

        before, suspect, after = (asyncio.Event() for _ in range(3))
        tasks = [asyncio.create_task(hold("before", before))]
        await asyncio.sleep(0)
        tasks += [
            asyncio.create_task(hold("suspect", suspect)),
            asyncio.create_task(hold("after", after)),
        ]
        await asyncio.sleep(0.01)
        assert order == ["before"], "the suspect waits for it, and no other line begins"
        before.set()
        await asyncio.sleep(0.01)
        assert order == ["before", "suspect"]
        suspect.set()
        await asyncio.sleep(0.01)
        assert order == ["before", "suspect", "after"]
        after.set()
        await asyncio.gather(*tasks)

    run(test)


def test_a_suspect_whose_batch_is_cancelled_holds_up_nobody():
    async def test() -> None:
        turns = BatchTurns()
        turns.add_deaths({("b", "suspect"): LineDeaths(num=2, num_lines=1)})

        async def hold(name: str) -> None:
            async with turns.turn(("b", name)):
                await asyncio.Event().wait()

        first = asyncio.create_task(hold("first"))
        await asyncio.sleep(0)
        suspect = asyncio.create_task(hold("suspect"))
        others = [asyncio.create_task(hold(f"{number}")) for number in range(3)]
        await asyncio.sleep(0.01)
        assert (turns.num_under_way, turns.num_waiting) == (1, 4)
        suspect.cancel()
        await asyncio.sleep(0.01)
        assert (turns.num_under_way, turns.num_waiting) == (4, 0)
        for task in (first, *others):
            task.cancel()
        await asyncio.gather(first, suspect, *others, return_exceptions=True)
        assert (turns.num_under_way, turns.num_waiting) == (0, 0)

    run(test)
