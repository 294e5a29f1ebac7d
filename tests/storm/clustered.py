"""A storm on a cluster: real engines in threads of this process, which join, leave and die, and
whose disks are full at times, while jobs begin, rest, move and are cancelled, and clients ask; then
calm, in which everything comes to its end and is looked at.

What is done, one after the other, follows from the seed alone. To whom, and how slow nodes are,
also depends on when threads and tasks take their turns, so that a seed gives a similar storm each
time and not the same.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from cluster_nodes import make_request
from divided import EXTENSION, STRATEGIES
from engine_nodes import ClusterWorld, cluster_world, small_engine
from engines import greedy, prompts_of
from job_data import DATA, adapter_in, distance, steps_of
from job_engine import TENANT, world

from coserve.engine.commands import AdapterRef
from coserve.errors import AdapterError, CoserveError, EngineGoneError
from coserve.jobs.records import JobRecord

NUM_NODES, NUM_TOKENS, MOST_JOBS, NUM_ACTIONS = 3, 8, 4, 300
PROMPTS = prompts_of([3, 9, 17])
# Float32: nodes cut a job's windows elsewhere. A step that is lost or made twice moves parameters
# by 1e-3.
TOLERANCE = 1e-4
LOST = re.compile(
    r"the node node-\d was lost after \d+ tokens of this answer; ask again"
    r"|the job that trains \S+ is restarting, or is over; ask again"
    r"|\d+ nodes were lost, one after the other, before this request had a token"
)
# How often each is done, beside the others.
WEIGHTS = {
    "create": 4.0,
    "pause": 1.5,
    "resume": 4.0,
    "cancel": 0.4,
    "drain": 0.7,
    "die": 1.0,
    "come_back": 2.0,
    "fill_disk": 0.7,
    "empty_disk": 1.0,
    "ask": 10.0,
    "pass_by": 12.0,
}
# Of jobs: how many examples a step has, for how many epochs, and on how many nodes.
KINDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "short": (3, 3, {}),
    "long": (1, 12, {}),
    "rarely kept": (2, 8, {"checkpoint_every_steps": 50}),
    "on two nodes": (3, 4, {"data_parallel": 2}),
    "on three nodes": (3, 6, {"data_parallel": 3}),
    "live": (1, 8, {"live": True, "checkpoint_every_steps": 5}),
    "local": (3, 6, {"data_parallel": 2} | STRATEGIES["local-sgd"]),
}
# Which nodes had a part in what they learned depends on who lived.
UNREPEATABLE = {"local"}


async def _create(made: Any, kind: str) -> JobRecord:
    batch_size, epochs, extension = KINDS[kind]
    found: JobRecord = await made.create(
        DATA,
        hyperparameters={"n_epochs": epochs, "batch_size": batch_size},
        extension=EXTENSION | extension,
        seed=4,
    )
    return found


@cache
def reference(kind: str) -> dict[str, Any]:
    """Return what one node learns, undisturbed."""

    async def learn(home: Path) -> dict[str, Any]:
        async with world(home) as made:
            job = await made.until_over((await _create(made, kind)).id)
            assert job.status == "succeeded"
            return adapter_in(made.checkpoints(job.id)[-1].directory)

    with TemporaryDirectory() as home:
        return asyncio.run(learn(Path(home)))


class SingleEngine:
    """Answers of one engine that reads the same files."""

    def __init__(self) -> None:
        self._engine = small_engine()
        self._loaded: set[str] = set()

    def answer(self, prompt: int, directory: str | None) -> tuple[int, ...]:
        """Return the answer to one of the prompts, by an adapter; None: by the base model."""
        if directory is not None and directory not in self._loaded:
            self._engine.load_adapter(directory, directory)
            self._loaded.add(directory)
        (found,) = self._engine.generate(
            [PROMPTS[prompt]], greedy(NUM_TOKENS, ignore_eos=True), adapter=directory
        )
        return found.tokens


class ClusterStorm:
    """done: how often what was done. broken: which promises were."""

    def __init__(self, made: ClusterWorld, seed: int) -> None:
        self._made, self._seed, self._random = made, seed, Random(f"{seed}: to whom")
        self._jobs: dict[str, str] = {}  # the kind by id
        self._cancelled: set[str] = set()
        self._clients: set[asyncio.Task[None]] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self._answers: list[
            tuple[str, int, str | None, tuple[int, ...]]
        ] = []  # request, prompt, adapter, tokens
        self._num_asked = 0
        self.done: Counter[str] = Counter()
        self.broken: list[str] = []

    async def blow(self, num_actions: int) -> None:
        """The storm, and the calm after it."""
        delays = Random(f"{self._seed}: delays")  # the nodes' threads draw from it
        for node in self._made.nodes.values():
            node.delay_s = lambda: delays.choice((0.0, 0.0, 0.0, 0.02))
        for name in Random(self._seed).choices(
            list(WEIGHTS), list(WEIGHTS.values()), k=num_actions
        ):
            self.done[name] += 1
            await getattr(self, f"_{name}")()
        for node in self._made.nodes.values():
            node.live()
            node.has_room = True
        await self._all("requests end", [*self._clients])
        await self._all("what was asked for is answered", [*self._changes])
        for number, node in enumerate(self._made.nodes.values()):
            if self._made.link.describe()[number]["state"] == "draining":
                node.die()
                node.live()
        await self._until("all nodes are ready", lambda: self._made.num_ready() == NUM_NODES)
        for id in self._jobs:
            await self._tried(self._made.world.manager.resume, id)
        await self._until(
            "all jobs end", lambda: all(self._made.world.job(id).is_terminal for id in self._jobs)
        )
        await self._until(
            "no node has anything left",
            lambda: (
                not any(each["jobs"] or each["requests"] for each in self._made.link.describe())
            ),
        )
        if waiting := self._made.link.waiting or self._made.link.num_open:
            self.broken.append(f"waits for a node that is not wanted any more: {waiting}")

    def look(self) -> None:
        """Check engines and jobs after the calm, and the answers that clients got."""
        for name, node in self._made.nodes.items():
            self.broken += [f"an engine of {name} ended: {failure}" for failure in node.failures]
        for id, kind in self._jobs.items():
            job = self._made.world.job(id)
            self.done[f"{kind}: {job.status}"] += 1
            if job.status != "succeeded":
                if job.status != "cancelled" or id not in self._cancelled:
                    told = [event.message for event in self._made.world.events(id)[-5:]]
                    self.broken.append(
                        f"job {id}, {kind}, is {job.status}: {job.error}; it has told last: {told}"
                    )
                continue
            steps = steps_of(self._made.world.events(id))
            if steps != list(range(1, job.num_steps + 1)):
                self.broken.append(f"job {id}, {kind}, tells of the steps {steps}")
            learned = adapter_in(self._made.world.checkpoints(id)[-1].directory)
            if kind not in UNREPEATABLE and (by := distance(learned, reference(kind))) > TOLERANCE:
                self.broken.append(f"job {id}, {kind}, has learned something else, by {by:.2e}")
        single = SingleEngine()
        for id, prompt, directory, tokens in self._answers:
            if tokens != (expected := single.answer(prompt, directory)):
                self.broken.append(
                    f"request {id} was answered {tokens}, not {expected}, by {directory}"
                )

    # -- what is done ---------------------------------------------------------------------

    async def _create(self) -> None:
        if sum(not self._made.world.job(id).is_terminal for id in self._jobs) >= MOST_JOBS:
            return
        kind = self._random.choice(list(KINDS))
        job = await _create(self._made.world, kind)
        self._jobs[job.id] = kind

    async def _pause(self) -> None:
        self._change(self._made.world.manager.pause, "validating_files", "queued", "running")

    async def _resume(self) -> None:
        self._change(self._made.world.manager.resume, "paused")

    async def _cancel(self) -> None:
        if (
            id := self._change(self._made.world.manager.cancel, "queued", "running", "paused")
        ) is not None:
            self._cancelled.add(id)

    def _change(
        self, change: Callable[..., Coroutine[Any, Any, Any]], *statuses: str
    ) -> str | None:
        """Begin to change a job with one of these statuses, if there is one; other actions go on
        meanwhile.
        """
        jobs = [id for id in self._jobs if self._made.world.job(id).status in statuses]
        if not jobs:
            return None
        id = self._random.choice(jobs)
        task = asyncio.create_task(self._tried(change, id))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return id

    async def _tried(self, change: Callable[..., Coroutine[Any, Any, Any]], id: str) -> None:
        try:
            await change(TENANT, id)
        except CoserveError as error:
            self.done[f"refused: {type(error).__name__}"] += 1

    async def _drain(self) -> None:
        """Drain a node; more often than not one whose jobs cannot be kept, if there is one."""
        ready = {
            each["name"]: each for each in self._made.link.describe() if each["state"] == "ready"
        }
        full = [
            name
            for name, each in ready.items()
            if each["jobs"] and not self._made.nodes[name].has_room
        ]
        if len(ready) > 1:
            chosen = self._random.choice(
                full if full and self._random.random() < 0.7 else list(ready)
            )
            self.done["drain: jobs whose disk is full"] += chosen in full
            task = asyncio.create_task(self._made.link.drain(chosen))
            self._changes.add(task)
            task.add_done_callback(self._changes.discard)

    async def _die(self) -> None:
        alive = [node for node in self._made.nodes.values() if node.is_alive]
        if alive:
            self._random.choice(alive).die()

    async def _come_back(self) -> None:
        states = {each["name"]: each["state"] for each in self._made.link.describe()}
        for name, node in self._made.nodes.items():
            if node.is_alive and states.get(name) == "draining":
                node.die()
            if not node.is_alive:
                node.live()
                return

    async def _fill_disk(self) -> None:
        """Fill the disk of a node that has jobs, if there is one."""
        busy = [each["name"] for each in self._made.link.describe() if each["jobs"]]
        self._made.nodes[self._random.choice(busy or list(self._made.nodes))].has_room = False

    async def _empty_disk(self) -> None:
        for node in self._made.nodes.values():
            node.has_room = True

    async def _ask(self) -> None:
        """Request an answer of the base model, of a job's adapter, or of the newest version of a
        running job.
        """
        self._num_asked += 1
        adapter = None
        if self._jobs and self._random.random() < 0.5:
            job = self._made.world.job(self._random.choice(list(self._jobs)))
            found = self._made.world.manager.adapters.find(TENANT, job.name)
            adapter = None if found is None else found.ref
        task = asyncio.create_task(self._client(f"r{self._num_asked}", adapter))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _client(self, id: str, adapter: AdapterRef | None) -> None:
        prompt, leaves = self._random.randrange(len(PROMPTS)), self._random.random() < 0.2
        asked = make_request(
            id, prompt=PROMPTS[prompt], params=greedy(NUM_TOKENS, ignore_eos=True), adapter=adapter
        )
        try:
            stream = self._made.link.open([asked])
        except EngineGoneError:
            self.done["requests: refused"] += 1
            return
        tokens = list[int]()
        try:
            async for batch in stream.batches():
                for chunk in batch:
                    tokens += chunk.tokens
                    if chunk.error is not None:
                        self.broken.append(f"request {id}, {adapter}, ended with {chunk.error}")
                        return
                if leaves:
                    self.done["requests: left"] += 1
                    return
        except EngineGoneError as error:
            self.done["requests: lost"] += 1
            if not LOST.fullmatch(str(error)):
                self.broken.append(f"request {id}, {adapter}, ended with {error}")
            return
        except AdapterError as error:
            self.done["requests: its adapter is gone"] += 1
            if adapter is None or adapter.name not in {
                self._made.world.job(job).name for job in self._cancelled
            }:
                self.broken.append(f"request {id}, {adapter}, ended with {error}")
            return
        finally:
            self._made.link.close(stream)
        directory = None if adapter is None else adapter.directory
        by = (
            "the base"
            if adapter is None
            else "what is live"
            if directory is None
            else "what a job has made"
        )
        self.done[f"requests: answered by {by}"] += 1
        if len(tokens) != NUM_TOKENS:
            self.broken.append(f"request {id}, {adapter}, was answered {tokens}")
        if adapter is None or directory is not None:
            self._answers.append((id, prompt, directory, tuple(tokens)))

    async def _pass_by(self) -> None:
        await asyncio.sleep(self._random.choice((0.0, 0.02, 0.1, 0.4)))

    # -- the calm -------------------------------------------------------------------------

    async def _all(self, what: str, tasks: list[asyncio.Task[None]]) -> None:
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=60)
            if pending:
                self.broken.append(f"it has not come true that {what}")

    async def _until(self, what: str, question: Callable[[], Any]) -> None:
        try:
            await self._made.world.until(question, 120)
        except TimeoutError:
            self.broken.append(f"it has not come true that {what}: {self._made.link.describe()}")


def run_cluster_storm(seed: int, num_actions: int = NUM_ACTIONS) -> tuple[Counter[str], list[str]]:
    """Run a storm, and return the counts of what was done, and the broken promises."""
    for kind in KINDS.keys() - UNREPEATABLE:
        reference(kind)

    async def storm(home: Path) -> ClusterStorm:
        async with cluster_world(home, NUM_NODES) as made:
            found = ClusterStorm(made, seed)
            await found.blow(num_actions)
            found.look()
            return found

    with TemporaryDirectory() as home:
        found = asyncio.run(asyncio.wait_for(storm(Path(home)), 600))
    return found.done, found.broken
