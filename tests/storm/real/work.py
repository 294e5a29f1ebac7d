"""Jobs, uploads and adapters: each actor makes, changes and ends its own, and remembers what was
acknowledged."""

import asyncio
import json
from random import Random

from storm.real.http import Answer, Request, upload
from storm.real.world import Recipe, World

OVER = ("succeeded", "failed", "cancelled")


async def jobs(world: World, number: int) -> None:
    """One job after another."""
    rng = world.rng(f"jobs {number}")
    while not world.is_finished:
        recipe = rng.choice(world.recipes)
        file = await acknowledged_upload(world, recipe.data)
        if file is None:
            continue
        body = {**recipe.body, "training_file": file, "suffix": recipe.name}
        made = await world.ask_until_done(Request(path="/v1/fine_tuning/jobs", body=body))
        if made is None:
            continue
        world.check(made.status == 200, f"a job was refused: {made.status} {made.body[:300]!r}")
        if made.status == 200:
            id = made.json()["id"]
            world.jobs[id] = recipe
            world.counts["jobs made"] += 1
            await _see_through(world, rng, id)


async def _see_through(world: World, rng: Random, id: str) -> None:
    """Until it is over, with a hand in it now and then."""
    while not world.is_finished:
        await asyncio.sleep(rng.uniform(0.2, 1.5))
        action = rng.choices(("look", "pause", "resume", "cancel", "events"), (60, 8, 12, 1, 4))[0]
        path = f"/v1/fine_tuning/jobs/{id}"
        if action == "look":
            answer = await world.ask(Request(method="GET", path=path))
        elif action == "events":
            answer = await world.ask(Request(method="GET", path=f"{path}/events?limit=100"))
        else:
            if action == "cancel":
                world.cancelled.add(id)
            answer = await world.ask(Request(path=f"{path}/{action}"))
        if answer is None or answer.status in (503, 507):
            continue
        # What is over, or paused already, cannot be paused.
        world.check(
            answer.status in (200, 400), f"{action} of a job: {answer.status} {answer.body[:300]!r}"
        )
        world.counts[f"jobs: {action}"] += 1
        if action == "look" and answer.status == 200 and answer.json()["status"] in OVER:
            return
    return


async def files(world: World, number: int) -> None:
    """Uploads, looks, deletes."""
    rng = world.rng(f"files {number}")
    mine: list[str] = []
    while not world.is_finished:
        if not mine or rng.random() < 0.5:
            lines = (
                json.dumps({"text": rng.randbytes(40).hex()})
                for _ in range(rng.choice((1, 10, 1000)))
            )
            file = await acknowledged_upload(world, "\n".join(lines).encode())
            mine += [] if file is None else [file]
        elif rng.random() < 0.6 and len(mine) < 40:
            await check_file(world, rng.choice(mine))
        else:
            file = mine.pop(rng.randrange(len(mine)))
            content = world.uploads.pop(file)
            answer = await world.ask(Request(method="DELETE", path=f"/v1/files/{file}"))
            if answer is not None and answer.status == 200:
                world.deleted.add(file)
                world.counts["files deleted"] += 1
            elif answer is not None:  # it was refused: it is there
                world.check(
                    answer.status in (503, 507),
                    f"a file was not deleted: {answer.status} {answer.body[:200]!r}",
                )
                world.uploads[file] = content
        await asyncio.sleep(rng.uniform(0, 1))


async def check_file(world: World, file: str) -> None:
    """What was acknowledged is there, whole."""
    answer = await world.ask(Request(method="GET", path=f"/v1/files/{file}/content"))
    if answer is None or answer.status == 503:
        return
    is_there = answer.status == 200 and answer.body == world.uploads[file]
    world.check(
        is_there, f"upload {file} is not what it was: {answer.status}, {len(answer.body)} bytes"
    )
    world.counts["files read"] += 1


async def acknowledged_upload(
    world: World, content: bytes, *, purpose: str = "fine-tune"
) -> str | None:
    """Return the id of a new file; None where it was not acknowledged."""
    answer = await world.ask(upload(content, purpose=purpose))
    if answer is None or answer.status in (503, 507):
        world.counts["uploads refused or lost"] += 1
        await asyncio.sleep(0.5)
        return None
    world.check(
        answer.status == 200, f"an upload ended with {answer.status}: {answer.body[:300]!r}"
    )
    if answer.status != 200:
        return None
    id: str = answer.json()["id"]
    world.uploads[id] = content
    world.counts["uploads acknowledged"] += 1
    return id


async def adapters(world: World) -> None:
    """Come and go; a client that asks for one that is not there is told so."""
    rng = world.rng("adapters")
    while not world.is_finished:
        recipe = rng.choice(world.recipes)
        answer = await load(world, recipe) if rng.random() < 0.7 else await _unload(world, recipe)
        if answer is not None and answer.status not in (503, 507):
            world.check(
                answer.status in (200, 400, 404),
                f"an adapter: {answer.status} {answer.body[:300]!r}",
            )
            world.counts[f"adapters: {answer.status}"] += 1
        await asyncio.sleep(rng.uniform(0.1, 2))


async def load(world: World, recipe: Recipe) -> Answer | None:
    body = {"lora_name": f"loaded-{recipe.name}", "lora_path": str(recipe.directory)}
    return await world.ask(Request(path="/v1/load_lora_adapter", body=body))


async def _unload(world: World, recipe: Recipe) -> Answer | None:
    return await world.ask(
        Request(path="/v1/unload_lora_adapter", body={"lora_name": f"loaded-{recipe.name}"})
    )
