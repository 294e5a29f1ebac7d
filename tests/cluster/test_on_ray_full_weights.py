"""Full fine-tuning over the nodes of the cluster of `test_on_ray.py`, after that file's tests,
since it changes what the nodes serve; and the commands that end the front and the nodes.
"""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cluster.ray_world import RayWorld, children
from cluster.test_on_ray import (
    PROMPTS,
    alone,
    ask,
    finished,
    has_made,
    steps_of,
    train,
    whole_or_error,
)
from forked import ForkedCommand

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'"
    ),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

NUM_FULL_STEPS = 20


@pytest.fixture(scope="module")
def full_model(world: RayWorld) -> tuple[str, str]:
    """Return the name and the directory of what full fine-tuning over all nodes has made; they
    serve it.
    """
    client = world.client
    world.until(lambda: world.num_ready() == 3)
    for job in client.fine_tuning.jobs.list(
        limit=100
    ):  # the weights that these were trained on are about to change
        if job.fine_tuned_model is not None:
            client.models.delete(job.fine_tuned_model)
    settings: dict[str, Any] = {
        "adapter": {"type": "full"},
        "live": True,
        "optimizer": {"learning_rate": 1e-3},
    }
    id = train(world, 9, NUM_FULL_STEPS, data_parallel=3, **settings)
    made = finished(world, id)
    assert steps_of(world, id) == list(range(1, NUM_FULL_STEPS + 1))
    directory = world.config.directory / "jobs" / id / "checkpoints" / f"step-{NUM_FULL_STEPS}"
    return made.fine_tuned_model, str(directory)


@pytest.fixture(scope="module")
def full_answers(full_model: tuple[str, str], engine: Any) -> dict[str, str]:
    """Return the answers of one engine that was started with these files."""
    from coserve import Engine
    from coserve.engine.config import EngineConfig

    made = Engine.load(
        full_model[1], EngineConfig(memory_bytes=16_000_000), dtype="float32", device="cpu"
    )
    answers = {prompt: alone(made, prompt, 12) for prompt in PROMPTS}
    assert answers != {prompt: alone(engine, prompt, 12) for prompt in PROMPTS}, (
        "it has learned something"
    )
    return answers


def assert_every_node_says(world: RayWorld, answers: dict[str, str], *models: str) -> None:
    assert world.num_ready() == 3
    for prompt, answer in answers.items():
        assert {ask(world, prompt, 12, model) for model in models for _ in range(3)} == {answer}


def test_three_nodes_serve_what_full_fine_tuning_has_made_also_when_engines_restart(
    world: RayWorld, full_model: tuple[str, str], full_answers: dict[str, str]
):
    assert_every_node_says(world, full_answers, "tiny", full_model[0])
    lives = world.lives()
    world.kill_engine(1)
    world.until(partial(world.has_recovered, lives))
    assert_every_node_says(world, full_answers, "tiny", full_model[0])


def test_a_cluster_that_cannot_be_used_says_why(world: RayWorld, tmp_path: Path):
    from coserve.cluster.ray.front import check_http, deploy
    from coserve.cluster.ray.machine import check_address
    from coserve.errors import ClusterError

    with pytest.raises(ClusterError, match="there is no Ray cluster at"):
        check_address("127.0.0.1:1")
    with pytest.raises(ClusterError, match="--address must be HOST:PORT"):
        check_address("nowhere")
    assert set(world.ray_commands.served_models()) == {"tiny"}
    with pytest.raises(
        ClusterError, match=f"its port is {world.config.port}, not 1: ask for the same"
    ):
        check_http(replace(world.config, port=1))
    check_http(world.config)
    # It takes the front's place, and leaves none.
    config = replace(
        world.config, home=str(tmp_path), database=f"sqlite:///{tmp_path}/nowhere/jobs.db"
    )
    with pytest.raises(
        ClusterError,
        match=r"the front cannot start: the database .*/nowhere/jobs.db cannot be opened",
    ):
        deploy(config, "round-robin", resources={"coserve_head": 0.01})
    with pytest.raises(
        ClusterError, match="the cluster has no front: start one with coserve cluster up"
    ):
        world.status()


@contextmanager
def command(stderr: Path, *arguments: str) -> Iterator[ForkedCommand]:
    """Run `coserve cluster up`, which ends in good order."""
    up = ForkedCommand("cluster", "up", *arguments, environment=os.environ, stderr=stderr)
    with ended_in_good_order(up, stderr):
        yield up
    up.stdout.close()


@contextmanager
def ended_in_good_order(up: ForkedCommand, stderr: Path) -> Iterator[None]:
    try:
        yield
    finally:
        up.send_signal(signal.SIGTERM)
        assert up.wait(120) == 0, stderr.read_text()
        assert "SIGTERM received" not in stderr.read_text(), (
            "as Ray's handler would print, and end it"
        )


@contextmanager
def one_of_two(
    world: RayWorld, directory: Path, address: str, *arguments: str
) -> Iterator[ForkedCommand]:
    """Run two commands that would serve at once, and yield the one that does; the other has
    reported why it does not, and changed nothing.
    """
    machines, errors = len(world.members_of_ray()), [directory / "first", directory / "rival"]
    both = [
        ForkedCommand("cluster", "up", *arguments, environment=os.environ, stderr=each)
        for each in errors
    ]
    try:
        world.until(lambda: any(each.poll() is not None for each in both))
        (refused,) = [number for number, each in enumerate(both) if each.poll() is not None]
        up, other = both[1 - refused], both[refused]
        assert other.returncode == 1
        (line,) = errors[refused].read_text().splitlines()
        assert re.search(
            rf"the cluster at {address} already serves /.+: to join it",
            line,
        )
        waits = f"another coserve cluster up is starting or ending at {address}: waiting for it\n"
        assert other.stdout.read() in ("", waits)
        assert len(world.members_of_ray()) == machines
        with ended_in_good_order(up, errors[1 - refused]):
            yield up
    finally:
        for each in both:
            each.kill()
            each.stdout.close()


def assert_ctrl_c_is_not_rays(pid: int) -> None:
    """Check that Ray's processes are in another group than the command: a terminal's Ctrl-C goes to
    the whole group, and Ray would be gone before anything leaves it.
    """
    ray = [
        each
        for each in children(pid)
        if b"ray.scripts" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]
    assert ray and os.getpgid(pid) not in {os.getpgid(each) for each in ray}


def test_the_command_serves_by_its_name_what_full_fine_tuning_has_made(
    world: RayWorld, full_model: tuple[str, str], full_answers: dict[str, str], tmp_path: Path
):
    """The last of all: it ends the nodes of the others. Another machine joins by the command, too,
    before anything is served, and leaves again.
    """
    from ray import serve

    class Other:  # which goes to Ray by value, since its workers do not have tests' modules
        def __call__(self) -> str:
            return "here"

    serve.run(
        serve.deployment(Other).options(ray_actor_options={"num_cpus": 0}).bind(),
        name="other",
        route_prefix="/o",
    )
    world.ray_commands.undeploy()
    assert list(serve.status().applications) == ["other"], "it is not coserve's to end"
    name, config, address = full_model[0], world.config, world.cluster.address
    where = {
        "address": address,
        "nodes": 0,
        "home": config.home,
        "port": config.port,
        "drain": "60s",
    }
    tls = {"ssl-certfile": config.ssl_certfile, "ssl-keyfile": config.ssl_keyfile}
    tls["api-keys-file"] = config.api_keys_file
    options = (
        where
        | tls
        | {
            "device": "cpu",
            "dtype": "float32",
            "memory": "16MB",
            "slo-ttft": "5s",
            "slo-tpot": "1s",
        }
    )
    given = [f"--{option}={value}" for option, value in options.items()]
    with command(tmp_path / "second", "--address", address) as other:
        assert other.stdout.readline().startswith(f"nothing is served at {address} yet")
        with one_of_two(world, tmp_path, address, name, *given) as up:
            assert "coserve serves " in up.stdout.readline()
            assert re.fullmatch(r"[34] nodes are ready\n", up.stdout.readline())
            assert other.stdout.readline() == f"1 device joins {address}\n"
            assert other.stdout.readline() == "4 nodes are ready\n"
            assert_ctrl_c_is_not_rays(other.pid)
            assert [each.id for each in world.client.models.list()] == [name]
            with ThreadPoolExecutor(32) as threads:
                asked = [
                    threads.submit(ask, world, f"{n} {PROMPTS[n % 5]}", 200, name)
                    for n in range(64)
                ]
                with suppress(AssertionError):  # it is the placement's to decide
                    world.until(
                        lambda: all(each["requests"] for each in world.status()["nodes"]),
                        limit_s=10,
                    )
                other.send_signal(signal.SIGTERM)
                for each in asked:  # each comes to its end, which may be an empty text
                    each.result()
            assert other.wait(60) == 0
            assert (
                other.stdout.readline()
                == "this machine leaves the cluster: its jobs continue on other nodes\n"
            )
            world.until(lambda: world.num_ready() == 3)
            assert_every_node_says(world, full_answers, name)
            job = train(world, 1, 10_000, num_rows=800, model=name, checkpoint_every_steps=9_999)
            world.until(partial(has_made, world, job, 2))
            with ThreadPoolExecutor(100) as threads:
                for number in range(200):  # more than there is time for
                    threads.submit(whole_or_error, world, f"{number} {PROMPTS[0]}", "", 400, name)
                world.until(lambda: any(each["requests"] for each in world.status()["nodes"]))
                up.send_signal(signal.SIGTERM)
                world.until(
                    lambda: (
                        "The server is shutting down"
                        in whole_or_error(world, PROMPTS[0], "", 400, name)
                    )
                )
                up.send_signal(signal.SIGTERM)  # requests are not waited for any more
                assert up.wait(120) == 0
            assert [*(config.directory / "jobs" / job / "checkpoints").glob("step-*")], (
                "what it had learned is kept"
            )
    from coserve.errors import ClusterError

    with pytest.raises(ClusterError, match="the cluster has no front"):
        world.status()
    assert list(serve.status().applications) == ["other"]
