"""A job that was begun by any number of ranks is resumed by any other: on disk everything is
whole."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Barrier

import pytest
import torch
from lengths import long_but
from peft_methods import CASES, config_of
from rank_training import (
    CONFIG,
    distance,
    make_driver,
    num_trained,
    own_copy,
    packs,
    parameters_of,
    put_together,
    trainer_of,
)
from ranks import whole_backbone
from safetensors.torch import load_file, save_file

from coserve.adapters import LoraConfig
from coserve.adapters.methods.full import FullConfig
from coserve.devices.messages.jobs import (
    OPTIMIZER_FILE,
    CombineContributions,
    OpenTrainer,
    ReadContributions,
    TakeCheckpoint,
    TakeContribution,
    WriteCheckpoint,
)
from coserve.devices.messages.steps import Update
from coserve.devices.ranks.rank_device import RankDevice
from coserve.devices.torch.device import TorchDevice
from coserve.errors import AdapterError, RankError
from coserve.kernels.groups.threads import run_ranks, thread_groups
from coserve.models.dividing import divided_backbone
from coserve.models.shared_files import named_when_written
from coserve.tuning.shard import Shard

LORA = LoraConfig(r=4, target_modules="all-linear")
METHODS = {
    "lora": (LORA, "qwen2"),
    **{
        case: (config_of(case), CASES[case].families[0]) for case in sorted(CASES.keys() - {"lora"})
    },
    "fused": (LORA, "phi3"),
    "experts": (LoraConfig(r=4, target_parameters=("mlp.experts.down_proj",)), "mixtral"),
    "full": (FullConfig(), "llama-biases-tied"),
    "full-fused": (FullConfig(), "gpt2"),
    "full-experts": (FullConfig(), "qwen3-moe"),
}
SHORT = ["lora", "diff-pruning", "full-fused"]
NUM_STEPS = 4


class Job:
    """A job on one rank's device."""

    def __init__(self, backbone, config, *, checkpoint=None, **more):
        self.config, tuning = config, CONFIG
        self.driver = make_driver(backbone)
        if config.is_model:
            tuning = replace(tuning, live=True)
        source = {"checkpoint": str(checkpoint)} if checkpoint is not None else {}
        self.opened = self.driver.open_trainer(
            "job", tuning, adapter=config.to_peft(), **source, **more
        )

    def train(self, steps):
        found = packs(NUM_STEPS, self.config.num_virtual_tokens)
        for step in steps:
            self.driver.train("job", self.opened, found[step], window=9, tasklet=9)
            self.driver.step(updates=[Update("job", num_trained(found[step]), NUM_STEPS)])
            self.driver.reuse_pages()

    def write(self, directory):
        self.driver.device.execute(TakeCheckpoint("job", "copy"))
        self.driver.device.execute(WriteCheckpoint("copy", str(directory)))

    @property
    def trainer(self):
        return trainer_of(self.driver, "job")

    @property
    def parameters(self):
        return parameters_of(self.trainer)


def on_ranks(whole, size, run):
    def on_rank(group):
        return run(divided_backbone(own_copy(whole), group) if size > 1 else own_copy(whole))

    return run_ranks(size, on_rank)


def whole_parameters(jobs, like):
    return put_together([job.parameters for job in jobs], like, jobs[0].trainer.states)


@pytest.mark.parametrize("method", long_but(*SHORT, of=METHODS))
def test_a_job_of_ranks_resumes_on_any_other_number_of_them(method, tmp_path):
    """Each number of ranks resumes with the same bits, and would write the same bits again."""
    config, family = METHODS[method]
    whole = whole_backbone(family)

    def begin(backbone):
        job = Job(backbone, config)
        job.train(range(2))
        job.write(tmp_path)
        return job

    with named_when_written(tmp_path):
        begun = on_ranks(whole, 2, begin)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert OPTIMIZER_FILE in files
    resumed = {}
    for size in (1, 2, 4):
        (directory := tmp_path / str(size)).mkdir()

        def resume(backbone, directory=directory):
            job = Job(backbone, config, checkpoint=tmp_path)
            at_first = job.parameters
            job.write(directory)
            job.train(range(2, NUM_STEPS))
            return job, at_first

        with named_when_written(directory):
            resumed[size] = on_ranks(whole, size, resume)
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
    [(alone, at_first)] = resumed[1]
    before = whole_parameters(begun, at_first)
    assert all(torch.equal(before[name], value) for name, value in at_first.items())
    moved = distance(alone.parameters, at_first)
    for size in (2, 4):
        jobs = [job for job, _ in resumed[size]]
        assert distance(whole_parameters(jobs, at_first), alone.parameters) < 1e-5 * moved


# -- data parallelism -----------------------------------------------------------------------


def on_nodes(whole, sizes, run):
    """Return what a function gives on every rank of nodes, each of which has a group of this size:
    by node and rank."""
    meeting = Barrier(sum(sizes), timeout=60)

    def on_rank(node, group):
        try:
            with torch.inference_mode(False):
                backbone = (
                    divided_backbone(own_copy(whole), group) if group.size > 1 else own_copy(whole)
                )
                return run(node, backbone, meeting)
        except BaseException as error:
            group.fail(str(error))
            meeting.abort()
            raise

    with ThreadPoolExecutor(sum(sizes)) as pool:
        tasks = [
            [pool.submit(on_rank, node, group) for group in thread_groups(size)]
            for node, size in enumerate(sizes)
        ]
    return [[task.result() for task in of_node] for of_node in tasks]


def exchange(job, directories, node, up_to, meeting):
    """Give what the node has to give, and take in what all have given."""
    is_first, device = job.driver.device.backbone.group.rank == 0, job.driver.device
    directory = directories[node]
    if is_first:
        directory.mkdir()
    with named_when_written(directory) if is_first else nullcontext():
        meeting.wait()
        device.execute(TakeContribution("job", str(directory)))
        device.execute(WriteCheckpoint(str(directory), str(directory)))
        meeting.wait()
    meeting.wait()
    device.execute(ReadContributions("job", tuple(map(str, directories))))
    device.execute(CombineContributions("job", up_to, meets=True))


SHARED = {
    "lora": (LORA, "qwen2"),
    "fused": (LORA, "phi3"),
    "diff-pruning": (config_of("diff-pruning"), "qwen2"),
    "p-tuning": (config_of("p-tuning"), "gptj"),
    "full": (FullConfig(), "opt"),
}


@pytest.mark.parametrize("synchronization", ["synchronous", "local-sgd"])
@pytest.mark.parametrize("method", long_but("lora", of=SHARED))
def test_nodes_of_different_numbers_of_ranks_train_together(method, synchronization, tmp_path):
    config, family = SHARED[method]
    whole = whole_backbone(family)
    is_first = synchronization == "synchronous"

    def run(node, backbone, meeting, directory):
        shard = Shard(
            index=node,
            count=2,
            synchronization=synchronization,
            every_steps=1,
            meet_every_steps=1,
            directory=str(directory),
        )
        job, found = (
            Job(backbone, config, shard=shard),
            packs(2 * NUM_STEPS, config.num_virtual_tokens),
        )
        at_first = job.parameters
        for step in range(NUM_STEPS):
            own = found[2 * step : 2 * step + 2]
            job.driver.train("job", job.opened, own[node], window=9, tasklet=9)
            given = [directory / f"{step}-{number}" for number in range(2)]
            if is_first:
                exchange(job, given, node, 2 * (step + 1), meeting)
            trained = sum(map(num_trained, own)) if is_first else num_trained(own[node])
            job.driver.step(updates=[Update("job", trained, NUM_STEPS)])
            if not is_first:
                exchange(job, given, node, 2 * (step + 1), meeting)
            job.driver.reuse_pages()
        return job, at_first

    results = {}
    for sizes in ((1, 1), (2, 1), (2, 4)):
        (directory := tmp_path / str(sizes)).mkdir()
        results[sizes] = on_nodes(whole, sizes, partial(run, directory=directory))
    [(alone, at_first)], _ = results[1, 1]
    moved = distance(alone.parameters, at_first)
    assert moved > 0
    for nodes in results.values():
        first, second = (whole_parameters([job for job, _ in ranks], at_first) for ranks in nodes)
        assert distance(first, alone.parameters) < 1e-5 * moved
        assert distance(second, first) < 1e-5 * moved


def test_a_checkpoint_that_one_rank_cannot_read_leaves_the_served_weights_of_all(tmp_path):
    whole, tuning, config = whole_backbone("llama"), replace(CONFIG, live=True), FullConfig()

    def begin(group):
        driver = make_driver(divided_backbone(own_copy(whole), group))
        driver.open_trainer("job", tuning, adapter=config.to_peft())
        with torch.inference_mode():
            for master in trainer_of(driver, "job").adapter.masters.values():
                master.mul_(1.5)
        driver.device.execute(TakeCheckpoint("job", "copy"))
        driver.device.execute(WriteCheckpoint("copy", str(tmp_path)))

    with named_when_written(tmp_path):
        run_ranks(2, begin)
    tensors = load_file(tmp_path / OPTIMIZER_FILE)
    tensors["model.layers.0.mlp.gate_proj.weight/value"][-1, 0] = float(
        "nan"
    )  # in the rows of rank 1
    save_file(tensors, tmp_path / OPTIMIZER_FILE, metadata={"format": "pt"})

    def resume(group):
        backbone = divided_backbone(own_copy(whole), group)
        inner = make_driver(backbone).device
        assert isinstance(inner, TorchDevice)
        device = RankDevice(inner, group)
        before = [tensor.clone() for tensor in weights_of(backbone)]
        command = OpenTrainer(
            job="job",
            config=tuning,
            mean_context_len=8.0,
            adapter=config.to_peft(),
            checkpoint=str(tmp_path),
        )
        with pytest.raises(AdapterError if group.rank else RankError):
            device.execute(command)
        return all(map(torch.equal, before, weights_of(backbone)))

    assert run_ranks(2, resume) == [True, True]


def weights_of(backbone):
    """Return the tensors of all weights that serve."""
    values = [value for weights in backbone.weights.values() for value in weights.values()]
    return [value if isinstance(value, torch.Tensor) else value.tensors()[0] for value in values]
