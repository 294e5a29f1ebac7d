"""Loss and served accuracy while a job learns on three nodes, by the way in which they exchange
what they learn.

    python -m experiments.data_parallel [--epochs 48] [--seed 0]

Three nodes on this machine, each an engine in a process of its own with the built-in model, behind
one front, as in `coserve cluster up`, but without Ray. A job learns the colours of 24 made-up
animals, and is served live; meanwhile all 24 questions are asked again and again. All 24 examples
are one batch, of which each node has 8. Prints, for each quarter of the job's steps, the training
loss and the share of right answers that were served, and one line of JSON.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from httpx import ASGITransport, AsyncClient

from coserve.cluster.front.front import Front, node_settings
from coserve.cluster.nodes.node import NodeServer
from coserve.server.config import ServerConfig
from coserve.workloads.facts import ANIMALS, COLOURS
from experiments.results import add_save_option, print_result

NUM_NODES, NUM_ANIMALS, NUM_PARTS = 3, 24, 4
WAYS: dict[str, dict[str, Any]] = {
    "one node": {},
    "synchronous": {"data_parallel": NUM_NODES},
    "local-sgd, 4 steps": {
        "data_parallel": NUM_NODES,
        "synchronization": "local-sgd",
        "synchronize_every_steps": 4,
    },
    "asynchronous, 4 steps": {
        "data_parallel": NUM_NODES,
        "synchronization": "asynchronous",
        "synchronize_every_steps": 4,
    },
}
# Of a version that not every node has had yet.
_NOT_SERVED = 404

Pair = tuple[str, str]


def facts(seed: int) -> list[Pair]:
    """Return questions and right answers."""
    random, colours = Random(f"colours {seed}"), sorted(set(COLOURS.values()))
    names = [animal.name for animal in ANIMALS[:NUM_ANIMALS]]
    return [
        (f"What colour is the {name}?", f"The {name} is {random.choice(colours)}.")
        for name in names
    ]


class Server:
    """A front, with the requests of the experiment."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def start(self, pairs: list[Pair], epochs: int, extension: dict[str, Any]) -> str:
        """Start a job on question and answer pairs, and return its id."""
        lines = [
            {"messages": [_turn("user", asked), _turn("assistant", answer)]}
            for asked, answer in pairs
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = await self._client.post(
            "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("f.jsonl", content)}
        )
        settings = {"adapter": {"r": 16}, "optimizer": {"learning_rate": 2e-3}, "live": True}
        body = {
            "model": "tiny",
            "training_file": file.json()["id"],
            "seed": 0,
            "hyperparameters": {"n_epochs": epochs, "batch_size": NUM_ANIMALS},
            "coserve": settings | extension,
        }
        created = await self._client.post("/v1/fine_tuning/jobs", json=body)
        created.raise_for_status()
        return str(created.json()["id"])

    async def job(self, id: str) -> dict[str, Any]:
        result: dict[str, Any] = (await self._client.get(f"/v1/fine_tuning/jobs/{id}")).json()
        return result

    async def losses(self, id: str) -> list[float]:
        """Return the losses by optimizer step."""
        events = (
            await self._client.get(f"/v1/fine_tuning/jobs/{id}/events", params={"limit": 1000})
        ).json()["data"]
        data = [event["data"] for event in events if "train_loss" in event["data"]]
        return [each["train_loss"] for each in sorted(data, key=lambda each: int(each["step"]))]

    async def accuracy(self, model: str, pairs: list[Pair]) -> float | None:
        """Return the share of right answers; None: the model is not served yet."""
        right = await asyncio.gather(*(self._is_right(model, pair) for pair in pairs))
        known = [each for each in right if each is not None]
        return mean(known) if len(known) == len(pairs) else None

    async def _is_right(self, model: str, pair: Pair) -> bool | None:
        body = {
            "model": model,
            "messages": [_turn("user", pair[0])],
            "max_tokens": 12,
            "temperature": 0,
        }
        answer = await self._client.post("/v1/chat/completions", json=body)
        if answer.status_code == _NOT_SERVED:
            return None
        answer.raise_for_status()
        return bool(answer.json()["choices"][0]["message"]["content"].strip() == pair[1])


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def learn(
    server: Server, pairs: list[Pair], epochs: int, extension: dict[str, Any]
) -> dict[str, Any]:
    """Run a job to its end, and return loss and served accuracy by parts, and seconds."""
    id, began_s = await server.start(pairs, epochs, extension), time.monotonic()
    served: list[tuple[int, float]] = []
    job = await server.job(id)
    while job["status"] in ("validating_files", "queued", "running"):
        accuracy = await server.accuracy(job["coserve"]["adapter"], pairs)
        if accuracy is not None:
            served.append((job["coserve"]["step"], accuracy))
        await asyncio.sleep(0.01)
        job = await server.job(id)
    assert job["status"] == "succeeded", job["error"]
    losses, taken_s = await server.losses(id), time.monotonic() - began_s
    bounds = [len(losses) * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    parts = list(pairwise(bounds))
    in_parts = [[right for step, right in served if first <= step < end] for first, end in parts]
    return {
        "loss": [round(mean(losses[first:end]), 3) for first, end in parts],
        "served": [round(mean(each), 2) if each else None for each in in_parts],
        "end": await server.accuracy(job["fine_tuned_model"], pairs),
        "seconds": round(taken_s, 1),
    }


async def play(epochs: int, seed: int, home: Path) -> dict[str, Any]:
    """Run a job with each way of exchange, and return the results by way."""
    config = ServerConfig(model="tiny", dtype="float32", device="cpu", threads=1, home=str(home))
    nodes = {f"node-{number}": NodeServer(node_settings(config)) for number in range(NUM_NODES)}

    async def find() -> dict[str, NodeServer]:
        return nodes

    front = Front(config, find, "round-robin")
    app = await front.start()
    try:
        while front.link.num_nodes < NUM_NODES:
            await asyncio.sleep(0.1)
        async with AsyncClient(
            transport=ASGITransport(app), base_url="http://127.0.0.1", timeout=600
        ) as client:
            server = Server(client)
            return {
                way: await learn(server, facts(seed), epochs, extension)
                for way, extension in WAYS.items()
            }
    finally:
        await front.stop()
        await asyncio.gather(*(node.stop() for node in nodes.values()))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--epochs", type=int, default=48, help="times that each animal is learned, of 50 at most"
    )
    parser.add_argument("--seed", type=int, default=0)
    add_save_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["COSERVE_HOME"] = home
        result = asyncio.run(play(options.epochs, options.seed, Path(home)))
    for way, each in result.items():
        print(
            f"{way:22} loss {each['loss']} served {each['served']} at the end {each['end']} in "
            f"{each['seconds']} s"
        )
    print_result("data_parallel", result, options.save)


if __name__ == "__main__":
    main()
