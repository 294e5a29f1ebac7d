"""A real Ray cluster whose machines share no disk: files and checkpoints come by the URL of a real
FTP server."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from cluster.ray_world import ray_world
from cluster.test_on_ray import PROMPTS, alone, ask, finished, job_of, steps_of, train
from ftp import ftp_server

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'"
    ),
    pytest.mark.skipif(
        find_spec("pyftpdlib") is None, reason="needs an FTP server: pip install pyftpdlib"
    ),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def test_a_job_resumes_on_another_machine_by_the_url_and_two_serve_what_it_made(
    tmp_path: Path, head, engine
):
    home, homes = tmp_path / "home", tmp_path / "homes"
    home.mkdir()
    with (
        ftp_server(tmp_path / "ftp") as server,
        ray_world(head, home, 3, homes=homes, num_fronts=1, files_url=server.url) as world,
    ):
        job = train(world, 1, 200, num_rows=40)
        world.until(
            lambda: job_of(world, job) and list(world.client.fine_tuning.jobs.checkpoints.list(job))
        )
        world.remove_machine_of(job)
        done = finished(world, job)
        assert steps_of(world, job) == list(range(1, 201))
        world.until(lambda: world.num_ready() == 2)
        assert not (home / "jobs" / job / "checkpoints").exists(), (
            "the front needs none of them on its own disk"
        )
        (directory,) = (server.directory / "kept" / "here" / "jobs" / job / "checkpoints").glob(
            "step-200-*"
        )
        engine.load_adapter(done.fine_tuned_model, str(directory))
        for prompt in PROMPTS[:2]:
            expected = alone(engine, prompt, 12, done.fine_tuned_model)
            assert {ask(world, prompt, 12, done.fine_tuned_model) for _ in range(4)} == {expected}
        served = {
            path.relative_to(homes).parts[0]
            for path in homes.glob(f"*/nodes/*/jobs/{job}/checkpoints/{directory.name}")
        }
        assert len(served) >= 2, "each has it in a home of its own"
