"""Optimizer steps on a model that is divided among ranks train what they train on one rank."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from lengths import long_but
from peft_methods import CASES, config_of
from rank_training import (
    CONFIG,
    assert_trained_alike,
    make_driver,
    num_trained,
    on_ranks,
    own_copy,
    packs,
    parameters_of,
    put_together,
    train_job,
    trainer_of,
)
from ranks import together, whole_backbone
from support import make_backbone, worst_error

from coserve.adapters import LoraConfig
from coserve.adapters.methods.diff_pruning import kth_largest
from coserve.adapters.methods.full import FullConfig
from coserve.devices.messages.jobs import PublishVersion, TakeCheckpoint
from coserve.devices.messages.steps import LossRows, Tasklets, Update, WindowRows
from coserve.graph.layouts import FIRST, WHOLE
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.threads import run_ranks
from coserve.models.shared_files import named_when_written
from coserve.tuning.shard import Shard

EVERY = [(case, family) for case, found in CASES.items() for family in found.families]
SHORT = [("lora", "gptj"), ("dora", "qwen2"), ("pissa", "qwen2"), ("prefix-projection", "qwen2")]
SHORT += [
    ("p-tuning", "gptj"),
    ("diff-pruning", "qwen2"),
    ("bitfit", "opt"),
    ("lora-whole", "llama-biases-tied"),
]
LORA = LoraConfig(r=4, target_modules="all-linear")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# With dropout and magnitudes.
RICH = LoraConfig(
    r=4, dropout=0.3, use_dora=True, target_modules=("q_proj", "v_proj", "o_proj", "down_proj")
)
STEPPED = ["lora", "dropout", "p-tuning"]


def check(whole, config, tuning=CONFIG, *, size=2, **more):
    alone = train_job(whole, config, tuning, **more)
    found = on_ranks(whole, size, lambda backbone: train_job(backbone, config, tuning, **more))
    assert_trained_alike(found, alone)
    return found, alone


@pytest.mark.parametrize("method", long_but(*SHORT, of=EVERY), ids=str)
def test_a_method_trains_as_on_one_rank(method):
    case, family = method
    check(whole_backbone(family), config_of(case))


@pytest.mark.parametrize(
    "method",
    long_but(
        ("lora", "qwen2"), of=[("lora", "qwen2"), ("prefix-projection", "qwen2"), ("dora", "gptj")]
    ),
)
def test_four_ranks_train_as_one(method):
    """Qwen 2 has two key heads here, each of which two ranks hold."""
    case, family = method
    found, _ = check(whole_backbone(family), config_of(case), size=4)
    has_copies = any(
        isinstance(state, Cut) and not state.is_disjoint for state in found[0].states.values()
    )
    assert has_copies == (method == ("lora", "qwen2"))


@pytest.mark.parametrize(
    "family", long_but("phi3", of=["phi3", "falcon-old", "falcon-new-one-norm"])
)
def test_key_heads_of_a_fused_projection_have_the_same_bits_on_the_ranks_that_hold_them(family):
    """`put_together` compares them."""
    size = 2 if family == "falcon-old" else 4
    found, _ = check(whole_backbone(family), LORA, size=size)
    assert any(
        isinstance(state, Cut) and not state.is_disjoint for state in found[0].states.values()
    )


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen2", LoraConfig(r=4, target_modules=("q_proj", "embed_tokens", "lm_head"))),
        ("gpt-oss", LoraConfig(r=4, target_modules=("q_proj",), target_parameters=EXPERTS)),
        ("opt", LoraConfig(r=4, lora_bias=True, target_modules=("q_proj", "fc2"))),
    ],
    ids=["embeddings", "experts", "biases"],
)
def test_a_lora_elsewhere_trains_as_on_one_rank(family, config):
    check(whole_backbone(family), config)


def test_a_padded_vocabulary_trains_as_a_whole_one():
    """Nobody has the last entries of the last rank's piece, which stay zero."""
    found, _ = check(whole_backbone("qwen2"), config_of("lora-whole"), size=4)
    [cut] = {state for name, state in found[0].states.items() if name.startswith("lm_head")}
    assert cut.is_padded
    for name in ("lm_head.modules_to_save.weight", "model.embed_tokens.modules_to_save.weight"):
        assert not found[-1].after[name][cut.num_held(3) :].any()


def test_tokens_that_embeddings_and_head_share_train_as_on_one_rank():
    config = LoraConfig(r=4, target_modules=("q_proj",), trainable_token_indices=(3, 5, 40))
    check(whole_backbone("llama-biases-tied"), config)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_the_norm_that_clips_is_that_of_all_ranks(max_grad_norm):
    tuning = replace(CONFIG, optimizer=replace(CONFIG.optimizer, max_grad_norm=max_grad_norm))
    _, alone = check(whole_backbone("qwen2"), RICH, tuning)
    assert all(norm > 0.05 for norm in alone.norms)


def test_gradients_of_several_packs_are_added_up_before_ranks_add_theirs():
    check(whole_backbone("qwen2"), LORA, num_steps=2, packs_per_step=3)


@pytest.mark.parametrize("kind", ["cut", "summed"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(kind):
    name = {"cut": "self_attn.q_proj.lora_B.weight", "summed": "self_attn.o_proj.lora_B.weight"}[
        kind
    ]

    def spoil(trainer, step):
        if (
            step == 1
            and trainer.adapter.backbone.ranks.rank == trainer.adapter.backbone.ranks.size - 1
        ):
            trainer._last[f"model.layers.0.{name}"][0, 0] = torch.inf

    found, alone = check(whole_backbone("qwen2"), LORA, before_update=spoil)
    assert [norm is None for norm in alone.norms] == [False, True, False]
    assert found[1].norms == found[0].norms


def test_what_rank_0_alone_holds_stays_zero_on_others():
    found, _ = check(whole_backbone("opt"), config_of("bitfit"))
    first = [name for name, state in found[0].states.items() if state is FIRST]
    assert first and all(
        found[0].after[name].any() and not found[1].after[name].any() for name in first
    )


def test_two_jobs_step_in_one_step():
    whole, configs = whole_backbone("qwen2"), {"a": LORA, "b": config_of("ia3")}

    def train(backbone):
        driver, found = make_driver(backbone), {}
        for step in range(2):
            for number, (job, config) in enumerate(configs.items()):
                if not step:
                    found[job] = driver.open_trainer(job, CONFIG, adapter=config.to_peft())
                driver.train(job, found[job], packs(4)[2 * step + number])
            updates = [Update(job, 17, 2) for job in configs]
            norms = driver.step(updates=updates).norms
        trainers = {job: trainer_of(driver, job) for job in configs}
        return norms, {job: parameters_of(each) for job, each in trainers.items()}, trainers

    norms, alone, _ = train(whole)
    found = on_ranks(whole, 2, train)
    for job in configs:
        assert found[0][0][job] == found[1][0][job] == pytest.approx(norms[job], rel=1e-5)
        after = put_together([each[1][job] for each in found], alone[job], found[0][2][job].states)
        for name, value in alone[job].items():
            torch.testing.assert_close(after[name], value, atol=1e-6, rtol=1e-5)


FULL = [
    ("opt", 2),
    ("llama-biases-tied", 2),
    ("gpt2", 2),
    ("qwen3-next", 2),
    ("mixtral", 2),
    ("phi3", 4),
]


@pytest.mark.parametrize("model", long_but(("opt", 2), ("phi3", 4), of=FULL), ids=str)
def test_the_weights_of_a_divided_model_are_trained_as_on_one_rank(model):
    """The served weights are what is trained, so every rank has a model of its own here."""
    family, size = model
    whole, tuning = whole_backbone(family), replace(CONFIG, live=True)
    alone = train_job(own_copy(whole), FullConfig(), tuning)
    found = on_ranks(
        whole, size, lambda backbone: train_job(own_copy(backbone), FullConfig(), tuning)
    )
    assert_trained_alike(found, alone)
    assert any(state is WHOLE for state in found[0].states.values())


@pytest.mark.parametrize("case", ["lora", "diff-pruning", "p-tuning", "prefix-projection"])
def test_versions_are_pieces_of_what_one_rank_publishes(case):
    whole, config = whole_backbone("qwen2"), config_of(case)

    def train(backbone):
        driver = make_driver(backbone)
        opened = driver.open_trainer("job", CONFIG, adapter=config.to_peft())
        [sequences] = packs(1, config.num_virtual_tokens)
        driver.train("job", opened, sequences)
        driver.step(updates=[Update("job", num_trained(sequences), 1)])
        driver.device.execute(PublishVersion("job", "version"))
        device: Any = driver.device
        version = device._versions["version"]
        return version.masters, version.graphs.states

    alone, _ = train(whole)
    found = on_ranks(whole, 2, train)
    together = put_together([masters for masters, _ in found], alone, found[0][1])
    for name, value in alone.items():
        assert torch.equal(together[name] == 0, value == 0), "the same elements are kept"
        torch.testing.assert_close(together[name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "objective", long_but("dpo", "policy-gradient", of=["dpo", "orpo", "kto", "policy-gradient"])
)
def test_an_objective_over_sequences_trains_as_on_one_rank(objective):
    """Losses, and with them the weights of rows, are the same on all ranks."""
    whole, tuning = whole_backbone("qwen2"), replace(CONFIG, objective=objective)
    sequences = [each for pack in packs(2) for each in pack][:4]
    num_rows, num_lost = sum(len(tokens) for tokens, _ in sequences), num_trained(sequences)
    extras: dict[str, Any] = {}
    if (
        objective == "policy-gradient"
    ):  # of each token an advantage, and its log-probability when it was drawn
        extras["values"] = tuple((1 - number % 3, -4.5) for number in range(num_lost))
    elif objective == "kto":
        extras["labels"] = (1.0, 0.0, 1.0, 0.0)

    def run(driver, opened, is_reference):
        begun = driver.begin_command("job", opened, sequences, evaluate=is_reference)
        driver.device.execute(msgspec.structs.replace(begun, is_reference=is_reference, **extras))
        driver.step(windows=[WindowRows("job", num_rows)])
        result = driver.step(losses=[LossRows("job", num_lost)])
        return (
            result
            if is_reference
            else driver.step(tasklets=[Tasklets("job", num_rows, opened.trained_parts)])
        )

    def train(backbone):
        driver, sums = make_driver(backbone), []
        opened = driver.open_trainer("job", tuning, adapter=LORA.to_peft())
        for _ in range(2):
            if tuning.needs_reference:
                run(driver, opened, True)
            sums.append(run(driver, opened, False).packs["job"])
            driver.step(updates=[Update("job", sums[-1].num_trained, 2)])
        trainer = trainer_of(driver, "job")
        return sums, parameters_of(trainer), trainer.states

    sums, alone, _ = train(whole)
    found = on_ranks(whole, 2, train)
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][0], sums, strict=True):
        assert (
            ours.loss == pytest.approx(theirs.loss, rel=1e-5)
            and ours.num_correct == theirs.num_correct
        )
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-5)
    after = put_together([each[1] for each in found], alone, found[0][2])
    for name, value in alone.items():
        torch.testing.assert_close(after[name], value, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("config", [LORA, config_of("lora-whole")], ids=["lora", "whole"])
def test_an_evaluation_measures_what_it_measures_on_one_rank(config):
    whole = whole_backbone("qwen2")

    def measure(backbone):
        driver = make_driver(backbone)
        opened, [sequences] = driver.open_trainer("job", CONFIG, adapter=config.to_peft()), packs(1)
        driver.begin("job", opened, sequences, evaluate=True)
        driver.step(windows=[WindowRows("job", 1000)])
        return driver.step(losses=[LossRows("job", 1000)]).packs["job"]

    alone, found = measure(whole), on_ranks(whole, 2, measure)
    assert found[0] == found[1]
    assert (
        found[0].loss == pytest.approx(alone.loss, rel=1e-5)
        and found[0].num_correct == alone.num_correct
    )


def test_packs_in_blocks_that_no_plan_changes_train_on_ranks():
    whole = make_backbone("llama").deterministic()
    check(whole, LORA)


@pytest.mark.parametrize(
    ("case", "num_steps"),
    [("lora", 10), *(pytest.param(each, 200, marks=pytest.mark.long) for each in STEPPED)],
)
def test_what_all_ranks_hold_has_the_same_bits_after_many_steps(case, num_steps):
    whole, config = whole_backbone("qwen2"), {"dropout": RICH}.get(case) or config_of(case)
    found = on_ranks(
        whole, 4, lambda backbone: train_job(backbone, config, num_steps=num_steps, rows=1000)
    )
    before, after, states = found[0].before, [each.after for each in found], found[0].states
    whole_shapes = {
        name: value.shape for name, value in train_job(whole, config, num_steps=0).before.items()
    }
    alike = [name for name in before if states.get(name, WHOLE) is WHOLE]
    assert alike and not any(torch.equal(after[0][name], before[name]) for name in alike)
    for each in after[1:]:
        assert all(torch.equal(each[name], after[0][name]) for name in alike)
    for name in before.keys() - set(alike):  # of a cut, what several ranks hold
        together([each[name] for each in after], whole_shapes[name], states[name], is_summed=False)


def test_what_a_node_of_ranks_gives_other_nodes_is_its_whole_gradient():
    """Added up once: neither before the next try of a command that failed, nor in the optimizer
    step."""
    whole = whole_backbone("qwen2")
    shard = Shard(
        index=0,
        count=1,
        synchronization="synchronous",
        every_steps=1,
        meet_every_steps=0,
        directory="",
    )

    def train(backbone):
        driver, [sequences] = make_driver(backbone), packs(1)
        opened = driver.open_trainer("job", CONFIG, adapter=LORA.to_peft(), shard=shard)
        driver.train("job", opened, sequences)
        trainer = trainer_of(driver, "job")
        trainer._join_last()
        trainer._complete()
        given = {name: value.clone() for name, value in trainer.contribution()._tensors.items()}
        trainer.exchange._read = (given,)
        trainer.combine(1, meets=True)
        norm = driver.step(updates=[Update("job", num_trained(sequences), 1)]).norms["job"]
        return given, norm, trainer.states

    given, norm, _ = train(whole)
    found = on_ranks(whole, 2, train)
    assert found[0][1] == found[1][1] == pytest.approx(norm, rel=1e-5)
    assert worst_error(put_together([each[0] for each in found], given, found[0][2]), given) < 1e-5


@pytest.mark.parametrize("k", [1, 7, 100, 399, 400])
@pytest.mark.parametrize("size", [2, 3])
def test_the_kth_largest_is_found_among_the_numbers_of_all_ranks(size, k):
    numbers = torch.randn(400, generator=torch.Generator().manual_seed(0)).abs() * 10.0 ** (
        torch.arange(400) % 9 - 4
    )
    numbers[::7], numbers[5::50] = 0, numbers[3]
    parts = numbers.split([0, 150, 250][-size:])

    def find(group):
        return kth_largest([parts[group.rank]], k, group, numbers.device)

    for found in run_ranks(size, find):
        assert torch.equal(found, numbers.kthvalue(401 - k).values)


def train_and_leave(backbone, config, tuning, directory, *, resumes, num_steps):
    """Train one step, from a checkpoint if there is one, and write another one."""
    driver, virtual = make_driver(backbone), config.num_virtual_tokens
    source = {"checkpoint": str(directory)} if resumes else {}
    opened = driver.open_trainer("job", tuning, adapter=config.to_peft(), **source)
    trainer = trainer_of(driver, "job")
    sequences = packs(num_steps, virtual)[num_steps - 1]
    driver.train("job", opened, sequences)
    norm = driver.step(updates=[Update("job", num_trained(sequences), 3)]).norms["job"]
    driver.device.execute(TakeCheckpoint("job", "copy"))
    device: Any = driver.device
    return norm, parameters_of(trainer), trainer.states, device._checkpoints["copy"]


RESUMED = ["lora", "pissa", "diff-pruning", "prefix-projection", "bitfit", "full"]


@pytest.mark.parametrize("case", long_but("lora", "diff-pruning", "prefix-projection", of=RESUMED))
def test_a_job_goes_from_one_number_of_ranks_to_another(case, tmp_path):
    """Two ranks, four and one make a step each, with a checkpoint between, of a job that one rank
    makes, too."""
    config = FullConfig() if case == "full" else config_of(case)
    whole, tuning = (
        whole_backbone("opt" if case == "bitfit" else "qwen2"),
        replace(CONFIG, live=case == "full"),
    )

    def run(sizes, directory):
        found = []
        directory.mkdir()
        for step, size in enumerate(sizes, 1):

            def train(backbone, step=step):
                own = own_copy(backbone) if case == "full" else backbone
                return train_and_leave(
                    own, config, tuning, directory, resumes=step > 1, num_steps=step
                )

            results = [train(whole)] if size == 1 else on_ranks(whole, size, train)
            with named_when_written(directory), ThreadPoolExecutor(size) as threads:
                list(threads.map(lambda each: each[3].write(directory), results))
            found.append(results)
        return found

    alone, found = run([1, 1, 1], tmp_path / "alone"), run([2, 4, 1], tmp_path / "ranks")
    for ranks, [(norm, parameters, _, _)] in zip(found, alone, strict=True):
        assert all(each[0] == pytest.approx(norm, rel=1e-5) for each in ranks)
        together = put_together([each[1] for each in ranks], parameters, ranks[0][2])
        for name, value in parameters.items():
            torch.testing.assert_close(together[name], value, atol=2e-6, rtol=1e-5)
