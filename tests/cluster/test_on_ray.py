"""One server on a real Ray cluster of three nodes: it answers as one device does, and nothing is
lost when parts die.

COSERVE_CLUSTER_KILLS: number of kills, one kind after the other (default: one of each kind).
COSERVE_CLUSTER_PLACEMENT: placement of requests and jobs (default: round-robin).
"""

import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cluster.ray_world import KEY, NUM_FRONTS, OTHER_KEY, RayWorld, write_keys
from forked import failure

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'"
    ),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

NUM_KILLS = int(os.environ.get("COSERVE_CLUSTER_KILLS", "4"))
NUM_STREAMS, NUM_JOBS, NUM_STEPS = 32, 6, 40
PROMPTS = [
    "The quick brown",
    "Once upon a time",
    "One copy of the weights",
    "Hello, how are",
    "To be, or not to",
]


def alone(engine: Any, prompt: str, num_tokens: int, adapter: str | None = None) -> str:
    from coserve import SamplingParams

    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    text: str = engine.generate([prompt], params, adapter=adapter)[0].text
    return text


def ask(world: RayWorld, prompt: str, num_tokens: int, model: str = "tiny") -> str:
    body = {"ignore_eos": True}
    found = world.client.completions.create(
        model=model, prompt=prompt, max_tokens=num_tokens, temperature=0, extra_body=body
    )
    return found.choices[0].text


def train(
    world: RayWorld,
    number: int,
    num_steps: int,
    *,
    num_rows: int = 8,
    model: str = "tiny",
    **extension: Any,
) -> str:
    rows = [
        json.dumps({"prompt": f"{i} and {number} ", "completion": f"make {i + number}"})
        for i in range(num_rows)
    ]
    file = world.client.files.create(
        file=("train.jsonl", "\n".join(rows).encode()), purpose="fine-tune"
    )
    job = world.client.fine_tuning.jobs.create(
        model=model,
        training_file=file.id,
        seed=number,
        hyperparameters={"n_epochs": num_steps * 4 // num_rows, "batch_size": 4},
        extra_body={"coserve": {"checkpoint_every_steps": 10} | extension},
    )
    return job.id


def job_of(world: RayWorld, id: str) -> Any:
    """Return a job; None while there is no front."""
    try:
        return world.client.fine_tuning.jobs.retrieve(id)
    except (openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
        return None


def finished(world: RayWorld, id: str) -> Any:
    job = world.until(lambda: (found := job_of(world, id)) and found.finished_at and found)
    assert job.status == "succeeded", job.error
    return job


def steps_of(world: RayWorld, id: str) -> list[int]:
    events = world.client.fine_tuning.jobs.list_events(id, limit=100)
    metrics: list[Any] = [event.data for event in events if event.type == "metrics"]
    return sorted(data["step"] for data in metrics if "train_loss" in data)


def test_the_openai_client_finds_one_server(world: RayWorld):
    client = world.client
    assert [each.id for each in client.models.list()] == ["tiny"]
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, n=2, seed=1
    )
    assert len(chat.choices) == 2
    assert chat.usage.completion_tokens > 0
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    assert [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="nobody", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt=[1] * 10_000, max_tokens=1)
    with client.completions.create(
        model="tiny", prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    world.until(lambda: not any(node["requests"] for node in world.status()["nodes"]))


def test_the_front_has_tls_and_keys(world: RayWorld):
    stranger = world.client_of(OTHER_KEY)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(httpx.TransportError):
        httpx.get(world.url.replace("https", "http") + "/models")
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(world.url + "/models")
    path = Path(str(world.config.api_keys_file))
    write_keys(path, OTHER_KEY)
    world.ray_commands.reload_keys()
    assert [each.id for each in stranger.models.list()] == ["tiny"]
    with pytest.raises(openai.AuthenticationError):
        world.client.models.list()
    write_keys(path, KEY)
    world.ray_commands.reload_keys()
    assert [each.id for each in world.client.models.list()] == ["tiny"]


# A machine that has no other one of Ray's in it asks the cluster by its own, which has joined by
# then.
BY_ITSELF = (
    "import time; from coserve.cluster.ray import commands as ray_commands; "
    "connect = ray_commands.connect; "
    "ray_commands.connect = lambda address: (time.sleep(15), connect(address))"
)


def test_a_machine_that_is_refused_has_joined_nothing(world: RayWorld, tmp_path: Path):
    from coserve.cluster.ray.machine import Served, announce_served

    before, address = world.members(), world.cluster.address
    for own in (["dummy:qwen2.5-0.5b"], ["tiny", "--dtype", "bfloat16"], ["--placement", "lemix"]):
        said = failure(tmp_path, "cluster", "up", *own, "--address", address, before=BY_ITSELF)
        assert f"the cluster at {address} already serves tiny: to join it, use no options" in said
    announce_served(Served(model="tiny", version="0.0.1"))
    assert "runs coserve 0.0.1, and this machine has " in failure(
        tmp_path, "cluster", "up", "--address", address, before=BY_ITSELF
    )
    announce_served(Served(model="tiny"))
    assert world.members() == before


def test_a_node_that_ray_has_given_up_is_made_again(world: RayWorld):
    world.until(lambda: world.num_ready() == 3)
    lives = world.lives()
    world.end_actor(1)
    world.until(partial(world.has_recovered, lives))


@pytest.fixture(scope="module")
def made(world: RayWorld, engine: Any) -> Any:
    """Return a job that has succeeded; `engine` has its adapter, too."""
    job = finished(world, train(world, 3, 20))
    engine.load_adapter(job.fine_tuned_model, str(directory_of(world, job.id, 20)))
    return job


def directory_of(world: RayWorld, job: str, step: int) -> Path:
    return world.config.directory / "jobs" / job / "checkpoints" / f"step-{step}"


def test_every_node_answers_as_a_single_engine_for_every_adapter_version(
    world: RayWorld, engine: Any, made: Any
):
    for prompt in PROMPTS:
        assert {ask(world, prompt, 12) for _ in range(3)} == {alone(engine, prompt, 12)}
    job, name = made, made.fine_tuned_model
    checkpoints = list(world.client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [each.step_number for each in checkpoints] == [20, 10]
    for each in checkpoints:
        engine.load_adapter(
            each.fine_tuned_model_checkpoint, str(directory_of(world, job.id, each.step_number))
        )
    for version in (name, *(each.fine_tuned_model_checkpoint for each in checkpoints)):
        for prompt in PROMPTS[:2]:
            assert {ask(world, prompt, 12, version) for _ in range(3)} == {
                alone(engine, prompt, 12, version)
            }


@pytest.mark.parametrize("synchronization", ["synchronous", "local-sgd", "asynchronous"])
def test_three_nodes_learn_one_job_and_serve_it(world: RayWorld, engine: Any, synchronization: str):
    world.until(lambda: world.num_ready() == 3)
    id = train(world, 5, 60, data_parallel=3, live=True, synchronization=synchronization)
    world.until(
        lambda: (
            sum(id in node["jobs"] for node in world.status()["nodes"]) == 3
            or job_of(world, id).finished_at
        )
    )
    job = finished(world, id)
    assert steps_of(world, id) == list(range(1, 61))
    engine.load_adapter(job.fine_tuned_model, str(directory_of(world, id, 60)))
    for prompt in PROMPTS[:2]:
        expected = alone(engine, prompt, 12, job.fine_tuned_model)
        assert {ask(world, prompt, 12, job.fine_tuned_model) for _ in range(3)} == {expected}
    with pytest.raises(openai.BadRequestError, match="this server has 3 nodes that are ready"):
        train(world, 5, 60, data_parallel=4)
    with pytest.raises(
        openai.BadRequestError, match="all nodes serve: ask for all 3 that are ready"
    ):
        train(world, 5, 60, data_parallel=2, adapter={"type": "full"}, live=True)


# What a client may be told while nodes and the front die; anything else is a mistake.
CLEAR_ERRORS = re.compile(
    r"APIConnectionError: Connection error\."  # the front's machine, or process, is gone
    r"|InternalServerError: .*no node is ready; try again in a few seconds"
    r"|InternalServerError: .*This front stands by for another: try again in a few seconds"
    r"|InternalServerError: .*The front that had this request was lost: ask again in a few seconds"
    r"|(InternalServerError|APIError): .*the node node-\d+ was lost after \d+ tokens of this "
    r"answer; ask again"
    r"|(InternalServerError|APIError): .*3 nodes were lost, one after the other, before this "
    r"request had a token"
    r"|(RemoteProtocolError|APIError): (peer closed connection|.*incomplete chunked read)"
)


class Streams:
    """Clients that read one answer after the other, and compare each with a single engine's."""

    def __init__(
        self, world: RayWorld, expected: dict[tuple[str, str], str], num_tokens: int
    ) -> None:
        """Start the clients. expected: answers by model and prompt."""
        self._world, self._expected, self._num_tokens = world, expected, num_tokens
        self._ended = threading.Event()
        self.num_whole, self.errors, self.wrong = 0, list[str](), list[str]()

    def run(self, seed: int) -> None:
        chosen = random.Random(seed)
        client = self._world.client_of(KEY)
        while not self._ended.is_set():
            (model, prompt), text = chosen.choice(list(self._expected)), ""
            expected = self._expected[model, prompt]
            try:
                stream = client.completions.create(
                    model=model,
                    prompt=prompt,
                    max_tokens=self._num_tokens,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for chunk in stream:
                    text += chunk.choices[0].text if chunk.choices else ""
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                if not expected.startswith(text):
                    self.wrong.append(text)
                time.sleep(0.2)
            else:
                self.num_whole += text == expected
                self.wrong += [text] if text != expected else []

    def unclear(self) -> list[str]:
        """Return the errors that no client should see."""
        return sorted({each for each in self.errors if not CLEAR_ERRORS.match(each)})

    def has_more_than(self, number: int) -> bool:
        return self.num_whole > number

    def end(self) -> None:
        self._ended.set()


def test_nothing_is_lost_when_engines_actors_machines_and_the_front_are_killed(
    world: RayWorld, engine: Any, made: Any
):
    world.until(lambda: world.num_ready() == 3)
    name = made.fine_tuned_model
    expected = {("tiny", prompt): alone(engine, prompt, 48) for prompt in PROMPTS}
    expected |= {(name, prompt): alone(engine, prompt, 48, name) for prompt in PROMPTS[:2]}
    streams = Streams(world, expected, 48)
    jobs = [train(world, number, NUM_STEPS) for number in range(NUM_JOBS - 1)]
    jobs.append(train(world, NUM_JOBS - 1, NUM_STEPS, data_parallel=3))
    kills = [world.kill_engine, world.kill_actor, world.kill_machine, world.drain_and_kill_front]
    took: dict[str, list[float]] = {}
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        reading = [threads.submit(streams.run, number) for number in range(NUM_STREAMS)]
        try:
            for number in range(NUM_KILLS):
                world.until(partial(streams.has_more_than, streams.num_whole))
                if all((found := job_of(world, id)) and found.finished_at for id in jobs):
                    jobs.append(
                        train(world, len(jobs), NUM_STEPS)
                    )  # there is always one to be lost
                kill, lives, start_s = kills[number % len(kills)], world.lives(), time.monotonic()
                kill(number)
                world.until(partial(world.has_recovered, lives))
                took.setdefault(kill.__name__, []).append(time.monotonic() - start_s)
                print(f"{kill.__name__}: {took[kill.__name__][-1]:.1f} s", flush=True)
            world.until(partial(streams.has_more_than, streams.num_whole + NUM_STREAMS))
        finally:
            streams.end()
        for each in reading:
            each.result()
    done = [finished(world, id) for id in jobs]
    assert streams.wrong == []
    assert streams.unclear() == []
    assert streams.num_whole > NUM_STREAMS
    for job in done:
        assert steps_of(world, job.id) == list(range(1, NUM_STEPS + 1)), job.id
    print(
        f"\n{NUM_KILLS} kills: {streams.num_whole} whole answers, {len(streams.errors)} errors; "
        f"seconds until all live:"
    )
    for name, seconds in took.items():
        print(f"  {name}: {', '.join(f'{each:.1f}' for each in seconds)}")
    for text, number in Counter(re.sub(r"\d+", "N", each) for each in streams.errors).items():
        print(f"  {number} times {text[:200]}")


def test_a_front_that_stands_by_takes_over_and_no_request_is_left_without_an_answer_or_an_error(
    world: RayWorld, engine: Any
):
    expected = {prompt: alone(engine, prompt, 48) for prompt in PROMPTS}
    streams = Streams(world, {("tiny", prompt): text for prompt, text in expected.items()}, 48)
    took: dict[str, list[float]] = {}
    world.until(lambda: world.num_ready() == 3)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        reading = [threads.submit(streams.run, number) for number in range(8)]
        try:
            for number in range(max(1, NUM_KILLS // 4)):
                world.until(lambda: world.num_fronts() == len(world.fronts()) == NUM_FRONTS)
                job = train(world, 100 + number, NUM_STEPS)
                world.until(partial(has_made, world, job, 10))
                world.until(partial(streams.has_more_than, streams.num_whole))
                for name, seconds in kill_the_front_that_answers(
                    world, threads, expected, job
                ).items():
                    took.setdefault(name, []).append(seconds)
                finished(world, job)
                assert steps_of(world, job) == list(range(1, NUM_STEPS + 1))
        finally:
            streams.end()
        for each in reading:
            each.result(timeout=120)
    assert streams.wrong == []
    assert streams.unclear() == []
    print(
        f"\n{streams.num_whole} whole answers, {len(streams.errors)} errors; seconds from the kill "
        f"of the front until"
    )
    for name, times in took.items():
        print(f"  {name}: {', '.join(f'{each:.1f}' for each in times)}")


def kill_the_front_that_answers(
    world: RayWorld, threads: ThreadPoolExecutor, expected: dict[str, str], job: str
) -> dict[str, float]:
    """Kill the front while requests are open and another one arrives; each ends. Returns the
    seconds until each kind of recovery.
    """
    took: dict[str, float] = {}
    answered, before = world.status()["pid"], world.fronts()
    asked = [
        threads.submit(whole_or_error, world, prompt, text) for prompt, text in expected.items()
    ]
    time.sleep(0.1)
    start_s = time.monotonic()

    def since(name: str, question: Callable[[], Any]) -> Any:
        found = world.until(question)
        took[name] = time.monotonic() - start_s
        return found

    world.kill_front(0)
    prompt = PROMPTS[0]
    late = threads.submit(whole_or_error, world, prompt, expected[prompt])
    answers = since(
        "another front answers", lambda: (pid := world.front_that_answers()) != answered and pid
    )
    assert answers in before - {answered}, "it stood by"
    since(
        "it has given a whole answer",
        lambda: whole_or_error(world, prompt, expected[prompt]) == "whole",
    )
    since("all nodes are ready", lambda: world.num_ready() == 3)
    since("the job has made a step more", partial(has_made, world, job, 11))
    ends = [each.result(timeout=120) for each in asked]
    print(
        f"of {len(ends)} requests that were open {ends.count('whole')} ended whole; others: "
        f"{set(ends) - {'whole'}}"
    )
    assert "wrong" not in ends
    print(f"one that came then: {late.result(timeout=120)}")
    assert late.result() == "whole" or "no node is ready" in late.result()
    return took


def has_made(world: RayWorld, job: str, step: int) -> bool:
    """Return whether a job has made as many steps."""
    with suppress(openai.APIError):
        return max(steps_of(world, job), default=0) >= step
    return False


def whole_or_error(
    world: RayWorld, prompt: str, expected: str, num_tokens: int = 48, model: str = "tiny"
) -> str:
    """Return how a request ends: "whole", "wrong", or the text of its error."""
    try:
        return "whole" if ask(world, prompt, num_tokens, model) == expected else "wrong"
    except openai.APIError as error:
        return f"{type(error).__name__}: {error}"[:160]
