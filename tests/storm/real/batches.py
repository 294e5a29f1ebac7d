"""Batches with a deadly line now and then: every other line is answered once, and the deadly one is
set aside."""

import asyncio
import json
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from storm.real.clients import NUM_TOKENS
from storm.real.http import Request
from storm.real.seams.deadly_requests import PROMPT as DEADLY_PROMPT
from storm.real.work import acknowledged_upload
from storm.real.world import World

_ENDPOINT = "/v1/completions"
_OVER = ("completed", "failed", "expired", "cancelled")
# Share of the batches that have a deadly line.
_DEADLY_SHARE = 0.3
# The completion window, and how far the time of day is off at least when a fault has set it beyond
# that.
_WINDOW, _CLOCK_OFF_S = "24h", 12 * 3600
# Faults that may end a process, and so condemn one line each: the line that ran alone at that
# moment.
_DEATHS_FROM_OUTSIDE = (
    *(
        "kill engine",
        "stop engine",
        "hang engine",
        "kill server",
        "stop server",
        "end server",
        "kill fork server",
    ),
)


async def batches(world: World, number: int) -> None:
    """Post one batch after another."""
    rng = world.rng(f"batches {number}")
    while not world.is_finished:
        lines, texts = _drawn(world, rng)
        file = await acknowledged_upload(world, "\n".join(lines).encode(), purpose="batch")
        if file is None:
            continue
        body = {"input_file_id": file, "endpoint": _ENDPOINT, "completion_window": _WINDOW}
        made = await world.ask_until_done(Request(path="/v1/batches", body=body))
        if made is None:
            continue
        world.check(made.status == 200, f"a batch was refused: {made.status} {made.body[:300]!r}")
        if made.status == 200:
            id = made.json()["id"]
            world.batches[id] = texts
            world.counts["batches made"] += 1
            await _until_over(world, rng, id)


def _drawn(world: World, rng: Random) -> tuple[list[str], Mapping[str, str | None]]:
    """Return a batch's lines, and the right text of each by custom_id; None: the line is deadly."""
    lines, texts = [], dict[str, str | None]()
    num_lines = rng.choice((1, 3, 12, 40))
    deadly = rng.randrange(num_lines) if rng.random() < _DEADLY_SHARE else None
    for place in range(num_lines):
        prompt: Any = rng.choice(list(world.base_answers))
        texts[str(place)] = world.base_answers[prompt]
        if place == deadly:
            prompt, texts[str(place)] = DEADLY_PROMPT, None
        body = {"model": "small", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        lines.append(
            json.dumps({"custom_id": str(place), "method": "POST", "url": _ENDPOINT, "body": body})
        )
    return lines, texts


async def _until_over(world: World, rng: Random, id: str) -> None:
    while not world.is_finished:
        await asyncio.sleep(rng.uniform(0.2, 1.5))
        answer = await world.ask(Request(method="GET", path=f"/v1/batches/{id}"))
        if answer is None or answer.status in (503, 507):
            continue
        world.check(
            answer.status == 200, f"a look at a batch: {answer.status} {answer.body[:300]!r}"
        )
        if answer.status != 200 or answer.json()["status"] in _OVER:
            return


async def unfinished(world: World) -> list[Any]:
    """Return the batches that have not come to their end, acknowledged or not."""
    return [batch for batch in await _listed(world) if batch["status"] not in _OVER]


async def _listed(world: World) -> list[Any]:
    found: list[Any] = []
    while True:
        after = f"&after={found[-1]['id']}" if found else ""
        page = await world.ask_until_done(
            Request(method="GET", path=f"/v1/batches?limit=100{after}")
        )
        assert page is not None, world.broken
        found += page.json()["data"]
        if not page.json()["has_more"]:
            return found


# -- after the storm ------------------------------------------------------------------------


async def look(world: World) -> None:
    """Check every line of every batch that was acknowledged."""
    listed = {batch["id"]: batch for batch in await _listed(world)}
    world.check(
        not (world.batches.keys() - listed.keys()), "batches were acknowledged, and are not there"
    )
    for id in world.batches.keys() & listed.keys():
        await _look_at(world, listed[id])
    num_from_outside = sum(world.counts[f"fault: {kind}"] for kind in _DEATHS_FROM_OUTSIDE)
    num_condemned = world.counts["batch lines: condemned by faults"]
    world.check(
        2 * num_condemned <= num_from_outside,
        f"{num_condemned} harmless lines were set aside, and {num_from_outside} faults may have "
        f"ended processes",
    )


async def _look_at(world: World, batch: Any) -> None:
    was_clock_off = _was_clock_off(batch)
    may_end = ("completed", "expired") if was_clock_off else ("completed",)
    world.counts[f"batches {batch['status']}"] += 1
    world.check(batch["status"] in may_end, f"batch {batch['id']} is {batch['status']}: {batch}")
    texts = world.batches[batch["id"]]
    lines = [
        *await _lines(world, batch["output_file_id"]),
        *await _lines(world, batch["error_file_id"]),
    ]
    ids = sorted(line["custom_id"] for line in lines)
    world.check(
        ids == sorted(texts), f"batch {batch['id']} of {sorted(texts)} has results of {ids}"
    )
    for line in lines:
        _check_line(world, batch, line, texts.get(line["custom_id"]), was_clock_off=was_clock_off)


def _was_clock_off(batch: Any) -> bool:
    """Return whether a fault had set the time of day beyond the window when something became of a
    batch."""
    times = (
        batch[name]
        for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at", "expired_at")
    )
    return any(at is not None and abs(at - time.time()) > _CLOCK_OFF_S for at in times)


async def _lines(world: World, file: str | None) -> list[Any]:
    if file is None:
        return []
    answer = await world.ask_until_done(Request(method="GET", path=f"/v1/files/{file}/content"))
    world.check(
        answer is not None and answer.status == 200, f"results of a batch cannot be read: {answer}"
    )
    if answer is None or answer.status != 200:
        return []
    return [json.loads(line) for line in answer.body.decode().splitlines()]


def _check_line(
    world: World, batch: Any, line: Any, text: str | None, *, was_clock_off: bool
) -> None:
    """Check what became of a line. text: the right one; None: the line is deadly."""
    code = (line["error"] or {}).get("code")
    if code == "batch_expired" and was_clock_off:
        world.counts["batch lines: expired"] += 1
    elif code == "engine_died":
        kind = "deadly, set aside" if text is None else "condemned by faults"
        world.counts[f"batch lines: {kind}"] += 1
    elif text is None or code is not None or line["response"]["status_code"] != 200:
        world.check(
            False,
            f"line {line['custom_id']} of batch {batch['id']}, whose text is {text!r}: {line}",
        )
    else:
        found = line["response"]["body"]["choices"][0]["text"]
        world.check(found == text, f"a batch's line was answered with {found!r}, not {text!r}")
        world.counts["batch lines: answered"] += 1
