"""Clients: those that ask and listen, and those that are slow, rude or gone."""

import asyncio
import json
import socket
import struct
import time
from contextlib import suppress
from random import Random
from typing import Any

from hostile_grammars import OVERFLOWS_SANDBOX
from storm.real.http import Answer, Request
from storm.real.world import World

# Limits that the server is started with, for heads and bodies that do not come.
SLOW_HEAD_S = 5.0
# What a stream may end with, other than its end.
_ENDS = (
    "the engine died",
    "the engine has not answered",
    "the server is shutting down",
    "the engine is not there",
)


async def stream(world: World, number: int) -> None:
    """One answer after another, each checked to the letter."""
    rng = world.rng(f"stream {number}")
    await asyncio.sleep(2 * rng.random())
    while not world.is_finished:
        name, answers = _model(world, rng)
        prompt = rng.choice(list(answers))
        streams = rng.random() < 0.8
        body = {
            "model": name,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "stream": streams,
        }
        answer = await world.ask(Request(path="/v1/completions", body=body))
        if answer is None or answer.status in (404, 429, 503, 507):
            world.counts["answers: none" if answer is None else f"answers: {answer.status}"] += 1
            await asyncio.sleep(0.2 + rng.random())
            continue
        world.check(
            answer.status == 200, f"a completion ended with {answer.status}: {answer.body[:300]!r}"
        )
        if answer.status == 200:
            _check_text(world, body, answer, answers[prompt])


# Of the answers that are compared with those of an undisturbed server.
NUM_TOKENS = 24


def _model(world: World, rng: Random) -> tuple[str, Any]:
    """A name, and what it answers: the base, an adapter that comes and goes, or what a job has
    made."""
    if rng.random() < 0.6:
        return "small", world.base_answers
    recipe = rng.choice(world.recipes)
    return f"loaded-{recipe.name}", recipe.answers


def _check_text(world: World, body: dict[str, Any], answer: Answer, expected: str) -> None:
    if not body["stream"]:
        text = answer.json()["choices"][0]["text"]
        world.counts["answers: whole"] += 1
    else:
        *events, last = answer.events()
        if last != "[DONE]":
            problem = str(json.loads(last).get("error", {}).get("message"))
            world.check(problem.startswith(_ENDS), f"a stream ended with {last[:300]}")
            world.counts[f"streams ended: {problem.split(';')[0][:60]}"] += 1
            return
        text = "".join(
            choice["text"] for event in events for choice in json.loads(event)["choices"]
        )
        world.counts["answers: streamed"] += 1
    world.check(
        text == expected,
        f"{body['model']} answered {body['prompt']!r} with {text!r}, not {expected!r}",
    )


async def health(world: World) -> None:
    """Asked as a supervisor does; slow answers count where no fault is at work."""
    while not world.is_finished:
        since_s, was_disturbed = time.monotonic(), world.is_disturbed
        answer = await world.ask(Request(method="GET", path="/health"))
        if answer is not None and not was_disturbed and not world.is_disturbed:
            world.check(answer.status == 200, f"/health ended with {answer.status}")
            world.health_s.append(time.monotonic() - since_s)
        await asyncio.sleep(0.2)


# Grammars, and whether they can be followed: hundreds of references overflow the stack of the
# process that tries them.
_GRAMMARS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"guided_regex": "[a-f]{2,9}"}, True),
    (
        {
            "guided_json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
            }
        },
        True,
    ),
    (OVERFLOWS_SANDBOX, False),
)


async def structured(world: World, number: int) -> None:
    """Answers that follow grammars, and grammars that crash their sandbox: each costs its own
    request alone."""
    rng = world.rng(f"structured {number}")
    while not world.is_finished:
        grammar, can_follow = rng.choice(_GRAMMARS)
        varied = {name: _varied(value, rng) for name, value in grammar.items()}
        body = {"model": "small", "prompt": "x", "max_tokens": 8, **varied}
        answer = await world.ask(Request(path="/v1/completions", body=body))
        if answer is not None and answer.status not in (404, 429, 503, 507):
            expected = 200 if can_follow else 400
            world.check(
                answer.status == expected,
                f"a grammar ended with {answer.status}: {answer.body[:300]!r}",
            )
            world.counts[
                "grammars followed" if can_follow else "grammars that crashed a sandbox"
            ] += 1
        await asyncio.sleep(rng.uniform(0.1, 1))


def _varied(grammar: Any, rng: Random) -> Any:
    """Return one that was not asked for before, and that is as good or bad."""
    if not isinstance(grammar, str):
        return {**grammar, "title": str(rng.random())}
    if grammar.startswith("start"):
        return f"{grammar}\n// {rng.random()}"
    return grammar.replace("9", str(rng.randrange(9, 900)))


# -- rude ones ------------------------------------------------------------------------------

_LONG = {
    "model": "small",
    "prompt": "x",
    "max_tokens": 300,
    "n": 8,
    "stream": True,
    "ignore_eos": True,
}


async def rude(world: World, number: int) -> None:
    """One after another of these."""
    rng = world.rng(f"rude {number}")
    while not world.is_finished:
        kind = rng.choice(_KINDS)
        since_s = time.monotonic()
        connection = socket.socket()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(
                loop.sock_connect(connection, ("127.0.0.1", world.server.port)), 10
            )
            await kind(world, connection, rng)
            world.counts[f"rude: {kind.__name__.strip('_').replace('_', ' ')}"] += 1
        except (OSError, TimeoutError) as error:
            is_explained = world.server.was_down(since_s) or not isinstance(error, TimeoutError)
            world.check(is_explained, f"a {kind.__name__} waited in vain: {error!r}")
            await asyncio.sleep(0.5)
        finally:
            connection.close()


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def _slow_reader(world: World, connection: socket.socket, rng: Random) -> None:
    """Takes a few bytes at a time."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await _send(connection, Request(path="/v1/completions", body=_LONG).encoded())
    for _ in range(rng.randrange(5, 40)):
        await asyncio.sleep(0.25)
        if not await asyncio.get_running_loop().sock_recv(connection, 200):
            return


async def _never_reader(world: World, connection: socket.socket, rng: Random) -> None:
    """Asks, and looks at nothing."""
    await _send(connection, Request(path="/v1/completions", body=_LONG).encoded())
    await asyncio.sleep(rng.uniform(1, 15))


async def _reset(world: World, connection: socket.socket, rng: Random) -> None:
    """Is gone in the middle, without a word."""
    await _send(connection, Request(path="/v1/completions", body=_LONG).encoded())
    await asyncio.sleep(rng.uniform(0, 2))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _half_closed(world: World, connection: socket.socket, rng: Random) -> None:
    """Will say no more, and waits until the server has said all."""
    body = {**_LONG, "n": 1, "max_tokens": 8}
    await _send(connection, Request(path="/v1/completions", body=body).encoded())
    connection.shutdown(socket.SHUT_WR)
    await _until_closed(connection, 60)


async def _half_head(world: World, connection: socket.socket, rng: Random) -> None:
    """Never says all of its head: the server has to end this."""
    await _send(connection, b"POST /v1/completions HTTP/1.1\r\nHost: lo")
    await _until_closed(connection, 60)


async def _half_body(world: World, connection: socket.socket, rng: Random) -> None:
    """Never says all of its body."""
    content = Request(path="/v1/completions", body=_LONG).encoded()
    await _send(connection, content[: len(content) - rng.randrange(1, 60)])
    await _until_closed(connection, 60)


async def _nonsense(world: World, connection: socket.socket, rng: Random) -> None:
    """Speaks no HTTP."""
    await _send(connection, rng.randbytes(rng.randrange(1, 5000)) + b"\r\n\r\n")
    with suppress(ConnectionError):
        await _until_closed(connection, 60)


async def _until_closed(connection: socket.socket, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while await asyncio.get_running_loop().sock_recv(connection, 65536):
            pass


_KINDS = (_slow_reader, _never_reader, _reset, _half_closed, _half_head, _half_body, _nonsense)
