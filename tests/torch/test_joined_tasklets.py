"""Backward windows and losses of several jobs as one batch of rows, against each job by itself."""

from collections.abc import Sequence

import pytest
import torch
from support import make_adapter, make_backbone, random_sequences

from coserve.adapters import Adapter
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import Ia3Config
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.engine.request import virtual_tokens
from coserve.models import forward
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.joined import joined_tasklet, run_losses

IA3 = Ia3Config(target_modules=("k_proj", "down_proj"), feedforward_modules=())
LENGTHS = ((9, 4), (3,), (7, 1, 6), (12,))


def passes_of(adapters: Sequence[Adapter], *, seed: int = 0) -> list[TrainingPass]:
    """A pass of each, of different lengths."""
    found = []
    for index, adapter in enumerate(adapters):
        sequences = random_sequences(LENGTHS[index % len(LENGTHS)], seed + index)
        number = adapter.config.num_virtual_tokens
        sequences = [
            ([*virtual_tokens(number), *ids], [False] * number + marks) for ids, marks in sequences
        ]
        programs = training_programs(adapter, mean_context_len=5.0 + index)
        found.append(
            TrainingPass(
                adapter, programs, make_pack(sequences), dropout_seed=index, first_row=7 * index
            )
        )
    return found


def run_joined(passes: Sequence[TrainingPass], *, loss_rows: int, backward_rows: int) -> None:
    """All of them at once; in each turn, those that have done the fewest parts."""
    hidden = forward(passes[0].backbone, [training.next_window(1000) for training in passes])
    for training, rows in zip(
        passes, hidden.split([each.pack.num_rows for each in passes]), strict=True
    ):
        training.finish_window(rows)
    while losing := [(training, loss_rows) for training in passes if not training.loss_done]:
        run_losses(losing)
    while going := [training for training in passes if not training.done]:
        fewest = min(training.num_parts_done for training in going)
        joined_tasklet(
            [(each, backward_rows) for each in going if each.num_parts_done == fewest]
        ).run()


def assert_equal_alone(
    passes: Sequence[TrainingPass], lonely: Sequence[TrainingPass], *, share: float = 2e-6
) -> None:
    """share: of a gradient's largest element, by which rounding may change the others."""
    for ours, alone in zip(passes, lonely, strict=True):
        run_alone(alone, forward_rows=1000, backward_rows=1000)
        assert ours.done and ours.num_saved_bytes == 0
        assert ours.sums.loss == pytest.approx(alone.sums.loss, rel=1e-6)
        assert (ours.sums.num_correct, ours.sums.num_trained) == (
            alone.sums.num_correct,
            alone.sums.num_trained,
        )
        for name, gradient in alone.gradients.items():
            bound = share * float(gradient.abs().max())
            torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-5, atol=bound)


@pytest.mark.parametrize("rows", [1000, 5])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "opt"])
def test_jobs_of_one_structure(family, rows):
    adapters = [make_adapter(make_backbone(family), seed=seed, dropout=0.2) for seed in range(4)]
    joined = passes_of(adapters)
    programs = [training.programs.program[0] for training in joined]
    assert all(program is programs[0] for program in programs), (
        "whatever the lengths of their sequences"
    )
    run_joined(joined, loss_rows=rows, backward_rows=rows)
    assert_equal_alone(joined, passes_of(adapters))


def mixed_adapters(family: str = "llama") -> list[Adapter]:
    backbone = make_backbone(family)
    return [
        make_adapter(backbone, seed=1),
        make_adapter(backbone, seed=2, r=2, target_modules=["q_proj", "v_proj"]),
        make_adapter(backbone, seed=3, target_modules=r".*layers\.[12]\.mlp\..*"),
        Adapter(backbone, IA3),
        make_adapter(backbone, seed=4),
        Adapter(backbone, BottleneckConfig(target_modules=("o_proj",))),
        Adapter(backbone, PromptTuningConfig(num_virtual_tokens=3)),
        Adapter(backbone, PromptTuningConfig(num_virtual_tokens=3)),
        Adapter(backbone, IA3, seed=1),
        make_adapter(backbone, seed=5, r=3, target_modules=["lm_head", "down_proj"]),
    ]


@pytest.mark.parametrize("fused", [(), ("linear_beside_low_rank",)])
@pytest.mark.parametrize("rows", [1000, 6])
def test_jobs_of_any_methods_ranks_and_targets(rows, fused, monkeypatch):
    """Also where a backend has kernels for two gradients at once, of which one is for the rows of
    all jobs."""
    adapters = mixed_adapters()
    monkeypatch.setattr(
        adapters[0].backbone.backend, "fused", dict.fromkeys(fused, lambda *given: None)
    )
    joined = passes_of(adapters)
    run_joined(joined, loss_rows=rows, backward_rows=rows)
    assert_equal_alone(joined, passes_of(adapters))


def test_bypasses_that_read_their_sites_weights_run_beside_others():
    backbone = make_backbone("llama")
    inner = Ia3Config(target_modules=("v_proj", "down_proj"), feedforward_modules=("down_proj",))
    adapters = [
        Adapter(backbone, inner),
        make_adapter(backbone, seed=1),
        make_adapter(backbone, seed=2, use_dora=True, dropout=0.2),
        Adapter(backbone, inner, seed=1),
        make_adapter(backbone, seed=3, use_dora=True),
    ]
    joined = passes_of(adapters)
    run_joined(joined, loss_rows=6, backward_rows=6)
    assert_equal_alone(joined, passes_of(adapters), share=1e-5)


def test_products_with_the_backbone_run_once_whatever_the_adapters(monkeypatch):
    backbone = make_backbone("llama")
    product, found = backbone.backend.input_gradient, []
    weights = {id(w.tensors()[0]) for w in backbone.weights[1].values() if hasattr(w, "tensors")}

    def counted(grad, weight, onto=None):
        if id(weight) in weights:
            found.append(len(grad))
        return product(grad, weight, onto)

    monkeypatch.setattr(backbone.backend, "input_gradient", counted)
    joined = passes_of(mixed_adapters())
    run_joined(joined, loss_rows=1000, backward_rows=1000)
    num_rows = sum(training.pack.num_rows for training in joined)
    lowest = joined[2].pack.num_rows  # its adapter has nothing below this block's MLP
    assert sorted(found) == [num_rows - lowest] * 6 + [num_rows]


def test_one_jobs_nan_changes_no_bit_of_anothers():
    for number, adapters in enumerate(
        ([make_adapter(make_backbone(), seed=i) for i in range(4)], mixed_adapters())
    ):
        clean = passes_of(adapters)
        run_joined(clean, loss_rows=1000, backward_rows=5)
        for bad in (0, len(adapters) - 1):
            kept = {name: master.clone() for name, master in adapters[bad].masters.items()}
            for master in adapters[bad].masters.values():
                master.fill_(float("nan"))
            adapters[bad].sync_compute_copy()
            passes = passes_of(adapters)
            run_joined(passes, loss_rows=1000, backward_rows=5)
            assert passes[bad].sums.loss != passes[bad].sums.loss, number
            for index, (ours, theirs) in enumerate(zip(passes, clean, strict=True)):
                if index != bad:
                    assert ours.sums == theirs.sums
                    assert all(
                        torch.equal(ours.gradients[name], theirs.gradients[name])
                        for name in theirs.gradients
                    )
            for name, master in adapters[bad].masters.items():
                master.copy_(kept[name])
            adapters[bad].sync_compute_copy()


def test_a_dropped_pass_takes_its_tasklet_with_it():
    adapters = [make_adapter(make_backbone(), seed=seed) for seed in range(2)]
    first, second = passes_of(adapters)
    run_losses([])
    for training in (first, second):
        training.finish_window(forward(training.backbone, [training.next_window(1000)]))
        training.run_loss(1000)
    tasklet = joined_tasklet([(first, 4), (second, 4)])
    with pytest.raises(AssertionError, match="its tasklet is not done"):
        first.next_tasklet(4)
    first.release()
    assert tasklet.done
    with pytest.raises(AssertionError, match="the tasklet is done"):
        tasklet.run()
