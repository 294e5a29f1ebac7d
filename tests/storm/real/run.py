"""A storm of real processes: a server on a small disk, hundreds of clients, jobs, uploads,
adapters, and faults; then calm, in which everything comes to its end and is looked at.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from job_data import adapter_in, distance
from served import model_directory
from small_disk import SmallDisk, small_disk
from storm.real import batches, clients, faults, work
from storm.real.http import Request
from storm.real.references import references
from storm.real.server import Resources, StormServer, until_gone
from storm.real.world import Settings, World

_OPTIONS = (
    *("--dtype", "float32", "--memory", "64MB", "--drain", "3s"),
    *("--engine-timeout", f"{faults.ENGINE_TIMEOUT_S}s"),
    *("--timeout-headers", f"{clients.SLOW_HEAD_S}s", "--timeout-body", f"{clients.SLOW_HEAD_S}s"),
)
_NUM_RUDE, _NUM_STRUCTURED, _NUM_FILES, _NUM_BATCHES = 16, 4, 4, 3
# For what had begun when the storm was over.
_CALM_S = 240.0
# What may differ between an idle server after the storm and one that has just started: pools of
# threads that filled, connections to the store, memory that the allocator keeps.
_MOST_MORE_FILES, _MOST_MORE_THREADS, _MOST_MORE_BYTES = 24, 48, 400_000_000
# Float32: beside others, a job's windows are cut elsewhere, so sums round otherwise, and Adam makes
# much of a gradient that is next to nothing. An optimizer step that is lost or made twice moves
# parameters by its learning rate, 5e-3.
_TOLERANCE = 1e-3


def run_real_storm(settings: Settings) -> dict[str, Any]:
    """Its report; `broken` is empty if every invariant held."""
    with TemporaryDirectory(prefix="coserve-storm-") as directory, ExitStack() as stack:
        disk = stack.enter_context(_disk(Path(directory)))
        return asyncio.run(_storm(settings, Path(directory), disk))


@contextmanager
def _disk(directory: Path) -> Iterator[SmallDisk | None]:
    """None where nothing can be mounted: then no disk fills up."""
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(directory / "disk", "256m"))
        except pytest.skip.Exception:
            disk = None
        yield disk


async def _storm(settings: Settings, directory: Path, disk: SmallDisk | None) -> dict[str, Any]:
    adapters = directory / "adapters"
    options = [
        *_OPTIONS,
        "--allow-adapter-paths",
        str(adapters),
        *(["--deterministic"] if settings.is_exact else []),
    ]
    model = str(model_directory())
    recipes, answers = await _undisturbed(settings, directory, model, options)
    home = (disk.path if disk else directory) / "home"
    server = StormServer(_made(directory / "storm"), home, model, options)
    assert server.start(), server.log.read_text()
    world = World(
        settings=settings, server=server, disk=disk, recipes=recipes, base_answers=answers
    )
    fresh = server.resources()
    rage = [
        *(clients.stream(world, number) for number in range(settings.num_streams)),
        *(clients.rude(world, number) for number in range(_NUM_RUDE)),
        *(clients.structured(world, number) for number in range(_NUM_STRUCTURED)),
        *(work.jobs(world, number) for number in range(settings.num_jobs)),
        *(work.files(world, number) for number in range(_NUM_FILES)),
        *(batches.batches(world, number) for number in range(_NUM_BATCHES)),
        *(work.adapters(world), clients.health(world), faults.faults(world), _end_of_storm(world)),
    ]
    await _all(rage)
    since_s = time.monotonic()
    await _calm(world)
    calm_s = time.monotonic() - since_s
    await _look(world)
    await _end(world, fresh)
    return _report(world, calm_s, fresh)


async def _undisturbed(
    settings: Settings, directory: Path, model: str, options: Sequence[str]
) -> tuple[tuple[Any, ...], Any]:
    server = StormServer(_made(directory / "calm"), directory / "calm" / "home", model, options)
    assert server.start(), server.log.read_text()
    try:
        return await references(settings.seed, directory / "adapters", server)
    finally:
        assert await asyncio.to_thread(server.end) == 0


async def _end_of_storm(world: World) -> None:
    while time.monotonic() - world.started_s < world.settings.storm_s:
        await asyncio.sleep(0.2)
    world.is_finished = True


async def _all(actors: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Until each is done; the first that breaks ends all."""
    async with asyncio.TaskGroup() as group:
        for actor in actors:
            group.create_task(actor)


# -- after the storm ------------------------------------------------------------------------


async def _calm(world: World) -> None:
    """No fault any more: every job and every batch comes to its end."""
    until_s = time.monotonic() + _CALM_S
    while time.monotonic() < until_s:
        waiting = [job for job in await _listed(world) if job["status"] not in work.OVER]
        unfinished = await batches.unfinished(world)
        if not waiting and not unfinished:
            return
        for job in waiting:
            if job["status"] == "paused":
                await world.ask(Request(path=f"/v1/fine_tuning/jobs/{job['id']}/resume"))
        await asyncio.sleep(0.5)
    world.check(
        not waiting,
        f"{len(waiting)} jobs did not come to their end in {_CALM_S:.0f} s: {waiting[:2]}",
    )
    world.check(
        not unfinished, f"batches did not come to their end in {_CALM_S:.0f} s: {unfinished[:2]}"
    )


async def _listed(world: World) -> list[Any]:
    """All jobs."""
    found: list[Any] = []
    while True:
        after = f"&after={found[-1]['id']}" if found else ""
        page = await world.ask_until_done(
            Request(method="GET", path=f"/v1/fine_tuning/jobs?limit=100{after}")
        )
        assert page is not None, world.broken
        found += page.json()["data"]
        if not page.json()["has_more"]:
            return found


async def _look(world: World) -> None:
    """At everything that was acknowledged."""
    for file in list(world.uploads):
        await work.check_file(world, file)
    for file in world.deleted:
        answer = await world.ask_until_done(Request(method="GET", path=f"/v1/files/{file}"))
        world.check(
            answer is not None and answer.status == 404, f"file {file} was deleted, and is there"
        )
    listed = {job["id"]: job for job in await _listed(world)}
    world.check(
        not (world.jobs.keys() - listed.keys()), "jobs were acknowledged, and are not there"
    )
    for job in listed.values():
        world.counts[f"jobs {job['status']}"] += 1
        if job["status"] == "succeeded":
            await _look_at_job(world, job)
        elif job["status"] == "cancelled":
            world.check(job["id"] in world.cancelled, f"nobody cancelled job {job['id']}")
        else:
            _look_at_failed(world, job)
    await batches.look(world)
    for recipe in world.recipes:
        answer = await work.load(world, recipe)
        world.check(
            answer is not None and answer.status in (200, 400),
            f"no adapter can be loaded: {answer}",
        )
        await _compare_answers(world, f"loaded-{recipe.name}", recipe.answers)
    await _compare_answers(world, "small", world.base_answers)


async def _look_at_job(world: World, job: Any) -> None:
    """Every example was used once, and the adapter is what it would be without a storm."""
    recipe = next(
        each for each in world.recipes if f":{each.name}:" in f"{job['fine_tuned_model']}:"
    )
    steps, after = [], ""
    while True:
        path = f"/v1/fine_tuning/jobs/{job['id']}/events?limit=100{after}"
        page = await world.ask_until_done(Request(method="GET", path=path))
        assert page is not None, world.broken
        events = page.json()["data"]
        steps += [
            event["data"]["step"] for event in events if "train_loss" in (event.get("data") or {})
        ]
        if not page.json()["has_more"]:
            break
        after = f"&after={events[-1]['id']}"
    world.check(
        sorted(steps) == list(range(1, recipe.num_steps + 1)),
        f"job {job['id']} has made the steps {steps}",
    )
    (made,) = (world.server.home / "jobs" / job["id"] / "checkpoints").glob(
        f"step-{recipe.num_steps}*"
    )
    apart = distance(adapter_in(made), recipe.adapter)
    most = 0.0 if world.settings.is_exact else _TOLERANCE
    world.counts["jobs equal bit for bit"] += apart == 0
    world.farthest = max(world.farthest, apart)
    world.check(
        apart <= most,
        f"the adapter of job {job['id']} ({recipe.name}) is {apart:g} from an undisturbed one",
    )
    await _compare_answers(
        world, job["fine_tuned_model"], dict([next(iter(recipe.answers.items()))])
    )


def _look_at_failed(world: World, job: Any) -> None:
    """Only what engines died of may fail, and the storm killed those itself."""
    code = (job["error"] or {}).get("code")
    num_deaths = sum(
        world.counts[f"fault: {kind}"]
        for kind in ("kill engine", "hang engine", "kill fork server")
    )
    world.check(
        code == "engine_died" and num_deaths >= 3, f"job {job['id']} failed: {job['error']}"
    )


async def _compare_answers(world: World, model: str, answers: Any) -> None:
    for prompt, text in answers.items():
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": clients.NUM_TOKENS,
            "temperature": 0,
        }
        answer = await world.ask_until_done(Request(path="/v1/completions", body=body))
        found = (
            None if answer is None or answer.status != 200 else answer.json()["choices"][0]["text"]
        )
        world.check(
            found == text,
            f"after the storm {model} answers {prompt!r} with {found!r}, not {text!r}",
        )


async def _end(world: World, fresh: list[Resources]) -> None:
    """Nothing is left running, open or lying about."""
    server = world.server
    await asyncio.sleep(
        8
    )  # connections that rude clients left are closed by then, and memory is given back
    idle = server.resources()
    world.check(len(idle) == len(fresh), f"{len(idle)} processes run, not {len(fresh)}")
    for before, after in zip(fresh, idle, strict=False):
        world.check(
            after.num_files <= before.num_files + _MOST_MORE_FILES
            and after.num_threads <= before.num_threads + _MOST_MORE_THREADS
            and after.resident_bytes <= before.resident_bytes + _MOST_MORE_BYTES,
            f"a process that held {before} holds {after} after the storm",
        )
    world.idle = idle
    processes = server.processes()
    status = await asyncio.to_thread(server.end)
    world.check(status == 0, f"the server ended with status {status}")
    world.check(not await until_gone(processes, 1), "processes are left")
    world.check(
        not list(server.temporary.iterdir()), f"files are left: {list(server.temporary.iterdir())}"
    )
    world.check(not list((server.home / "run").iterdir()), "sockets are left")
    command = [sys.executable, "-m", "coserve", "doctor", "--home", str(server.home)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False
    )
    world.check(done.returncode == 0, f"the doctor: {done.stdout[-2000:]} {done.stderr[-500:]}")
    lines = server.log.read_text().splitlines()
    world.check(
        "Traceback" not in "\n".join(lines),
        f"the log has a traceback: {server.log.read_text()[-4000:]}",
    )
    world.counts["lines in the log"] = len(lines)


def _report(world: World, calm_s: float, fresh: list[Resources]) -> dict[str, Any]:
    taken = sorted(world.health_s)
    return {
        "seed": world.settings.seed,
        "deterministic": world.settings.is_exact,
        "storm_s": world.settings.storm_s,
        "calm_s": round(calm_s, 1),
        "streams": world.settings.num_streams,
        "jobs": world.settings.num_jobs,
        "starts": world.server.num_starts,
        "deadly_requests": world.server.num_deadly_requests,
        "counts": dict(sorted(world.counts.items())),
        "health_s": {
            name: _quantile(taken, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("most", 1.0))
        },
        "recovery_s": {
            what: {
                "num": len(taken),
                "p50": _quantile(sorted(taken), 0.5),
                "most": round(max(taken), 2),
            }
            for what, taken in sorted(world.recovery_s.items())
        },
        "fresh": [_as_json(each) for each in fresh],
        "idle_after": [_as_json(each) for each in world.idle],
        "farthest_adapter": world.farthest,
        "broken": world.broken,
    }


def _as_json(held: Resources) -> dict[str, int]:
    return {
        "files": held.num_files,
        "threads": held.num_threads,
        "resident_mb": held.resident_bytes // 1_000_000,
    }


def _quantile(taken: Sequence[float], q: float) -> float | None:
    return round(taken[int(q * (len(taken) - 1))], 3) if taken else None


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def command(settings: Settings) -> str:
    """What repeats a storm, as far as real processes can be repeated: the same actions, at other
    moments."""
    return (
        f"PYTHONPATH=tests {sys.executable} -m storm real --seed {settings.seed} --minutes "
        f"{settings.storm_s / 60:g} "
        f"--streams {settings.num_streams} --jobs {settings.num_jobs}"
    )
