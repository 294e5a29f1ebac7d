"""Data-parallel jobs of every kind on real engines: each objective, and full fine-tuning of the weights that serve."""

import json
from pathlib import Path
from typing import Any

import pytest
from divided import EXTENSION, NUM_STEPS, finished, losses, run
from engine_nodes import cluster_world
from job_data import distance
from job_engine import World, world

from coserve.jobs.records import JobRecord

WORDS = ("it now", "b c d e", "is enough", "hello you", "while you serve", "one copy", "x y z")
# Seven examples of each schema, for batches of three: the last batch of an epoch has parts without examples.
PAIRS = [{"prompt": f"say {word} ", "chosen": word, "rejected": word[::-1]} for word in WORDS]
ANSWERS = [{"prompt": "say ", "completion": word, "label": number % 3 > 0} for number, word in enumerate(WORDS)]
SAMPLED = [
    {
        "prompt_tokens": [1 + number, 2, 3],
        "completion_tokens": list(range(4, 8 + number)),
        "logprobs": [-3.0 - token / 10 for token in range(4 + number)],
        "advantages": [(-1) ** token * (0.5 + number / 5) for token in range(4 + number)],
    }
    for number in range(7)
]
OBJECTIVES: dict[str, list[Any]] = {
    "dpo": PAIRS,
    "simpo": PAIRS,
    "orpo": PAIRS,
    "kto": ANSWERS,
    "policy-gradient": SAMPLED,
}


SETTINGS = {"kto": {"beta": 1.0}}  # its reference point counts for something


async def create(made: World, objective: str, *, epochs: int = 3, **extension: Any) -> JobRecord:
    return await made.create(
        "".join(json.dumps(line) + "\n" for line in OBJECTIVES[objective]).encode(),
        hyperparameters={"n_epochs": epochs, "batch_size": 3} | SETTINGS.get(objective, {}),
        extension=EXTENSION | extension,
        objective=objective,
        seed=4,
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_synchronous_nodes_learn_an_objective_as_one_node_does_from_the_whole_batches(tmp_path: Path, objective: str):
    async def divided() -> Any:
        async with cluster_world(tmp_path / "three") as made:
            return await finished(made.world, await create(made.world, objective, data_parallel=3))

    async def alone() -> Any:
        async with world(tmp_path / "one") as made:
            return await finished(made, await create(made, objective))

    events, learned = run(divided)
    alone_events, expected = run(alone)
    assert learned.keys() == expected.keys() == {4, 8, NUM_STEPS}
    for step, parameters in expected.items():
        assert distance(learned[step], parameters) < 1e-5
    assert losses(events) == pytest.approx(losses(alone_events), abs=1e-5)
    assert metrics(events) == pytest.approx(metrics(alone_events), abs=1e-5)


def metrics(events: list[Any]) -> dict[tuple[int, str], float]:
    """Of each step, what does not depend on how long it took."""
    names = {name for event in events for name in event.data if name.startswith("train_") or name == "num_tokens"}
    return {
        (event.data["step"], name): event.data[name]
        for event in events
        if event.kind == "step"
        for name in names
        if name in event.data
    }
