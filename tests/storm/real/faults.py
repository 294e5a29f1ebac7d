"""What happens to the server's processes, its disk and its clock."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from storm.real.http import Request
from storm.real.server import until_gone
from storm.real.world import World

# What the server is started with: an engine that has not answered for this long is ended.
ENGINE_TIMEOUT_S = 5.0
# Until the next one, in the mean.
_MEAN_S = 8.0
# An engine that has lost its server is gone within this, and a server that was killed is ready
# again within that.
_GONE_S, _READY_S = 10.0, 120.0

Fault = Callable[[World, Random], Awaitable[None]]


async def faults(world: World) -> None:
    """One after another, until the storm is over."""
    rng = world.rng("faults")
    kinds = {
        kill_engine: 5,
        stop_engine: 3,
        hang_engine: 2,
        kill_server: 3,
        stop_server: 3,
        end_server: 1,
    }
    kinds |= {kill_fork_server: 1, kill_sandbox: 3, jump_clock: 3}
    if world.disk is not None:
        kinds[fill_disk] = 3
    while not world.is_finished:
        await asyncio.sleep(min(rng.expovariate(1 / _MEAN_S), 4 * _MEAN_S))
        fault = rng.choices(list(kinds), list(kinds.values()))[0]
        world.counts[f"fault: {fault.__name__.replace('_', ' ')}"] += 1
        with world.disturbance():
            await fault(world, rng)


async def kill_engine(world: World, rng: Random) -> None:
    """`kill -9`; how long until there is an answer again?"""
    engine = world.server.engine_pid()
    if engine is not None:
        _signal(engine, signal.SIGKILL)
        await _until_answered(world, "engine killed")


async def kill_fork_server(world: World, rng: Random) -> None:
    """The engine goes with it, and the next one waits for another such process."""
    forks = world.server.fork_server_pid()
    if forks is not None:
        _signal(forks, signal.SIGKILL)
        await _until_answered(world, "fork server killed")


async def kill_sandbox(world: World, rng: Random) -> None:
    """End the process in which grammars are tried, as a crash of native code there would: nobody
    else notices."""
    sandbox, engine = world.server.sandbox_pid(), world.server.engine_pid()
    num_deadly_requests = world.server.num_deadly_requests
    if sandbox is None:
        return
    _signal(sandbox, rng.choice((signal.SIGKILL, signal.SIGSEGV)))
    body = {
        "model": "small",
        "prompt": "x",
        "max_tokens": 4,
        "guided_regex": f"[a-f]{{1,{rng.randrange(9, 900)}}}",
    }
    answer = await world.ask(Request(path="/v1/completions", body=body))
    is_answered = answer is not None and answer.status in (200, 429, 503)
    world.check(is_answered, f"a grammar was not tried after the sandbox was killed: {answer}")
    if num_deadly_requests == world.server.num_deadly_requests:
        world.check(engine == world.server.engine_pid(), "an engine died with the sandbox")


async def stop_engine(world: World, rng: Random) -> None:
    """For a moment."""
    await _stop(world, world.server.engine_pid(), rng.uniform(0.1, 0.5 * ENGINE_TIMEOUT_S))


async def hang_engine(world: World, rng: Random) -> None:
    """For ever: it is ended, and another one started."""
    engine = world.server.engine_pid()
    if engine is None:
        return
    _signal(engine, signal.SIGSTOP)
    left = await until_gone([engine], 4 * ENGINE_TIMEOUT_S)
    world.check(
        not left, f"an engine that stood still for {4 * ENGINE_TIMEOUT_S:.0f} s was not ended"
    )
    for pid in left:
        _signal(pid, signal.SIGKILL)
    await _until_answered(world, "engine stopped for ever")


async def stop_server(world: World, rng: Random) -> None:
    """For a moment, with whatever it had begun."""
    await _stop(world, world.server.pid, rng.uniform(0.1, 4))


async def kill_server(world: World, rng: Random) -> None:
    """`kill -9`: its engine goes with it, and the next one finds all that was acknowledged."""
    processes = world.server.processes()
    if rng.random() < 0.3 and (engine := world.server.engine_pid()) is not None:
        os.kill(engine, signal.SIGSTOP)  # one that hangs goes, too
    world.server.goes_down()
    await asyncio.to_thread(world.server.kill)
    left = await until_gone(processes, _GONE_S)
    world.check(not left, f"processes outlived the server by {_GONE_S:.0f} s: {left}")
    for pid in left:
        _signal(pid, signal.SIGKILL)
    await start_server(world)


async def end_server(world: World, rng: Random) -> None:
    """SIGTERM: in good order, and within its limit, whatever clients do."""
    processes = world.server.processes()
    since_s = time.monotonic()
    world.server.goes_down()
    status = await asyncio.to_thread(world.server.end)
    world.check(status == 0, f"the server ended with status {status} on SIGTERM")
    world.recovery_s.setdefault("SIGTERM to end", []).append(time.monotonic() - since_s)
    world.check(
        not await until_gone(processes, 1), "processes outlived a server that ended in good order"
    )
    await start_server(world)


async def start_server(world: World) -> None:
    """Until it is ready; a full disk may be in the way for a while."""
    since_s = time.monotonic()
    while not await asyncio.to_thread(world.server.start):
        world.counts["starts that failed"] += 1
        if time.monotonic() - since_s > _READY_S:
            world.check(
                False,
                f"the server did not start in {_READY_S:.0f} s: "
                f"{world.server.log.read_text()[-2000:]}",
            )
            raise SystemExit(f"broken: {world.broken}")
        await asyncio.sleep(1)
    world.recovery_s.setdefault("server started", []).append(time.monotonic() - since_s)


async def fill_disk(world: World, rng: Random) -> None:
    """To the last byte, and empty it again."""
    assert world.disk is not None
    await asyncio.to_thread(world.disk.fill)
    try:
        await asyncio.sleep(rng.uniform(1, 6))
    finally:
        await asyncio.to_thread(world.disk.empty)


async def jump_clock(world: World, rng: Random) -> None:
    """The time of day, for all processes: by a moment, an hour or a year, both ways."""
    seconds = rng.choice((1, 60, 3600, 366 * 86400)) * rng.choice((1, -1))
    world.server.set_clock(seconds)
    await asyncio.sleep(rng.uniform(1, 5))
    world.server.set_clock(0)


async def _stop(world: World, pid: int | None, seconds: float) -> None:
    if pid is None:
        return
    _signal(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        _signal(pid, signal.SIGCONT)


async def _until_answered(world: World, what: str) -> None:
    """Until a token comes again; an answer before the death is known does not count."""
    since_s = time.monotonic()
    await asyncio.sleep(0.05)
    body = {"model": "small", "prompt": "x", "max_tokens": 1}
    while time.monotonic() - since_s < _READY_S:
        answer = await world.ask(Request(path="/v1/completions", body=body))
        if answer is not None and answer.status == 200:
            world.recovery_s.setdefault(what, []).append(time.monotonic() - since_s)
            return
        await asyncio.sleep(0.05)
    world.check(False, f"{what}: no answer within {_READY_S:.0f} s")


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
