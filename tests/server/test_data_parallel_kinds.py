"""Data-parallel jobs of every kind on real engines: each objective, and full fine-tuning of the
weights that serve."""

import json
from pathlib import Path
from typing import Any

import pytest
from divided import EXTENSION, NUM_STEPS, STRATEGIES, finished, losses, run
from engine_nodes import ClusterWorld, EngineNode, cluster_world
from engines import watched
from job_data import DATA, distance
from job_engine import World, world
from lengths import long_but
from safetensors.torch import load_file
from support import model_directory
from torch import Tensor

from coserve.adapters.full_weights import FullWeights
from coserve.adapters.methods.full import FullConfig
from coserve.errors import JobError
from coserve.jobs.records import JobRecord
from coserve.models import load_backbone

WORDS = ("it now", "b c d e", "is enough", "hello you", "while you serve", "one copy", "x y z")
# Seven examples of each schema, for batches of three: the last batch of an epoch has parts without
# examples.
PAIRS = [{"prompt": f"say {word} ", "chosen": word, "rejected": word[::-1]} for word in WORDS]
ANSWERS = [
    {"prompt": "say ", "completion": word, "label": number % 3 > 0}
    for number, word in enumerate(WORDS)
]
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


@pytest.mark.parametrize("objective", long_but("dpo", of=OBJECTIVES))
def test_synchronous_nodes_learn_an_objective_as_one_node_does_from_the_whole_batches(
    tmp_path: Path, objective: str
):
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
    """Return the metrics of each step that do not depend on how long it took."""
    names = {
        name
        for event in events
        for name in event.data
        if name.startswith("train_") or name == "num_tokens"
    }
    return {
        (event.data["step"], name): event.data[name]
        for event in events
        if event.kind == "step"
        for name in names
        if name in event.data
    }


# -- full fine-tuning ---------------------------------------------------------------------

FULL: dict[str, Any] = {
    "adapter": {"type": "full"},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
}


@pytest.fixture
def own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine has a model of its own: its weights are about to change."""
    monkeypatch.setattr(
        "engines.make_backbone", lambda *_: load_backbone(str(model_directory()), dtype="float32")
    )


async def create_full(made: World, *, epochs: int = 3, **extension: Any) -> JobRecord:
    return await made.create(
        DATA,
        hyperparameters={"n_epochs": epochs, "batch_size": 3},
        extension=EXTENSION | FULL | {"live": True} | extension,
        seed=4,
    )


def model_in(directory: str) -> dict[str, Tensor]:
    return load_file(Path(directory) / "model.safetensors")


def served(node: EngineNode) -> dict[str, Tensor]:
    """The weights that a node serves."""
    assert node.engine is not None
    device: Any = watched(node.engine).inner
    backbone = device.backbone
    return FullWeights(
        backbone, config := FullConfig(), config.chosen(backbone.architecture)
    ).masters


def base_weights() -> dict[str, Tensor]:
    return model_in(str(model_directory()))


def assert_all_serve(made: ClusterWorld, weights: dict[str, Tensor], atol: float = 0.0) -> None:
    for node in made.nodes.values():
        assert distance(served(node), weights) <= atol


def full_on_one_node(home: Path, **named: Any) -> tuple[list[Any], dict[int, Any]]:
    async def test() -> Any:
        async with world(home) as made:
            return await finished(made, await create_full(made, **named), model_in)

    found: tuple[list[Any], dict[int, Any]] = run(test)
    return found


def test_synchronous_nodes_train_all_weights_as_one_node_does(tmp_path: Path, own_weights: None):
    async def test() -> Any:
        async with cluster_world(tmp_path / "three") as made:
            found = await finished(
                made.world, await create_full(made.world, data_parallel=3), model_in
            )
            assert_all_serve(made, found[1][NUM_STEPS])
            return found

    events, learned = run(test)
    alone_events, expected = full_on_one_node(tmp_path / "one")
    assert learned.keys() == expected.keys() == {4, 8, NUM_STEPS}
    for step, weights in expected.items():
        assert distance(learned[step], weights) < 1e-5
    assert distance(learned[NUM_STEPS], base_weights()) > 1e-3
    assert metrics(events) == pytest.approx(metrics(alone_events), abs=1e-5)


@pytest.mark.parametrize("strategy", long_but("asynchronous", of=("local-sgd", "asynchronous")))
def test_nodes_that_go_their_own_ways_end_with_the_same_weights(
    tmp_path: Path, own_weights: None, strategy: str
):
    async def test() -> Any:
        async with cluster_world(tmp_path) as made:
            job = await create_full(made.world, epochs=12, data_parallel=3, **STRATEGIES[strategy])
            found = await finished(made.world, job, model_in)
            assert_all_serve(made, found[1][36], 1e-6)
            return found

    events, _ = run(test)
    assert sum(losses(events)[-3:]) < 0.75 * sum(losses(events)[:3])


@pytest.mark.parametrize(
    "at", long_but("after that", of=["before it has a checkpoint", "after that"])
)
@pytest.mark.parametrize("strategy", long_but("asynchronous", of=STRATEGIES))
def test_a_node_that_dies_takes_no_weights_with_it(
    tmp_path: Path, own_weights: None, strategy: str, at: str
):
    has_checkpoint = at == "after that"

    async def test() -> Any:
        async with cluster_world(tmp_path / "home") as made:
            settings = STRATEGIES[strategy] | {"checkpoint_every_steps": 4 if has_checkpoint else 0}
            job = await create_full(made.world, epochs=12, data_parallel=3, **settings)
            await made.until(lambda: made.world.job(job.id).num_steps_done >= 6)
            made.node(1).die()
            await made.until(lambda: "node-1" not in made.working(job.id) and made.working(job.id))
            made.node(1).live()
            await made.until(
                lambda: len(made.working(job.id)) == 3 or made.world.job(job.id).is_terminal
            )
            found = await finished(made.world, job, model_in)
            assert_all_serve(made, found[1][36], 1e-6)
            return found

    _, learned = run(test)
    if strategy == "synchronous":
        _, alone = full_on_one_node(tmp_path / "one", epochs=12)
        assert distance(learned[36], alone[36]) < 1e-4


def test_when_a_job_is_cancelled_all_nodes_serve_the_models_own_weights_again(
    tmp_path: Path, own_weights: None
):
    async def test() -> None:
        async with cluster_world(tmp_path) as made:
            job = await create_full(made.world, epochs=40, data_parallel=3)
            await made.until(lambda: made.world.job(job.id).num_steps_done >= 5)
            changed = {name: node.engine for name, node in made.nodes.items()}
            await made.world.manager.cancel(job.tenant, job.id)
            await made.until(
                lambda: all(node.engine is not changed[name] for name, node in made.nodes.items())
            )
            await made.until(lambda: made.num_ready() == 3)
            assert_all_serve(made, base_weights())
            again = await create_full(made.world, data_parallel=3)
            await finished(made.world, again, model_in)

    run(test)


def test_an_engine_that_starts_after_the_job_serves_what_it_has_made_beside_the_others(
    tmp_path: Path, own_weights: None
):
    async def test() -> None:
        async with cluster_world(tmp_path) as made:
            job = await create_full(made.world, data_parallel=3)
            _, learned = await finished(made.world, job, model_in)
            assert distance(learned[NUM_STEPS], base_weights()) > 1e-3
            made.node(1).die()
            await made.until(lambda: made.num_ready() == 2)
            made.node(1).live()
            await made.until(lambda: made.num_ready() == 3)
            assert_all_serve(made, learned[NUM_STEPS])
            for node in made.nodes.values():
                assert node.engine is not None
                assert job.name in node.engine.versions
            for node in made.nodes.values():  # when none is left, nobody has what the job has made
                node.die()
            await made.until(lambda: not made.num_ready())
            for node in made.nodes.values():
                node.live()
            await made.until(lambda: made.num_ready() == 3)
            assert_all_serve(made, base_weights())

    run(test)


def test_an_engine_that_cannot_have_what_the_job_has_made_is_not_used_and_says_why(
    tmp_path: Path, own_weights: None
):
    async def test() -> None:
        async with cluster_world(tmp_path) as made:
            job = await create_full(made.world, data_parallel=3)
            await finished(made.world, job, model_in)
            made.node(1).die()
            await made.until(lambda: made.num_ready() == 2)
            await made.world.manager.delete_adapter(job.tenant, job.name)
            made.node(1).live()
            await made.until(lambda: made.link.describe()[1]["refused"])
            why = made.link.describe()[1]["refused"]
            assert why.startswith("it has the weights that the model came with, job ftjob-")
            assert f"and what it made ({job.name}) cannot be loaded here: " in why
            assert made.num_ready() == 2

    run(test)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_what_compares_with_the_model_as_it_was_is_no_objective_of_full_fine_tuning(
    tmp_path: Path, objective: str
):
    async def test() -> None:
        async with world(tmp_path, alive=False) as made:
            await create(made, objective, **FULL, live=True)

    others = "supervised, orpo, policy_gradient, simpo"
    with pytest.raises(
        JobError,
        match=f"must not be full for {objective}, .*; train an adapter, or for one of {others}",
    ):
        run(test)


def test_other_objectives_train_the_models_blocks_over_nodes(tmp_path: Path, own_weights: None):
    # Gradients near zero, whose rounding AdamW would magnify, count little beside this epsilon.
    optimizer = FULL["optimizer"] | {"eps": 1e-5}
    settings = {
        "adapter": {"type": "full", "layers_to_transform": [0, 1]},
        "optimizer": optimizer,
        "live": True,
    }

    async def divided() -> Any:
        async with cluster_world(tmp_path / "three") as made:
            return await finished(
                made.world, await create(made.world, "simpo", data_parallel=3, **settings), model_in
            )

    async def alone() -> Any:
        async with world(tmp_path / "one") as made:
            return await finished(made, await create(made, "simpo", **settings), model_in)

    _, learned = run(divided)
    _, expected = run(alone)
    assert distance(learned[NUM_STEPS], expected[NUM_STEPS]) < 1e-5
    assert distance(learned[NUM_STEPS], base_weights()) > 1e-3
