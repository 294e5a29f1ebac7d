"""Data-parallel jobs on real engines: what they learn, what is told of them, and what they become
when nodes die."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import make_request
from divided import EXTENSION, NUM_STEPS, STRATEGIES, finished, losses, run
from engine_nodes import ClusterWorld, cluster_world, small_engine
from job_data import DATA, adapter_in, distance, steps_of
from job_engine import World, world
from lengths import long_but

from coserve.cluster.nodes.messages import CommandBatch
from coserve.devices.messages.commands import SaveAdapter
from coserve.devices.messages.jobs import PublishVersion, TakeContribution
from coserve.engine.commands import CancelJob, StartJob
from coserve.engine.engine import Engine
from coserve.errors import JobError
from coserve.jobs.records import JobRecord
from coserve.protocol.messages import decode_command


async def create(made: World, *, epochs: int = 3, **extension: Any) -> JobRecord:
    return await made.create(
        DATA,
        hyperparameters={"n_epochs": epochs, "batch_size": 3},
        extension=EXTENSION | extension,
        seed=4,
    )


def on_one_node(home: Path, **named: Any) -> tuple[list[Any], dict[int, Any]]:
    async def test() -> Any:
        async with world(home) as made:
            return await finished(made, await create(made, **named))

    found: tuple[list[Any], dict[int, Any]] = run(test)
    return found


def test_synchronous_nodes_learn_what_one_node_learns_from_the_whole_batches(tmp_path: Path):
    async def test() -> Any:
        async with cluster_world(tmp_path / "three") as made:
            return await finished(made.world, await create(made.world, data_parallel=3))

    events, learned = run(test)
    alone_events, alone = on_one_node(tmp_path / "one")
    assert learned.keys() == alone.keys() == {4, 8, NUM_STEPS}
    for step, parameters in alone.items():
        assert distance(learned[step], parameters) < 1e-5
    assert losses(events) == pytest.approx(losses(alone_events), abs=1e-5)
    assert [event.data["num_tokens"] for event in events if event.kind == "step"] == [
        event.data["num_tokens"] for event in alone_events if event.kind == "step"
    ]


class Versions:
    """Every version that an engine has published, on disk: the place of engine and label."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._num_engines = directory, 0

    def make(self) -> Engine:
        engine = small_engine()
        device, own, number = engine.device, engine.device.execute, self._num_engines
        self._num_engines += 1

        def execute(command: Any) -> Any:
            reply = own(command)
            if isinstance(command, PublishVersion):
                label = command.version.partition("#")[0].replace("/", "_")
                own(SaveAdapter(command.version, str(self._directory / label / str(number))))
            return reply

        device.execute = execute  # type: ignore[method-assign]
        return engine

    def found(self) -> dict[int, list[Any]]:
        """Return the adapters that engines served, by step."""
        return {
            int(label.name.rpartition("@")[2]): [
                adapter_in(each) for each in sorted(label.iterdir())
            ]
            for label in self._directory.iterdir()
        }


@pytest.mark.parametrize("strategy", long_but("synchronous", of=STRATEGIES))
def test_a_version_is_the_same_on_every_node_and_all_end_with_the_same(
    tmp_path: Path, strategy: str
):
    versions = Versions(tmp_path / "versions")

    async def test() -> Any:
        async with cluster_world(tmp_path / "home", make=versions.make) as made:
            job = await create(made.world, data_parallel=3, live=True, **STRATEGIES[strategy])
            return await finished(made.world, job)

    _, learned = run(test)
    found = versions.found()
    assert len(found[NUM_STEPS]) == 3
    assert len(found) > 2
    for copies in found.values():
        assert all(distance(copies[0], each) == 0.0 for each in copies)
    for step, parameters in learned.items():
        assert distance(found[step][0], parameters) < 1e-6
    if strategy != "asynchronous":
        assert all(len(copies) == 3 for copies in found.values())
    assert set(found) >= ({*range(1, 10)} if strategy == "synchronous" else {4, 8, 9})


@pytest.mark.parametrize("strategy", long_but("synchronous", of=STRATEGIES))
def test_a_node_that_dies_loses_nothing_and_no_example_is_used_twice(tmp_path: Path, strategy: str):
    async def test() -> Any:
        async with cluster_world(tmp_path / "home") as made:
            job = await create(made.world, epochs=12, data_parallel=3, **STRATEGIES[strategy])
            await made.until(lambda: made.world.job(job.id).num_steps_done >= 6)
            assert len(made.working(job.id)) == 3
            made.node(1).die()
            await made.until(lambda: made.working(job.id) == ["node-0", "node-2"])
            made.node(1).live()
            await made.until(
                lambda: len(made.working(job.id)) == 3 or made.world.job(job.id).is_terminal
            )
            return await finished(made.world, job)

    _, learned = run(test)
    if strategy == "synchronous":
        _, alone = on_one_node(tmp_path / "one", epochs=12)
        assert distance(learned[36], alone[36]) < 1e-4


def test_a_job_that_ends_while_its_first_node_is_asked_is_started_on_no_others(tmp_path: Path):
    """They would keep their parts, and refuse those of the job that is started anew."""

    async def test() -> None:
        async with cluster_world(tmp_path) as made:
            first = made.node(0)
            send = first.send
            answers = {kind: asyncio.Event() for kind in (StartJob, CancelJob)}

            async def send_late(session: str, batch: CommandBatch) -> None:
                for each in batch.commands:
                    if (answer := answers.get(type(decode_command(each)))) is not None:
                        await answer.wait()
                await send(session, batch)

            first.send = send_late  # type: ignore[method-assign]
            job = await create(made.world, data_parallel=3)
            await made.until(lambda: made.working(job.id) == ["node-0"])
            made.node(2).die()
            await made.until(lambda: made.num_ready() == 2)
            answers[StartJob].set()
            await made.until(lambda: first.of(StartJob))
            await asyncio.sleep(0.2)  # in which others would be asked
            answers[CancelJob].set()
            await finished(made.world, job)
            by_node = [
                [each.job.id for each in made.node(number).of(StartJob)] for number in (0, 1)
            ]
            assert len(by_node[0]) == 2 and len(by_node[1]) == 1, by_node

    run(test)


@pytest.mark.parametrize("strategy", long_but("synchronous", of=STRATEGIES))
def test_jobs_rest_move_and_end_with_all_their_nodes(tmp_path: Path, strategy: str):
    async def test() -> None:
        async with cluster_world(tmp_path) as made:
            job = await create(made.world, epochs=40, data_parallel=3, **STRATEGIES[strategy])
            manager, tenant = made.world.manager, job.tenant
            await made.until(lambda: made.world.job(job.id).num_steps_done >= 5)
            paused = await manager.pause(tenant, job.id)
            assert paused.status == "paused"
            await manager.resume(tenant, job.id)
            await made.until(lambda: made.world.job(job.id).num_steps_done > paused.num_steps_done)
            await made.link.drain("node-0")
            await made.until(lambda: made.working(job.id) == ["node-1", "node-2"])
            at = made.world.job(job.id).num_steps_done
            await made.until(lambda: made.world.job(job.id).num_steps_done > at + 4)
            steps = steps_of(made.world.events(job.id))
            assert steps == list(range(1, len(steps) + 1)) and len(steps) > at + 4, (
                "each step is there once"
            )
            await manager.cancel(tenant, job.id)
            assert made.working(job.id) == []
            other = await create(made.world, data_parallel=2)
            await finished(made.world, other)

    run(test)


def test_requests_are_answered_while_nodes_wait_for_one_another(tmp_path: Path):
    may_continue = threading.Event()
    num_made = 0

    def make() -> Engine:
        nonlocal num_made
        engine, num_made = small_engine(), num_made + 1
        own = engine.device.execute

        def execute(command: Any) -> Any:
            if isinstance(command, TakeContribution):
                may_continue.wait(60)
            return own(command)

        if num_made == 1:  # this one stands still where it should contribute
            engine.device.execute = execute  # type: ignore[method-assign]
        return engine

    async def answers(made: ClusterWorld, id: str) -> list[int]:
        stream = made.link.open([make_request(id)])
        return [
            token async for batch in stream.batches() for chunk in batch for token in chunk.tokens
        ]

    async def test() -> None:
        async with cluster_world(tmp_path, make=make) as made:
            job = await create(made.world, data_parallel=3)
            await made.until(lambda: len(made.working(job.id)) == 3)
            asked = [asyncio.create_task(answers(made, f"r{number}")) for number in range(3)]
            await made.until(lambda: sum(each.done() for each in asked) == 2)
            assert made.world.job(job.id).num_steps_done == 0
            may_continue.set()
            await asyncio.gather(*asked)
            await finished(made.world, job)

    try:
        run(test)
    finally:
        may_continue.set()


def test_a_file_that_a_node_cannot_read_fails_the_job_with_its_reason(tmp_path: Path):
    def make() -> Engine:
        engine = small_engine()
        own = engine.device.execute

        def execute(command: Any) -> Any:
            reply = own(command)
            if type(command).__name__ == "WriteCheckpoint" and "contributions" in command.directory:
                (Path(command.directory) / "contribution.safetensors").write_bytes(b"cut short")
            return reply

        engine.device.execute = execute  # type: ignore[method-assign]
        return engine

    async def test() -> None:
        async with cluster_world(tmp_path, 2, make=make) as made:
            job = await create(made.world, data_parallel=2)
            over = await made.world.until_over(job.id)
            assert over.status == "failed"
            assert over.error is not None
            assert "contribution.safetensors is damaged" in over.error["message"]
            await made.until(lambda: made.working(job.id) == [])

    run(test)


@pytest.mark.parametrize(
    ("extension", "wrong"),
    [
        ({"data_parallel": 0}, "coserve.data_parallel must be a whole number from 1"),
        ({"data_parallel": "3"}, "coserve.data_parallel must be a whole number from 1"),
        (
            {"data_parallel": 2, "synchronization": "sometimes"},
            "coserve.synchronization must be one of synchronous, local-sgd, asynchronous, not "
            "'sometimes'",
        ),
        (
            {"data_parallel": 2, "synchronize_every_steps": 4},
            "coserve.synchronize_every_steps goes with local-sgd or asynchronous",
        ),
        (
            {"data_parallel": 2, "synchronization": "local-sgd", "synchronize_every_steps": 0},
            "coserve.synchronize_every_steps must be a whole number from 1",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(
    tmp_path: Path, extension: dict[str, Any], wrong: str
):
    async def test() -> None:
        async with world(tmp_path, alive=False) as made:
            await create(made, **extension)

    with pytest.raises(JobError, match=wrong):
        run(test)
