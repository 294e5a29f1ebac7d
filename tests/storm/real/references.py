"""What a server that nothing disturbs makes of the storm's jobs and prompts; the storm's has to
make the same."""

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from job_data import adapter_in
from storm.real.clients import NUM_TOKENS
from storm.real.http import Request, ask, upload
from storm.real.server import StormServer
from storm.real.world import Recipe

_PROMPTS = ("The quick brown", "How are you", "weights", "x", "What is 3? ", "日本", "one " * 60)
_LIMIT_S = 300.0


def _recipes(seed: int) -> list[Recipe]:
    """Jobs that differ in data, length, adapter and how often they are written down."""
    rng = Random(f"{seed} recipes")
    made = []
    for index, rank in enumerate((2, 4, 8)):
        lines = (
            json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n * rank}."})
            for n in range(24)
        )
        hyperparameters = {"n_epochs": rng.choice((4, 10)), "batch_size": rng.choice((2, 3, 8))}
        extension = {
            "adapter": {
                "type": "lora",
                "r": rank,
                "target_modules": "all-linear",
                "dropout": rng.choice((0, 0.1)),
            },
            "optimizer": {"learning_rate": 5e-3},
            "checkpoint_every_steps": rng.choice((3, 10)),
        }
        method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        body = {"model": "small", "seed": index, "method": method, "coserve": extension}
        num_steps = hyperparameters["n_epochs"] * -(-24 // hyperparameters["batch_size"])
        data = "\n".join(lines).encode()
        given: dict[str, Any] = {
            "name": f"r{rank}",
            "body": body,
            "data": data,
            "num_steps": num_steps,
        }
        made.append(Recipe(**given, adapter={}, directory=Path(), answers={}))
    return made


async def references(
    seed: int, directory: Path, server: StormServer
) -> tuple[tuple[Recipe, ...], Mapping[str, str]]:
    """The recipes with what they make, and what the base answers to each prompt. The server is
    ready, and nobody else asks it.
    """
    recipes = [await _run(recipe, directory, server) for recipe in _recipes(seed)]
    return tuple(recipes), await _answers(server, "small")


async def _run(recipe: Recipe, directory: Path, server: StormServer) -> Recipe:
    file = await _ask(server, upload(recipe.data))
    body = {**recipe.body, "training_file": file["id"]}
    job = await _ask(server, Request(path="/v1/fine_tuning/jobs", body=body))
    while job["status"] not in ("succeeded", "failed"):
        await asyncio.sleep(0.2)
        job = await _ask(server, Request(method="GET", path=f"/v1/fine_tuning/jobs/{job['id']}"))
    assert job["status"] == "succeeded", job
    (made,) = (server.home / "jobs" / job["id"] / "checkpoints").glob(f"step-{recipe.num_steps}*")
    kept = directory / recipe.name
    shutil.copytree(made, kept)
    answers = await _answers(server, job["fine_tuned_model"])
    return replace(recipe, adapter=adapter_in(kept), directory=kept, answers=answers)


async def _answers(server: StormServer, model: str) -> dict[str, str]:
    found = {}
    for prompt in _PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        found[prompt] = (await _ask(server, Request(path="/v1/completions", body=body)))["choices"][
            0
        ]["text"]
    return found


async def _ask(server: StormServer, request: Request) -> Any:
    answer = await ask(server.port, request, limit_s=_LIMIT_S)
    assert answer.status == 200, answer
    return answer.json()
