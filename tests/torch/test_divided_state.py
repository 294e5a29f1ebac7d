"""Files of a job's training on ranks, its optimizer's state and its contributions, are those of one
rank.
"""

import pytest
import torch
from peft_methods import config_of
from ranks import random_masters, whole_backbone
from safetensors.torch import load_file, save_file

from coserve.adapters import Adapter, LoraConfig
from coserve.adapters.full_weights import FullWeights
from coserve.adapters.held_tensors import HeldTensors
from coserve.adapters.methods.full import FullConfig
from coserve.devices.messages.jobs import OPTIMIZER_FILE
from coserve.devices.torch.copies import TorchCheckpoint, TorchCopy, read_state
from coserve.devices.torch.exchange import CONTRIBUTION_FILE, TorchExchange
from coserve.errors import AdapterError
from coserve.graph.layouts import WHOLE
from coserve.kernels.groups.base import Ranks
from coserve.kernels.groups.threads import run_ranks
from coserve.models.dividing import divided_backbone
from coserve.models.shared_files import named_when_written
from coserve.models.shares import piece
from coserve.tuning.config import OptimizerConfig
from coserve.tuning.optimizer import AdapterOptimizer
from coserve.tuning.shard import Shard

MOMENTS = ("exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")
CASES = {
    "lora": ("qwen2", LoraConfig(r=4, target_modules="all-linear")),
    "bias of rank 0": ("opt", config_of("bitfit")),
    "padded vocabulary": (
        "llama-biases-tied",
        LoraConfig(r=4, target_modules=("q_proj", "embed_tokens")),
    ),
    "fused": ("phi3", LoraConfig(r=4, target_modules=("qkv_proj", "gate_up_proj"))),
}


def of_rank(tensors, held):
    """The rank's pieces of whole tensors, by name."""
    return {
        name: piece(
            each,
            held.states.get(name, held.states.get(name.rpartition("/")[0], WHOLE)),
            held.ranks.rank,
        )
        if each.ndim
        else each
        for name, each in tensors.items()
    }


def held_on(adapter):
    return HeldTensors(states=adapter.graphs.states, ranks=adapter.backbone.ranks)


def trained(adapter, num_steps=2):
    """An optimizer that has made steps with random gradients."""
    optimizer = AdapterOptimizer(adapter.masters, OptimizerConfig(learning_rate=1e-2))
    generator = torch.Generator().manual_seed(3)
    for _ in range(num_steps):
        gradients = {
            name: torch.randn(each.shape, generator=generator)
            for name, each in adapter.masters.items()
        }
        optimizer.step(gradients, num_trained=1, num_steps=10)
    return optimizer


def adapters_of(whole, config, size, masters=None):
    def make(group):
        return Adapter(
            divided_backbone(whole, group) if size > 1 else whole, config, masters=masters
        )

    return run_ranks(size, make)


def write_all(copies, directory):
    directory.mkdir()
    with named_when_written(directory):
        for copy in reversed(copies):
            copy.write(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_ranks_is_one_ranks(case, tmp_path):
    family, config = CASES[case]
    whole = whole_backbone(family)
    [alone] = adapters_of(whole, config, 1, random_masters(whole, config))
    state = trained(alone).state()
    assert len(state) == 1 + 3 * len(alone.masters)
    held = held_on(alone)
    expected = write_all([TorchCheckpoint(alone, state, held)], tmp_path / "alone")
    assert OPTIMIZER_FILE in expected
    for size in (2, 4):
        adapters = adapters_of(whole, config, size, alone.masters)
        copies = [
            TorchCheckpoint(each, of_rank(state, held_on(each)), held_on(each)) for each in adapters
        ]
        assert write_all(copies, tmp_path / str(size)) == expected
        for adapter in adapters:
            read = read_state(
                tmp_path / "alone" / OPTIMIZER_FILE, adapter.masters, held_on(adapter)
            )
            assert_same(read, of_rank(state, held_on(adapter)))
            optimizer = AdapterOptimizer(adapter.masters, OptimizerConfig())
            optimizer.load_state(read)
            assert optimizer.num_steps_done == 2
    assert_same(read_state(tmp_path / "4" / OPTIMIZER_FILE, alone.masters, held), state)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def test_masters_of_a_whole_model_are_read_by_pieces(tmp_path):
    whole = whole_backbone("gpt2")

    def make(group):
        backbone, config = divided_backbone(whole, group) if group.size > 1 else whole, FullConfig()
        return FullWeights(backbone, config, config.chosen(backbone.architecture))

    [alone] = run_ranks(1, make)
    held_on(alone).write(tmp_path / OPTIMIZER_FILE, alone.state())
    for weights in run_ranks(2, make):
        read = read_state(tmp_path / OPTIMIZER_FILE, weights.masters, held_on(weights))
        assert_same(read, weights.state())


@pytest.mark.parametrize("fault", ["nan", "shape", "cut short"])
def test_a_state_that_is_damaged_is_refused(fault, tmp_path):
    family, config = CASES["lora"]
    whole, path = whole_backbone(family), tmp_path / OPTIMIZER_FILE
    [alone] = adapters_of(whole, config, 1)
    held_on(alone).write(path, trained(alone).state())
    tensors = load_file(path)
    name = next(name for name in tensors if "q_proj.lora_B" in name and name.endswith("exp_avg"))
    if fault == "shape":
        tensors[name] = tensors[name][::2].clone()  # as many rows as a rank has
    else:
        tensors[name][-1] = float("nan")
    save_file(tensors, path)
    if fault == "cut short":
        path.write_bytes(path.read_bytes()[:-4])
    found = []
    for adapter in adapters_of(whole, config, 2):
        try:
            read_state(path, adapter.masters, held_on(adapter))
            found.append("")
        except AdapterError as error:
            found.append(str(error))
    words = {
        "nan": "numbers that are NaN",
        "shape": "must have the shape [32, 4]",
        "cut short": "damaged or cut short",
    }
    assert words[fault] in found[1] and bool(found[0]) == (fault != "nan"), (
        "a NaN is seen by the rank that has it"
    )


def shard(**settings):
    usual = {"index": 0, "count": 2, "every_steps": 1, "meet_every_steps": 1, "directory": ""}
    return Shard(**{**usual, **settings})


@pytest.mark.parametrize("synchronization", ["synchronous", "local-sgd", "asynchronous"])
@pytest.mark.parametrize("case", ["lora", "bias of rank 0", "fused"])
def test_nodes_of_other_numbers_of_ranks_take_each_others_contributions(
    case, synchronization, tmp_path
):
    family, config = CASES[case]
    whole = whole_backbone(family)
    own = shard(synchronization=synchronization)
    given = {}
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        given[number] = {
            f"{name}{field}": torch.randn(each.shape, generator=generator)
            for name, each in Adapter(whole, config).masters.items()
            for field in ("", *(() if own.gives_gradients else (f"/{field}" for field in MOMENTS)))
        }
    results = {}
    for sizes in ((1, 1), (2, 4), (4, 1)):
        directories = tuple(str(tmp_path / f"{sizes}-{number}") for number in range(2))
        for number, size in enumerate(sizes):
            copies = [
                TorchCopy(of_rank(given[number], held_on(each)), held_on(each), CPU)
                for each in adapters_of(whole, config, size)
            ]
            assert set(write_all(copies, tmp_path / f"{sizes}-{number}")) == {CONTRIBUTION_FILE}
        for adapter in adapters_of(whole, config, sizes[0], random_masters(whole, config)):
            results[sizes, adapter.backbone.ranks] = adapter, taken_in(own, adapter, directories)
    _, expected = results[(1, 1), Ranks(rank=0, size=1)]
    assert len(results) == 1 + 2 + 4
    for adapter, found in results.values():
        assert_same(found, of_rank(expected, held_on(adapter)))


def taken_in(shard, adapter, directories):
    """The sum of gradients, or what values and moments are after others' progress."""
    optimizer = AdapterOptimizer(adapter.masters, OptimizerConfig())
    zeros = {
        f"{name}/{field}": torch.zeros_like(each)
        for name, each in adapter.masters.items()
        for field in MOMENTS
    }
    steps = {f"{name}/step": torch.tensor(0.0) for name in adapter.masters}
    optimizer.load_state({"num_steps_done": torch.tensor(0), **steps, **zeros})
    exchange = TorchExchange(shard, adapter.masters, held_on(adapter))
    exchange.begin()
    exchange.read(directories)
    if shard.gives_gradients:
        return exchange.sum_of(2)
    exchange.advance(2, optimizer, meets=True)
    return {**adapter.masters, **optimizer.moments}


def test_a_contribution_of_another_job_is_refused(tmp_path):
    family, config = CASES["lora"]
    whole = whole_backbone(family)
    for adapter in adapters_of(whole, config, 2):
        local = {name: each.clone() for name, each in adapter.masters.items()}
        save_file(local, tmp_path / CONTRIBUTION_FILE)
        exchange = TorchExchange(
            shard(synchronization="synchronous"), adapter.masters, held_on(adapter)
        )
        with pytest.raises(AdapterError, match="is no contribution to this job"):
            exchange.read((str(tmp_path),))
