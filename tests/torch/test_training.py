"""Gradients, trajectories and memory of a training pass, against PEFT with autograd, whatever
windows, stops and company."""

import math
import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lengths import long_but
from peft import PeftModel
from support import (
    CONFIGS,
    exact_gradients,
    fresh_peft_twin,
    make_adapter,
    make_backbone,
    make_model,
    peft_gradients,
    peft_twin,
    random_sequences,
    random_tokens,
    record_products,
    summed_loss,
    worst_error,
)

from coserve.adapters import save_adapter
from coserve.memory.tensors.activations import DeviceMemory, group_bytes
from coserve.models import CachedSequence, forward
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.objective import chunk_rows, loss_and_gradient
from coserve.tuning.pack import UNTRAINED
from coserve.tuning.pass_memory import workspace_shapes
from coserve.tuning.programs import frontier_of_part

LENGTHS = (7, 11, 1, 5)
TARGETS = {
    "all": "all-linear",
    "down": ["down_proj", "fc2"],
    "qv": ["q_proj", "v_proj"],
    "k": ["k_proj"],
}


def targets_of(name: str, targets: str) -> object:
    """The targets that the family has."""
    chosen = TARGETS[targets]
    if isinstance(chosen, str):
        return chosen
    linear = make_backbone(name).architecture.linear_sites
    return [target for target in chosen if any(module.endswith(target) for module in linear)]


def gradients(adapter, sequences, *, forward_rows=1000, backward_rows=1000, budget=None):
    training = TrainingPass(
        adapter, training_programs(adapter, budget_bytes_per_token=budget), make_pack(sequences)
    )
    run_alone(training, forward_rows=forward_rows, backward_rows=backward_rows)
    return training


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("targets", long_but("all", of=TARGETS))
def test_gradients_equal_pefts_for_every_family(name, targets):
    model, adapter = peft_twin(name, target_modules=targets_of(name, targets))
    sequences = random_sequences(LENGTHS)
    theirs = peft_gradients(model, sequences)
    for forward_rows, backward_rows in ((1000, 1000), (5, 3), (1, 1)):
        training = gradients(
            adapter, sequences, forward_rows=forward_rows, backward_rows=backward_rows
        )
        assert worst_error(training.gradients, theirs) < 1e-5
        assert training.sums.loss == pytest.approx(
            float(summed_loss(model, sequences).detach()), rel=1e-5
        )


@pytest.mark.parametrize(
    "lora",
    [
        {
            "use_rslora": True,
            "r": 5,
            "rank_pattern": {"q_proj": 2, "down_proj": 9},
            "alpha_pattern": {"v_proj": 1},
        },
        {"target_modules": ["down_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": [2]},
        {"target_modules": ["lm_head", "up_proj"]},
        {"target_modules": ["lm_head"]},
    ],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_gradients_equal_pefts_for_settings_that_cut_the_backward_pass_short(lora):
    model, adapter = peft_twin("llama", **lora)
    sequences = random_sequences(LENGTHS)
    training = gradients(adapter, sequences, forward_rows=6, backward_rows=4)
    assert worst_error(training.gradients, peft_gradients(model, sequences)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("refused", [0, 2, 3])
def test_gradients_of_factors_may_go_with_those_of_their_products(name, refused, monkeypatch):
    """All of them, or not every second or third: to sums of others' gradients, and to none."""
    model, adapter = peft_twin(name)
    sequences, asked = random_sequences(LENGTHS), []

    def make(grad, weight, added, onto):
        asked.append(onto is None)
        if refused and len(asked) % refused == 0:
            return None
        found = grad @ weight + added.narrow @ added.a
        return found if onto is None else onto.add_(found)

    monkeypatch.setattr(adapter.backbone.backend, "fused", {"linear_beside_low_rank": make})
    theirs = peft_gradients(model, sequences)
    for rows in (1000, 5):
        asked.clear()
        assert (
            worst_error(gradients(adapter, sequences, backward_rows=rows).gradients, theirs) < 1e-5
        )
        assert set(asked) == {True, False}


def test_blocks_below_the_lowest_adapter_run_no_backward_and_keep_only_k_and_v():
    adapter = make_adapter(
        make_backbone("llama"), target_modules=["down_proj"], layers_to_transform=[1]
    )
    programs = training_programs(adapter)
    assert programs.parts == (2, 1)
    assert set(programs.program[0].saved) == set(programs.program[0].graph.kv_tensors)
    assert "attention" not in {step.node.op for step in programs.program[1].backward}, (
        "nothing below wants a gradient"
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "opt-350m-style", "mistral-sliding"])
@pytest.mark.parametrize("targets", long_but("all", of=["all", "down", "qv"]))
def test_gradients_are_equal_at_every_point_of_the_frontier(name, targets):
    model, adapter = peft_twin(name, target_modules=targets_of(name, targets))
    sequences = random_sequences((9, 4))
    theirs = peft_gradients(model, sequences)
    points = frontier_of_part(training_programs(adapter), adapter, 1, mean_context_len=5.0)
    assert len(points) > 4
    budgets = [point.bytes_per_token for point in points]
    assert budgets == sorted(budgets, reverse=True)
    for budget in budgets[:: max(1, len(budgets) // 12)] + budgets[-1:]:
        training = gradients(adapter, sequences, forward_rows=5, backward_rows=4, budget=budget)
        assert worst_error(training.gradients, theirs) < 1e-5, budget


class Recorder(DeviceMemory):
    """PyTorch's allocator, and what it has lent."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.taken: list[Any] = []

    def take(self, shapes):
        self.taken.append(super().take(shapes))
        return self.taken[-1]


class Storm:
    """Runs two jobs and some requests in random company: windows, tasklets and stops of any size,
    in any order."""

    def __init__(self, seed: int, jobs: list[TrainingPass]) -> None:
        self.random, self.jobs = random.Random(seed), jobs
        self.backbone = jobs[0].backbone
        self.tasklets: dict[Any, Any] = {}
        self.requests: list[CachedSequence] = []

    def run(self) -> None:
        while not all(job.done for job in self.jobs):
            self.forward()
            for job in self.jobs:
                self.backward(job)

    def forward(self) -> None:
        if self.random.random() < 0.5:
            self.requests = [
                CachedSequence(self.backbone, 60) for _ in range(self.random.randint(0, 2))
            ]
        training = [job for job in self.jobs if not job.forward_done and self.random.random() < 0.7]
        spans: list[tuple[Any, Any]] = [
            (job, job.next_window(self.random.randint(1, 9))) for job in training
        ]
        live = [request for request in self.requests if request.length < 50]
        spans += [
            (None, r.extend(random_tokens(self.random.randint(1, 5), r.length))) for r in live
        ]
        self.random.shuffle(spans)
        if not spans:
            return
        hidden = forward(self.backbone, [span for _, span in spans])
        for (job, _), rows in zip(
            spans, hidden.split([len(span.tokens) for _, span in spans]), strict=True
        ):
            if job is not None:
                job.finish_window(rows)

    def backward(self, job: TrainingPass) -> None:
        for _ in range(self.random.randint(0, 6)):
            tasklet = self.tasklets.pop(job, None)
            if tasklet is None:
                if not job.forward_done or job.done:
                    return
                if not job.loss_done:
                    job.run_loss(self.random.randint(1, 12))
                    continue
                tasklet = job.next_tasklet(self.random.randint(1, 12))
            if not tasklet.run(self.random.choice([None, 1, 2, 7])):
                self.tasklets[job] = tasklet


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**20),
    name=st.sampled_from(["llama", "mistral-sliding", "qwen3", "opt"]),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    tight=st.booleans(),
)
def test_a_job_ends_the_same_in_any_company(seed, name, lengths, tight):
    _, adapter = peft_twin(name)
    _, other = peft_twin(name, seed=9, r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    sequences = random_sequences(tuple(lengths), seed)
    # Fewer trained tokens say little, and leave gradients that are all cancellation.
    assume(sum(sum(trained[1:]) for _, trained in sequences) >= 3)
    budget = (
        frontier_of_part(training_programs(adapter), adapter, 1, mean_context_len=5.0)[
            -1
        ].bytes_per_token
        if tight
        else None
    )
    job = TrainingPass(
        adapter, training_programs(adapter, budget_bytes_per_token=budget), make_pack(sequences)
    )
    company = TrainingPass(
        other, training_programs(other), make_pack(random_sequences((8, 13), seed))
    )
    lonely = TrainingPass(other, company.programs, company.pack)
    run_alone(lonely, forward_rows=100, backward_rows=100)
    Storm(seed, [job, company]).run()
    assert worst_error(job.gradients, exact_gradients(name, sequences)) < 1e-5
    assert worst_error(company.gradients, lonely.gradients) < 1e-5


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_dropout_equals_peft_under_the_same_masks(monkeypatch):
    """Which mask a place gets: by seed, row, part of the model, and site. PEFT's dropout modules
    are given just those."""
    from coserve.kernels.dropout import dropout_ids_of_part, dropout_mask, dropout_row_ids

    _, adapter = peft_twin(
        "llama", lora_dropout=0.4, target_modules=["q_proj", "k_proj", "down_proj", "lm_head"]
    )
    model, _ = fresh_peft_twin(
        "llama", lora_dropout=0.4, target_modules=["q_proj", "k_proj", "down_proj", "lm_head"]
    )
    model.train()
    parts = adapter.backbone.architecture.parts
    names = {module: name for name, module in model.named_modules()}

    def masked(module: torch.nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        path = names[module].removeprefix("base_model.model.").split(".lora_dropout")[0]
        part, node = adapter.sites[path]
        salt = adapter.attached(part).graph.node[f"{node}.lora_A"].attribute["salt"]
        keys = dropout_ids_of_part(dropout_row_ids(11, torch.arange(30, 39)), parts.index(part))
        return x * dropout_mask(keys, x.shape[-1], p=0.4, salt=salt) / 0.6

    monkeypatch.setattr(torch.nn.Dropout, "forward", masked)
    sequences = random_sequences((9,))
    theirs = peft_gradients(model, sequences)
    programs = training_programs(adapter)
    for forward_rows, backward_rows in ((9, 9), (2, 4)):
        training = TrainingPass(
            adapter, programs, make_pack(sequences), dropout_seed=11, first_row=30
        )
        run_alone(training, forward_rows=forward_rows, backward_rows=backward_rows)
        assert worst_error(training.gradients, theirs) < 1e-5
    others: Any
    for others in ({"dropout_seed": 12, "first_row": 30}, {"dropout_seed": 11, "first_row": 31}):
        training = TrainingPass(adapter, programs, make_pack(sequences), **others)
        run_alone(training, forward_rows=9, backward_rows=9)
        assert worst_error(training.gradients, theirs) > 0.1


def test_the_sites_of_a_block_drop_independently():
    adapter = make_adapter(make_backbone("llama"), dropout=0.4)
    nodes = [node for node in adapter.attached(0).graph.nodes if node.op == "dropout_low_rank"]
    assert len({node.attribute["salt"] for node in nodes}) == len(nodes) == 7


def test_bits_of_a_relu_are_those_of_the_windows_rows():
    """OPT with a LoRA on q_proj alone keeps its ReLU as bits, also after a request's rows in the
    batch."""
    model, adapter = peft_twin("opt", target_modules=["q_proj"])
    programs, sequences = training_programs(adapter), random_sequences((9, 6))
    assert "activation.sign" in programs.program[1].saved
    training = TrainingPass(adapter, programs, make_pack(sequences))
    request = CachedSequence(adapter.backbone, 20)
    while not training.forward_done:
        spans = [request.extend(random_tokens(3, request.length)), training.next_window(4)]
        training.finish_window(forward(adapter.backbone, spans)[3:])
    training.run_loss(6)
    training.run_loss(100)
    while not training.done:
        training.next_tasklet(5).run()
    assert worst_error(training.gradients, peft_gradients(model, sequences)) < 1e-5


def test_ten_steps_of_adamw_follow_pefts_trajectory_and_the_result_loads_in_peft(tmp_path):
    model, adapter = fresh_peft_twin("qwen2", target_modules="all-linear")
    settings: dict[str, Any] = {
        "lr": 1e-2,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    their_optimizer = torch.optim.AdamW(theirs.values(), **settings)
    our_optimizer = torch.optim.AdamW(adapter.masters.values(), **settings)
    start = {name: master.clone() for name, master in adapter.masters.items()}
    programs = training_programs(adapter)
    for step in range(10):
        sequences = random_sequences((6, 9, 4), seed=step)
        num_trained = sum(sum(trained[1:]) for _, trained in sequences)
        their_optimizer.zero_grad()
        loss = summed_loss(model, sequences) / num_trained
        loss.backward()
        their_optimizer.step()

        training = TrainingPass(adapter, programs, make_pack(sequences))
        run_alone(training, forward_rows=7, backward_rows=5)
        for name, master in adapter.masters.items():
            master.grad = training.gradients[name] / training.sums.num_trained
        our_optimizer.step()
        adapter.sync_compute_copy()
        assert training.sums.mean_loss == pytest.approx(float(loss.detach()), rel=1e-4)
    moved = {name: adapter.masters[name] - start[name] for name in start}
    assert worst_error(moved, {name: theirs[name].detach() - start[name] for name in start}) < 2e-4
    assert worst_error(adapter.masters, {name: p.detach() for name, p in theirs.items()}) < 5e-5

    save_adapter(adapter, tmp_path)
    loaded = PeftModel.from_pretrained(make_model("qwen2"), tmp_path)
    tokens = random_tokens(12, 5)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tokens[None]).logits, model(tokens[None]).logits, atol=1e-3, rtol=0
        )


def test_bfloat16_gradients_are_as_close_to_float32_as_pefts():
    model, adapter = fresh_peft_twin("llama")
    sequences = random_sequences((12, 8))
    truth = peft_gradients(model, sequences)
    half = make_adapter(make_backbone("llama", "bfloat16"))
    for name, master in half.masters.items():
        master.copy_(adapter.masters[name])
    half.sync_compute_copy()
    theirs = peft_gradients(model.to(torch.bfloat16), sequences)
    ours = gradients(half, sequences, forward_rows=7, backward_rows=5).gradients
    assert worst_error(ours, truth) < 1.5 * worst_error(theirs, truth)


# -- the head ---------------------------------------------------------------------


def test_only_trained_rows_pass_the_head(monkeypatch):
    adapter = make_adapter(make_backbone("llama"))
    pack = make_pack(random_sequences((20, 15, 1)))
    assert 5 < pack.num_trained < 33
    training = TrainingPass(adapter, training_programs(adapter), pack)
    training.finish_window(forward(adapter.backbone, [training.next_window(36)]))
    products = record_products(monkeypatch)
    while not training.loss_done:
        training.run_loss(4)
    heads = [rows for rows, weight in products if len(weight) == 97]
    assert max(heads) <= 4 and sum(heads) == pack.num_trained == training.sums.num_trained
    gradient = training.kept.rows
    assert (
        not gradient[pack.targets == UNTRAINED].any()
        and gradient[pack.targets != UNTRAINED].any(1).all()
    )
    untrained = make_pack([([5, 6, 7], [False] * 3)])
    nothing = TrainingPass(adapter, training_programs(adapter), untrained)
    nothing.finish_window(forward(adapter.backbone, [nothing.next_window(3)]))
    assert nothing.loss_done and not nothing.done
    while not nothing.done:
        nothing.next_tasklet(2).run()
    assert not any(gradient.any() for gradient in nothing.gradients.values())


def test_the_loss_is_taken_in_chunks(monkeypatch):
    backbone = make_backbone("llama")
    adapter = make_adapter(backbone, target_modules=["q_proj", "lm_head"])
    programs = training_programs(adapter)
    torch.manual_seed(0)
    hidden, targets = torch.randn(40, 32), torch.randint(0, 97, (40,))
    products, results = record_products(monkeypatch), []
    for max_rows in (1000, 3):
        products.clear()
        grads = {
            name: torch.zeros(tensor.shape) for name, tensor in adapter.parameters("head").items()
        }
        weights = {**backbone.weights["head"], **adapter.parameters("head")}
        losses, correct, gradient = loss_and_gradient(
            programs.loss,
            hidden,
            {"targets": targets},
            backend=backbone.backend,
            weights=weights,
            accumulators=grads,
            max_rows=max_rows,
        )
        heads = [rows for rows, weight in products if len(weight) == 97]
        assert max(heads) <= max_rows and sum(heads) == 2 * 40, "the head, and its LoRA"
        results.append(((losses, correct, gradient), grads))
    (whole, grads), (chunked, chunked_grads) = results
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other)
    assert worst_error(chunked_grads, grads) < 1e-5


@pytest.mark.parametrize(
    ("name", "target", "expected"),
    [
        ("llama", "q_proj", ["rms_norm", "linear_cross_entropy"]),
        ("llama", "lm_head", ["add", "cross_entropy"]),
        ("gemma2", "q_proj", ["soft_cap", "cross_entropy"]),
    ],
)
def test_the_heads_product_and_its_loss_are_one_operator_if_nothing_comes_between(
    name, target, expected
):
    programs = training_programs(make_adapter(make_backbone(name), target_modules=[target]))
    assert [node.op for node in programs.loss.graph.nodes][-2:] == expected


def test_a_chunk_is_bounded_in_bytes():
    for dtype in (torch.bfloat16, torch.float32):
        assert chunk_rows(151936, dtype) * 151936 * dtype.itemsize <= 80 << 20
    assert chunk_rows(151936, torch.bfloat16) >= 256
    assert chunk_rows(10**9, torch.float32) == 1


def test_token_accuracy_counts_the_likeliest_token():
    model, adapter = peft_twin("llama")
    sequences = random_sequences((20, 15))
    training = gradients(adapter, sequences)
    correct = trained = 0
    for ids, marks in sequences:
        with torch.no_grad():
            guess = model(torch.tensor([ids])).logits[0, :-1].argmax(-1)
        mask = torch.tensor(marks[1:])
        correct += int((guess == torch.tensor(ids[1:]))[mask].sum())
        trained += int(mask.sum())
    assert (training.sums.num_correct, training.sums.num_trained) == (correct, trained)
    assert training.sums.token_accuracy == correct / trained


# -- memory -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", long_but("all", of=["all", "down", "qv"]))
def test_saved_bytes_counted_from_the_program_are_the_bytes_held(name, dtype, targets):
    adapter = make_adapter(make_backbone(name, dtype), target_modules=targets_of(name, targets))
    pack = make_pack(random_sequences((9, 4, 17)))
    memory = Recorder()
    frontier = list(frontier_of_part(training_programs(adapter), adapter, 1, mean_context_len=5.0))
    for point in [*frontier[:: 1 + len(frontier) // 6], frontier[-1]]:
        programs = training_programs(
            adapter, budget_bytes_per_token=point.bytes_per_token, mean_context_len=5.0
        )
        memory.taken.clear()
        training = TrainingPass(adapter, programs, pack, memory=memory)
        counted = programs.saved_bytes_per_token(adapter.backbone.dtype) * pack.num_rows
        workspace = group_bytes(workspace_shapes(programs, adapter.backbone, pack.num_rows))
        held = sum(
            tensor.untyped_storage().nbytes() for group in memory.taken for tensor in group.values()
        )
        assert held == counted + workspace
        assert training.num_saved_bytes == counted
        assert (
            programs.program[1].saved_bytes_per_token(adapter.backbone.dtype)
            == point.bytes_per_token
        )
        run_alone(training, forward_rows=7, backward_rows=11)
        assert not any(memory.taken), "and all of it comes back"


def test_saved_tensors_are_let_go_block_by_block():
    adapter = make_adapter(make_backbone("llama"))
    training = TrainingPass(
        adapter, training_programs(adapter), make_pack(random_sequences((9, 4)))
    )
    full = training.num_saved_bytes
    training.finish_window(forward(adapter.backbone, [training.next_window(13)]))
    training.run_loss(13)
    seen = []
    while not training.done:
        training.next_tasklet(6).run()
        seen.append(training.num_saved_bytes)
    third = full // 3
    assert seen == [full, full, 2 * third, 2 * third, 2 * third, third, third, third, 0]


def test_a_tasklet_holds_no_more_than_it_still_needs():
    """Transient tensors of a tasklet: at most a few of the MLP's width at any instruction, and one
    block's input at the end."""
    adapter = make_adapter(make_backbone("llama"))
    programs = training_programs(adapter)
    training = TrainingPass(adapter, programs, make_pack(random_sequences((40,))))
    training.finish_window(forward(adapter.backbone, [training.next_window(40)]))
    training.run_loss(40)
    tasklet = training.next_tasklet(40)
    held = []
    while not tasklet.done:
        held.append(tasklet.num_transient_bytes)
        tasklet.run(1)
    assert max(held) <= 40 * 4 * (4 * 48 + 4 * 32)
    assert held[-1] <= 40 * 4 * (4 * 32)


def test_k_and_v_of_blocks_below_the_lowest_adapter_go_after_the_forward_pass():
    adapter = make_adapter(
        make_backbone("llama"), target_modules=["q_proj"], layers_to_transform=[2]
    )
    programs = training_programs(adapter)
    training = TrainingPass(adapter, programs, make_pack(random_sequences((9, 4))))
    full = training.num_saved_bytes
    training.finish_window(forward(adapter.backbone, [training.next_window(10)]))
    assert training.num_saved_bytes == full
    training.finish_window(forward(adapter.backbone, [training.next_window(10)]))
    assert training.num_saved_bytes == programs.program[2].saved_bytes_per_token(torch.float32) * 13


def test_nothing_outlives_the_pass():
    """The storages themselves are gone, whatever might still have held a view."""
    adapter, memory = make_adapter(make_backbone("llama")), Recorder()
    training = TrainingPass(
        adapter, training_programs(adapter), make_pack(random_sequences((9, 4))), memory=memory
    )
    tensors = [
        weakref.ref(tensor.untyped_storage()) for group in memory.taken for tensor in group.values()
    ]
    run_alone(training, forward_rows=6, backward_rows=6)
    assert len(tensors) > 30
    assert not any(tensor() is not None for tensor in tensors)


def test_a_pack_without_trained_rows_has_no_loss_and_no_gradient():
    adapter = make_adapter(make_backbone("llama"))
    training = gradients(
        adapter, [([1, 2, 3], [True, False, False])], forward_rows=2, backward_rows=2
    )
    assert training.sums.num_trained == 0
    assert math.isnan(training.sums.mean_loss)
    assert not any(gradient.any() for gradient in training.gradients.values())


@pytest.mark.parametrize("name", ["llama", "opt-350m-style"])
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_dropout_reaches_every_part_of_the_model(name):
    """Linear layers before the blocks and in the head drop too; windows do not change the masks."""
    targets = ["q_proj", "lm_head"] if name == "llama" else "all-linear"
    _, adapter = fresh_peft_twin(name, target_modules=targets, lora_dropout=0.3)
    sequences = random_sequences((9, 6))
    whole = gradients(adapter, sequences)
    assert (
        worst_error(
            gradients(adapter, sequences, forward_rows=4, backward_rows=3).gradients,
            whole.gradients,
        )
        < 1e-5
    )


def test_dropout_saves_no_more_than_training_without_it():
    plain, dropped = (make_adapter(make_backbone("llama"), dropout=p) for p in (0.0, 0.3))
    saved = [
        training_programs(adapter).saved_bytes_per_token(torch.float32)
        for adapter in (plain, dropped)
    ]
    assert saved[0] == saved[1]


def test_a_pass_that_is_dropped_leaves_no_trace():
    adapter = make_adapter(make_backbone("llama"))
    masters = {name: master.clone() for name, master in adapter.masters.items()}
    sequences = random_sequences((9, 4))
    expected = gradients(adapter, sequences).gradients
    dropped = TrainingPass(adapter, training_programs(adapter), make_pack(sequences))
    dropped.finish_window(forward(adapter.backbone, [dropped.next_window(13)]))
    dropped.run_loss(13)
    dropped.next_tasklet(5).run(3)
    dropped.release()
    assert dropped.num_saved_bytes == 0
    assert all(torch.equal(masters[name], master) for name, master in adapter.masters.items())
    assert worst_error(gradients(adapter, sequences).gradients, expected) == 0


# -- packs ------------------------------------------------------------------------


def test_a_pack_knows_its_targets_positions_and_sequences():
    pack = make_pack([([1, 2, 3], None), ([4, 5], [True, False]), ([6], None)])
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert pack.targets.tolist() == [2, 3, UNTRAINED, UNTRAINED, UNTRAINED, UNTRAINED]
    assert pack.positions.tolist() == [0, 1, 2, 0, 1, 0]
    assert (pack.bounds, pack.num_rows, pack.num_trained) == ((0, 3, 5, 6), 6, 2)
    assert pack.sequences_within(1, 4) == [(0, 1, 3), (3, 3, 4)]
    assert pack.mean_context_len == (1 + 2 + 3 + 1 + 2 + 1) / 6


def test_a_pack_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="a sequence of 2 tokens came with 1 marks"):
        make_pack([([1, 2], [True])])
    with pytest.raises(ValueError, match="sequence 1 of a pack has no tokens"):
        make_pack([([1, 2], None), ([], None)])
    with pytest.raises(ValueError, match="a pack of no sequences"):
        make_pack([])
