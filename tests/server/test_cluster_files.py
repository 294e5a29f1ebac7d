"""Nodes that share no disk with the front, nor with one another: real engines, and a URL of a real
FTP server."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import make_request
from engine_nodes import ClusterWorld, cluster_world
from ftp import FtpServer, ftp_server
from job_data import DATA, adapter_in, distance, steps_of
from job_engine import LIMIT_S
from served import serving

from coserve.cluster.nodes.paths import NodePaths
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import AdapterRef, AddRequest, CombineJob, LoadAdapter
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.protocol.messages import Ping, StepReport
from coserve.tuning.shard import Combination

needs_ftp = pytest.mark.skipif(
    find_spec("pyftpdlib") is None, reason="needs an FTP server: pip install pyftpdlib"
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FtpServer]:
    with ftp_server(tmp_path / "ftp") as found:
        yield found


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(test(), LIMIT_S)

    return asyncio.run(limited())


async def create(made: ClusterWorld, epochs: int, **extension: Any) -> Any:
    return await made.world.create(
        DATA,
        hyperparameters={"n_epochs": epochs, "batch_size": 3},
        extension={"optimizer": {"learning_rate": 1e-2}, "checkpoint_every_steps": 2} | extension,
    )


async def finished(made: ClusterWorld, id: str) -> list[Any]:
    """Return a job's events when it has succeeded."""
    job = await made.world.until_over(id)
    assert (job.status, job.error) == ("succeeded", None)
    assert steps_of(made.world.events(id)) == list(range(1, job.num_steps + 1)), (
        "each step is there once"
    )
    return made.world.events(id)


async def answer(made: ClusterWorld, adapter: AdapterRef | None) -> list[int]:
    request = make_request(
        "r", adapter=adapter, params=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    )
    stream = made.link.open([request])
    return [token async for batch in stream.batches() for chunk in batch for token in chunk.tokens]


def checkpoints(home: Path, job: str) -> set[str]:
    return {path.name for path in (home / "jobs" / job).glob("checkpoints/*")}


def test_paths_of_the_front_are_those_of_a_node_and_back():
    paths = NodePaths(Path("/front"), Path("/node"))
    adapter = AdapterRef(name="a", directory="/front/jobs/j/checkpoints/step-1")
    here = AdapterRef(name="a", directory="/node/jobs/j/checkpoints/step-1")
    assert paths.here(LoadAdapter(1, adapter)) == LoadAdapter(1, here)
    elsewhere = LoadAdapter(1, AdapterRef(name="b", directory="/models/b"))
    assert paths.here(elsewhere) == elsewhere
    request: AddRequest = make_request("r", adapter=adapter)
    assert paths.here(request).adapter == here
    assert paths.here(make_request("r")) == make_request("r")
    combination = Combination(directories=("/front/jobs/j/contributions/x/1-0",), num_trained=1)
    assert paths.here(CombineJob(1, "j", combination)).combination.directories == (
        "/node/jobs/j/contributions/x/1-0",
    )
    done = Checkpointed(job="j", step=1, directory="/node/jobs/j/checkpoints/step-1", listed=True)
    given = Contributed(
        job="j", step=1, directory="/node/jobs/j/contributions/x/1-0", meets=True, num_trained=1
    )
    told = paths.there(StepReport(checkpoints=[done], contributions=[given]))
    assert told.checkpoints[0].directory == adapter.directory
    assert told.contributions[0].directory == combination.directories[0]
    assert paths.here(Ping()) == Ping()


@needs_ftp
def test_a_job_resumes_on_a_node_that_shares_no_disk_and_every_node_serves_what_it_made(
    tmp_path: Path, server: FtpServer
):
    front, homes = tmp_path / "front", [tmp_path / f"of-node-{number}" for number in range(2)]

    async def test() -> None:
        async with cluster_world(front, 2, url=server.url) as made:
            job = await create(made, 20)
            await made.until(lambda: len(made.world.checkpoints(job.id)) >= 2)
            (first,) = made.working(job.id)
            number = int(first.removeprefix("node-"))
            made.node(number).die()
            await made.until(lambda: made.working(job.id) == [f"node-{1 - number}"])
            events = await finished(made, job.id)
            assert any("Fine-tuning resumes from step" in event.message for event in events)
            ends = made.world.checkpoints(job.id)
            names = {Path(each.directory).name for each in ends}
            assert checkpoints(front, job.id) == set(), (
                "the front needs none of them on its own disk"
            )
            assert checkpoints(homes[0], job.id) and checkpoints(homes[1], job.id)
            # What is not on record is removed, and what only the job needed.
            await made.until(
                lambda: checkpoints(server.directory / "kept" / "here", job.id) == names
            )
            adapters = {".complete", "adapter_config.json", "adapter_model.safetensors"}
            await made.until(
                lambda: (
                    {name.rpartition("/")[2] for name in server.files() if "/checkpoints/" in name}
                    == adapters
                )
            )
            adapter = AdapterRef(name=made.world.job(job.id).name, directory=ends[-1].directory)
            without, with_it = await answer(made, None), await answer(made, adapter)
            assert with_it != without
            made.node(number).live()
            await made.until(lambda: made.num_ready() == 2)
            made.node(1 - number).die()
            await made.until(lambda: made.num_ready() == 1)
            assert await answer(made, adapter) == with_it
            assert Path(adapter.directory).name in checkpoints(homes[number], job.id)

    run(test)


@needs_ftp
def test_nodes_without_a_common_disk_learn_together_what_one_learns(
    tmp_path: Path, server: FtpServer
):
    async def learned(home: Path, url: str | None, **extension: Any) -> dict[int, Any]:
        async with cluster_world(home, 2, url=url) as made:
            job = await create(made, 3, adapter={"r": 3, "alpha": 6, "dropout": 0}, **extension)
            await finished(made, job.id)
            shared = made.world.files.shared
            for each in made.world.checkpoints(job.id):
                shared.fetch(Path(each.directory))
            folder = home / "jobs" / job.id / "contributions"
            await made.until(
                lambda: (
                    not any("contributions" in name for name in server.files())
                    and not folder.exists()
                )
            )
            return {
                each.step: adapter_in(each.directory) for each in made.world.checkpoints(job.id)
            }

    together = run(lambda: learned(tmp_path / "front", server.url, data_parallel=2))
    alone = run(lambda: learned(tmp_path / "alone", None))
    assert together.keys() == alone.keys()
    assert all(distance(parameters, alone[step]) < 1e-5 for step, parameters in together.items())
    assert not any(path.is_file() for path in tmp_path.glob("of-node-*/jobs/*/contributions/**/*"))


@needs_ftp
def test_a_front_on_another_machine_finds_what_was_uploaded(tmp_path: Path, server: FtpServer):
    async def test() -> None:
        async with cluster_world(tmp_path / "front", 2, url=server.url) as made:
            file = made.world.upload(DATA)
            shutil.rmtree(tmp_path / "front" / "files")
            job = await made.world.create_from(file, hyperparameters={"n_epochs": 1}, extension={})
            await finished(made, job.id)
            (tmp_path / "front" / "files").mkdir(exist_ok=True)
            results = made.world.files.find(job.tenant, made.world.job(job.id).result_file)
            assert results is not None
            shutil.rmtree(tmp_path / "front" / "files")
            assert made.world.files.path(results).read_bytes().startswith(b"step,train_loss")
            assert made.world.files.delete(job.tenant, file)
            assert [name for name in server.files() if name.startswith("files/")] == [
                f"files/{results.id}"
            ]

    run(test)


@needs_ftp
def test_a_server_that_goes_away_for_good_fails_the_job_with_its_reason(
    tmp_path: Path, server: FtpServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("coserve.jobs.files.remote_files._WAITS_S", (0.01, 0.01))

    async def test() -> None:
        async with cluster_world(tmp_path / "front", 2, url=server.url) as made:
            job = await create(made, 20)
            await made.until(lambda: made.world.checkpoints(job.id))
            server.stop()
            over = await made.world.until_over(job.id)
            assert over.status == "failed" and over.error is not None
            assert "ftp://ann:***@" in over.error["message"]

    run(test)


@needs_ftp
def test_a_server_of_one_device_keeps_a_copy_of_all_at_the_url(server: FtpServer):
    with serving("--files-url", server.url) as served:
        client = served.client()
        file = client.files.create(file=("train.jsonl", DATA), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(
            model="small", training_file=file.id, hyperparameters={"n_epochs": 1}
        )
        served.wait_until(
            lambda: client.fine_tuning.jobs.retrieve(job.id).finished_at, limit_s=LIMIT_S
        )
        done = client.fine_tuning.jobs.retrieve(job.id)
        assert done.status == "succeeded" and done.fine_tuned_model is not None
        assert client.completions.create(
            model=done.fine_tuned_model, prompt="a", max_tokens=2
        ).usage
        names = server.files()
        assert {f"files/{file.id}", f"files/{done.result_files[0]}"} < {*names}
        assert any(
            name.startswith(f"jobs/{job.id}/checkpoints/") and name.endswith(".complete")
            for name in names
        )
        client.models.delete(done.fine_tuned_model)
        assert not any(name.startswith(f"jobs/{job.id}/") for name in server.files())
