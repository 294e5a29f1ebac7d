"""While jobs move and nodes leave and die, greedy answers of every node are those of a single
engine, for every version of every adapter.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cluster_nodes import make_request
from divided import EXTENSION, finished, run
from engine_nodes import ClusterWorld, cluster_world, small_engine
from engines import greedy, prompts_of
from job_data import DATA, steps_of
from job_engine import TENANT
from lengths import long_but

from coserve.devices.messages.commands import SaveAdapter
from coserve.devices.messages.jobs import PublishVersion
from coserve.engine.commands import AdapterRef
from coserve.engine.engine import Engine
from coserve.errors import EngineGoneError, StoreError
from coserve.jobs.records import JobRecord

PROMPTS = prompts_of([3, 9, 17])
NUM_TOKENS, NUM_CLIENTS = 12, 6
# What clients ask for: the base model, what a job has made, a version of one that trains, and what
# that serves now.
KINDS = ("base", "done", "version", "live")
LOST = re.compile(
    r"the node node-\d was lost after \d+ tokens of this answer; ask again"
    r"|the job that trains \S+ is restarting, or is over; ask again"
)
# Quick to learn, so that versions answer differently.
SETTINGS: dict[str, Any] = {
    "seed": 4,
    "extension": EXTENSION | {"optimizer": {"learning_rate": 1e-2}},
}


class PublishedVersions:
    """Engines that keep on disk what they publish: a live job's adapter after each of its steps."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._numbers = directory, count()

    def make(self) -> Engine:
        engine = small_engine()
        device, own, number = engine.device, engine.device.execute, next(self._numbers)

        def execute(command: Any) -> Any:
            reply = own(command)
            if isinstance(command, PublishVersion):
                step = command.version.partition("#")[0].rpartition("@")[2]
                own(SaveAdapter(command.version, str(self._directory / f"{step}-{number}")))
            return reply

        device.execute = execute  # type: ignore[method-assign]
        return engine

    def since(self, step: int) -> Iterator[str]:
        """Directories of what was published at this step and later, the oldest first."""
        found = [
            (int(path.name.partition("-")[0]), str(path)) for path in self._directory.iterdir()
        ]
        return (path for published, path in sorted(found) if published >= step)


class SingleEngine:
    """Answers of one engine that loads the same files."""

    def __init__(self) -> None:
        self._engine = small_engine()
        self._answers: dict[str | None, list[tuple[int, ...]]] = {}

    def answers(self, directory: str | None) -> list[tuple[int, ...]]:
        """To each prompt, by what is in a directory; None: by the base model."""
        if directory not in self._answers:
            if directory is not None:
                self._engine.load_adapter(directory, directory)
            found = self._engine.generate(
                PROMPTS, greedy(NUM_TOKENS, ignore_eos=True), adapter=directory
            )
            self._answers[directory] = [each.tokens for each in found]
        return self._answers[directory]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """step: of a live job's newest checkpoint when its adapter was asked for, than which nothing
    older may answer. node: None if its engine has died since.
    """

    node: str | None
    kind: str
    prompt: int
    directory: str | None
    step: int
    tokens: tuple[int, ...]


class Clients:
    """They ask one thing after the other."""

    def __init__(self, made: ClusterWorld, done: JobRecord, live: JobRecord) -> None:
        self._made, self._done, self._live = made, done, live
        self._numbers, self._random = count(), Random(0)
        self.answers, self.lost = list[Answer](), list[str]()

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        clients = [asyncio.create_task(self._ask_on()) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            for client in clients:
                client.cancel()
            ends = await asyncio.gather(*clients, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends

    async def until_answered(self, *nodes: str) -> None:
        """From now on, the base model and what is on disk by each of these nodes, and what is live
        by one."""
        first = len(self.answers)

        def answered() -> bool:
            pairs = {(each.node, each.kind) for each in self.answers[first:]}
            kinds = {kind for _, kind in pairs}
            return kinds == {*KINDS} and pairs >= {
                (node, kind) for node in nodes for kind in KINDS if kind != "live"
            }

        await self._made.until(answered)

    async def _ask_on(self) -> None:
        while True:
            id, kind, prompt = (
                f"r{next(self._numbers)}",
                self._random.choice(KINDS),
                self._random.randrange(len(PROMPTS)),
            )
            kept = [each for each in self._made.world.checkpoints(self._live.id) if each.listed]
            newest = kept[-1 - prompt % len(kept)]
            names = {
                "base": None,
                "done": self._done.name,
                "version": newest.name,
                "live": self._live.name,
            }
            adapter = None if (name := names[kind]) is None else self._ref(name)
            if name is not None and adapter is None:
                assert kind == "live", "what is on disk can be asked for"
                await asyncio.sleep(0.01)  # its next step serves it again
                continue
            tokens = await self._tokens(id, prompt, adapter)
            if tokens is not None:
                answer = Answer(
                    node=self._made.asked(id),
                    kind=kind,
                    prompt=prompt,
                    directory=None if adapter is None else adapter.directory,
                    step=kept[-1].step,
                    tokens=tokens,
                )
                self.answers.append(answer)

    def _ref(self, name: str) -> AdapterRef | None:
        found = self._made.world.manager.adapters.find(TENANT, name)
        return None if found is None else found.ref

    async def _tokens(
        self, id: str, prompt: int, adapter: AdapterRef | None
    ) -> tuple[int, ...] | None:
        """None if it was lost."""
        link, params = self._made.link, greedy(NUM_TOKENS, ignore_eos=True)
        stream = link.open(
            [make_request(id, prompt=PROMPTS[prompt], params=params, adapter=adapter)]
        )
        try:
            chunks = [chunk async for batch in stream.batches() for chunk in batch]
        except EngineGoneError as error:
            self.lost.append(str(error))
            return None
        finally:
            link.close(stream)
        assert [chunk.error for chunk in chunks if chunk.error is not None] == []
        return tuple(token for chunk in chunks for token in chunk.tokens)


@pytest.mark.long
def test_every_nodes_answers_are_a_single_engines_while_a_live_job_moves_and_nodes_leave_and_die(
    tmp_path: Path,
):
    versions = PublishedVersions(tmp_path / "versions")

    async def test() -> None:
        async with cluster_world(tmp_path / "home", make=versions.make) as made:
            w = made.world
            done = await w.create(
                DATA, hyperparameters={"n_epochs": 3, "batch_size": 3}, **SETTINGS
            )
            await finished(w, done)
            done = w.job(done.id)
            settings = SETTINGS["extension"] | {"live": True, "checkpoint_every_steps": 20}
            live = await w.create(
                40 * DATA,
                hyperparameters={"n_epochs": 50, "batch_size": 1},
                seed=5,
                extension=settings,
            )
            await made.until(lambda: len(w.checkpoints(live.id)) > 1)
            clients = Clients(made, done, live)
            async with clients.asking():
                await clients.until_answered("node-0", "node-1", "node-2")

                (leaving,) = made.working(live.id)
                await made.until(lambda: requests_on(made, leaving))
                await made.link.drain(leaving)
                await made.until(lambda: made.working(live.id) not in ([], [leaving]))
                (dying,) = made.working(live.id)
                await clients.until_answered(dying)
                await made.until(lambda: not requests_on(made, leaving))
                assert clients.lost == [], "a node that leaves ends what it has begun"

                (left,) = {*made.nodes} - {leaving, dying}
                await made.until(lambda: requests_on(made, dying))
                made.node(int(dying[-1])).die()
                await made.until(lambda: made.working(live.id) == [left])
                await clients.until_answered(left)

                made.node(int(dying[-1])).live()
                await clients.until_answered(left, dying)
                assert not requests_on(made, leaving)
            single = SingleEngine()
            assert [each for each in clients.answers if not is_right(each, single, versions)] == []
            for prompt in range(len(PROMPTS)):
                told = {each.tokens for each in clients.answers if each.prompt == prompt}
                assert len(told) > len(KINDS), "versions answer differently"
            assert [text for text in clients.lost if not LOST.fullmatch(text)] == []
            steps = steps_of(w.events(live.id))
            assert steps == list(range(1, len(steps) + 1)), "each step is there once"
            await w.manager.cancel(TENANT, live.id)

    run(test)


@pytest.mark.parametrize("has_older", long_but(True, of=[False, True]))
@pytest.mark.parametrize("is_full", [False, True])
def test_every_step_is_there_once_when_the_checkpoint_of_a_node_that_leaves_cannot_be_written(
    tmp_path: Path, has_older: bool, is_full: bool
):
    """It cannot be made, or there is no room for it on disk."""

    async def test() -> None:
        async with cluster_world(tmp_path / "home", num_nodes=2) as made:
            w = made.world
            extension = SETTINGS["extension"] | {"checkpoint_every_steps": 3 if has_older else 1000}
            job = await w.create(
                10 * DATA,
                hyperparameters={"n_epochs": 3, "batch_size": 3},
                seed=4,
                extension=extension,
            )
            await made.until(lambda: len(steps_of(w.events(job.id))) > 4)
            (leaving,) = made.working(job.id)
            engine = made.nodes[leaving].engine
            assert engine is not None

            def refuse(id: str) -> Any:
                raise StoreError("there is no room")

            if is_full:
                made.nodes[leaving].has_room = False
            else:
                engine.checkpoint = refuse  # type: ignore[method-assign,assignment]
            told = len(steps_of(w.events(job.id)))
            more = 0 if is_full else 1  # a job that waits for room makes few steps
            await made.until(lambda: len(steps_of(w.events(job.id))) > told + more)
            await made.link.drain(leaving)
            await made.until(lambda: leaving not in made.working(job.id))
            await finished(w, job)

    run(test)


def is_right(answer: Answer, single: SingleEngine, versions: PublishedVersions) -> bool:
    """Whether a single engine says the same."""
    right = versions.since(answer.step) if answer.kind == "live" else [answer.directory]
    return any(single.answers(directory)[answer.prompt] == answer.tokens for directory in right)


def requests_on(made: ClusterWorld, name: str) -> int:
    number: int = next(each["requests"] for each in made.link.describe() if each["name"] == name)
    return number
