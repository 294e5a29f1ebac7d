"""One pass over the backbone for rows of several adapters, of mixed rank, target and kind, and for
rows without any."""

import pytest
import torch
from steps_at_once import backbone_of
from support import (
    FAMILIES,
    make_adapter,
    make_backbone,
    make_model,
    peft_twin,
    random_sequences,
    random_tokens,
    record_products,
)

from coserve.kernels.cpu.compiled import compiled_kernels
from coserve.models import CachedSequence, forward, logits
from coserve.tuning import TrainingPass, make_pack, training_programs

KERNELS = compiled_kernels()


def alone(backbone, tokens, adapter=None):
    """Logits of one sequence in a batch of its own."""
    bypasses = adapter.bypasses() if adapter else None
    sequence = CachedSequence(backbone, len(tokens), bypasses)
    return logits(backbone, forward(backbone, [sequence.extend(tokens)]), [(len(tokens), bypasses)])


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_many_adapters_equal_peft_each(family):
    backbone = make_backbone(family)
    twins = [
        peft_twin(family, seed=1, r=2),
        peft_twin(
            family, seed=2, r=7, target_modules=["q_proj", "v_proj", "lm_head"], use_rslora=True
        ),
        peft_twin(family, seed=3, r=3, target_modules=r".*layers\.1\..*_proj", lora_alpha=1),
    ]
    users = [twins[0], None, twins[1], twins[1], twins[2], None, twins[0]]
    prompts = [random_tokens(4 + i, i) for i in range(len(users))]
    spans = [
        CachedSequence(backbone, len(prompt), twin[1].bypasses() if twin else None).extend(prompt)
        for prompt, twin in zip(prompts, users, strict=True)
    ]
    owners = [
        (len(prompt), twin[1].bypasses() if twin else None)
        for prompt, twin in zip(prompts, users, strict=True)
    ]
    every = logits(backbone, forward(backbone, spans), owners).split(
        [len(prompt) for prompt in prompts]
    )
    for ours, prompt, twin in zip(every, prompts, users, strict=True):
        with torch.no_grad():
            theirs = (twin[0] if twin else make_model(family))(prompt[None]).logits[0]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_ranks_may_differ_where_scales_do_not():
    """alpha goes with the rank, as people choose it: the operators are the same then, but not their
    shapes."""
    backbone = make_backbone("llama")
    users = [make_adapter(backbone, seed=rank, r=rank, alpha=2 * rank) for rank in (2, 8, 4)]
    prompts = [random_tokens(3 + i, i) for i in range(len(users))]
    owners = [(len(prompt), user.bypasses()) for prompt, user in zip(prompts, users, strict=True)]
    spans = [
        CachedSequence(backbone, n, bypasses).extend(prompt)
        for (n, bypasses), prompt in zip(owners, prompts, strict=True)
    ]
    every = logits(backbone, forward(backbone, spans), owners).split(
        [len(prompt) for prompt in prompts]
    )
    for ours, prompt, user in zip(every, prompts, users, strict=True):
        torch.testing.assert_close(ours, alone(backbone, prompt, user), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("targets", "whole"),
    [
        (["v_proj"], ["q_proj"]),
        (["q_proj"], ["gate_proj"]),
        (["k_proj", "v_proj"], ["q_proj"]),
        (["q_proj"], ["gate_proj", "up_proj"]),
        (["o_proj"], ["q_proj", "k_proj", "v_proj", "down_proj"]),
    ],
)
def test_whole_layers_are_used_alone_as_beside_others(targets, whole):
    """Trained whole, beside layers that run at once and are not: in requests and in windows of a
    job."""
    backbone = make_backbone("llama")
    adapter = make_adapter(backbone, target_modules=targets, modules_to_save=whole, dropout=0.0)
    bypasses, prompt, other = adapter.bypasses(), random_tokens(5, 1), random_tokens(4, 2)
    without = alone(backbone, prompt)
    spans = [
        CachedSequence(backbone, 5, bypasses).extend(prompt),
        CachedSequence(backbone, 4).extend(other),
    ]
    mixed = logits(backbone, forward(backbone, spans), [(5, bypasses), (4, None)])[:5]
    torch.testing.assert_close(alone(backbone, prompt, adapter), mixed, atol=1e-5, rtol=1e-5)
    assert (mixed - without).abs().max() > 0.1
    pack = make_pack(random_sequences((9, 4)))
    first, second = (TrainingPass(adapter, training_programs(adapter), pack) for _ in range(2))
    company = CachedSequence(backbone, 4).extend(other)
    expected = forward(backbone, [company, second.next_window(13)])[4:]
    torch.testing.assert_close(
        forward(backbone, [first.next_window(13)]), expected, atol=1e-5, rtol=1e-5
    )


def test_a_row_without_an_adapter_pays_nothing(monkeypatch):
    backbone = make_backbone("llama")
    adapter = make_adapter(backbone)
    products = record_products(monkeypatch)
    add, added = backbone.backend.add_adapters, []
    monkeypatch.setattr(
        backbone.backend,
        "add_adapters",
        lambda x, outputs, first, batch: (
            added.append((batch.rows.tolist(), len(outputs))) or add(x, outputs, first, batch)
        ),
    )
    spans = [
        CachedSequence(backbone, 9).extend(random_tokens(9, 0)),
        CachedSequence(backbone, 2, adapter.bypasses()).extend(random_tokens(2, 1)),
        CachedSequence(backbone, 3, adapter.bypasses()).extend(random_tokens(3, 2)),
    ]
    forward(backbone, spans)
    assert added == [(list(range(9, 14)), sites) for sites in (3, 1, 2, 1)] * 3, (
        "its rows alone, a call for each input"
    )
    assert {rows for rows, weight in products if 4 not in weight.shape} == {14}


def test_the_last_product_of_a_lora_goes_with_its_site_where_all_rows_have_it(monkeypatch):
    """Of a window alone; not where rows have several adapters, and not for magnitudes, which read
    the site's output."""
    backbone, calls = make_backbone("llama"), []
    kernel = {"linear_and_low_rank": lambda x, weight, bias, added: calls.extend(added)}
    monkeypatch.setattr(backbone.backend, "fused", kernel)
    plain = make_adapter(backbone, dropout=0.1)
    windows = [
        TrainingPass(
            adapter, training_programs(adapter), make_pack(random_sequences((9, 4))), dropout_seed=1
        )
        for adapter in (
            plain,
            make_adapter(backbone, seed=1, dropout=0.1),
            make_adapter(backbone, use_dora=True),
        )
    ]
    together = forward(backbone, [windows[0].next_window(13), windows[1].next_window(13)])
    forward(backbone, [windows[2].next_window(13)])
    assert not calls
    alone = forward(backbone, [windows[0].next_window(13)])
    assert len(calls) == 7 * 3 and all(len(each.narrow) == 13 for each in calls)
    torch.testing.assert_close(alone, together[:13], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx, reason="needs g++ and AMX")
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"], ["q_proj"]])
def test_products_of_a_window_that_make_its_gated_unit_keep_what_they_would(targets, monkeypatch):
    """To the last bit: the rows of all blocks, what is kept, and gradients."""
    backbone, made, answers = backbone_of("llama", "bfloat16", "dense"), [], []
    pack = make_pack(random_sequences((90, 80)))

    def run(adapter):
        training = TrainingPass(adapter, training_programs(adapter), pack)
        hidden = [forward(backbone, [training.next_window(140)])]
        training.finish_window(hidden[0])
        hidden.append(forward(backbone, [training.next_window(30)]))
        training.finish_window(hidden[1])
        training.run_loss(170)
        while not training.done:
            training.run_tasklet(140)
        return [*hidden, *training.gradients.values()]

    kernels = backbone.backend.fused
    ask = kernels["gated_linear"]
    watched = {**kernels, "gated_linear": lambda *given: answers.append(ask(*given)) or answers[-1]}
    monkeypatch.setattr(backbone.backend, "fused", watched)
    made.append(run(make_adapter(backbone, target_modules=targets)))
    assert [answer is not None for answer in answers] == [True] * 3 + [False] * 3, (
        "of 140 rows, and of 30"
    )
    others = {name: kernel for name, kernel in kernels.items() if name != "gated_linear"}
    monkeypatch.setattr(backbone.backend, "fused", others)
    made.append(run(make_adapter(backbone, target_modules=targets)))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_training_windows_and_requests_share_the_batch():
    """A job's window, a request on the adapter as it is served, one on another adapter, and one on
    the bare model."""
    backbone = make_backbone("qwen2")
    trained, other = (
        make_adapter(backbone, seed=1, dropout=0.3),
        make_adapter(backbone, seed=2, r=2),
    )
    prompts = [random_tokens(6, 1), random_tokens(4, 2), random_tokens(5, 3)]
    users = [trained, other, None]
    expected = [alone(backbone, prompt, user) for prompt, user in zip(prompts, users, strict=True)]
    pack = make_pack(random_sequences((9, 4)))
    training = TrainingPass(trained, training_programs(trained), pack)
    lonely = TrainingPass(trained, training_programs(trained), pack)
    lonely.finish_window(forward(backbone, [lonely.next_window(13)]))
    lonely.run_loss(13)
    spans = [
        CachedSequence(backbone, 8, user.bypasses() if user else None).extend(prompt)
        for prompt, user in zip(prompts, users, strict=True)
    ]
    hidden = forward(backbone, [spans[0], training.next_window(13), *spans[1:]])
    training.finish_window(hidden[6:19])
    training.run_loss(13)
    rows = [hidden[:6], hidden[19:23], hidden[23:]]
    for theirs, ours, user in zip(expected, rows, users, strict=True):
        mine = logits(backbone, ours, [(len(ours), user.bypasses() if user else None)])
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    assert training.sums.num_trained == lonely.sums.num_trained
    assert training.sums.num_correct == lonely.sums.num_correct
    assert training.sums.loss == pytest.approx(lonely.sums.loss, rel=1e-6)


def test_adapters_of_any_ranks_and_targets_run_in_one_call(monkeypatch):
    """Whatever their number, and however their requests stand in the batch."""
    backbone = make_backbone("llama")
    adapters = [
        make_adapter(backbone, seed=i, r=1 + i, target_modules=targets)
        for i, targets in enumerate(
            ["all-linear", ("q_proj", "v_proj"), ("o_proj", "down_proj", "lm_head"), "all-linear"]
        )
    ]
    users = [0, 2, None, 1, 3, 0, 2]
    prompts = [random_tokens(3 + i, i) for i in range(len(users))]
    bypasses = [None if user is None else adapters[user].bypasses() for user in users]
    add, calls = backbone.backend.add_adapters, []
    monkeypatch.setattr(
        backbone.backend, "add_adapters", lambda *given: calls.append(given) or add(*given)
    )
    sequences = [
        CachedSequence(backbone, len(p), b) for p, b in zip(prompts, bypasses, strict=True)
    ]
    hidden = forward(
        backbone, [seq.extend(prompt) for seq, prompt in zip(sequences, prompts, strict=True)]
    )
    owners = [(len(prompt), b) for prompt, b in zip(prompts, bypasses, strict=True)]
    found = logits(backbone, hidden, owners).split([len(prompt) for prompt in prompts])
    assert len(calls) == 4 * 3 + 1
    for ours, prompt, user in zip(found, prompts, users, strict=True):
        theirs = alone(backbone, prompt, None if user is None else adapters[user])
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_one_adapters_nan_never_reaches_another_row():
    backbone = make_backbone("llama")
    good, bad = make_adapter(backbone, seed=1), make_adapter(backbone, seed=2)
    for master in bad.masters.values():
        master.fill_(float("nan"))
    prompts = [random_tokens(5, 1), random_tokens(7, 2), random_tokens(3, 3)]
    users = [good, bad, None]
    sequences = [CachedSequence(backbone, 8, user.bypasses() if user else None) for user in users]
    hidden = forward(
        backbone, [seq.extend(prompt) for seq, prompt in zip(sequences, prompts, strict=True)]
    )
    torch.testing.assert_close(
        logits(backbone, hidden[:5], [(5, good.bypasses())]),
        alone(backbone, prompts[0], good),
        atol=1e-5,
        rtol=0,
    )
    torch.testing.assert_close(
        logits(backbone, hidden[12:]), alone(backbone, prompts[2]), atol=1e-5, rtol=0
    )
    assert hidden[5:12].isnan().all()


@pytest.mark.parametrize("with_adapter", [False, True])
def test_a_decode_step_does_not_depend_on_its_company(with_adapter):
    """Greedy tokens in float32 are exactly the same alone and beside others (invariant 3)."""
    backbone = make_backbone("llama")
    adapter, own = (
        make_adapter(backbone),
        make_adapter(backbone, seed=3, r=5) if with_adapter else None,
    )

    def decode(company: bool) -> list[int]:
        bypasses = own.bypasses() if own else None
        sequence, tokens, chosen = CachedSequence(backbone, 30, bypasses), random_tokens(6, 1), []
        other = CachedSequence(backbone, 80, adapter.bypasses())
        for step in range(20):
            spans = [sequence.extend(tokens)]
            if company:
                spans.append(other.extend(random_tokens(1 + step % 4, step)))
            row = forward(backbone, spans)[len(tokens) - 1 : len(tokens)]
            chosen.append(int(logits(backbone, row, [(1, bypasses)]).argmax()))
            tokens = torch.tensor(chosen[-1:])
        return chosen

    assert decode(company=True) == decode(company=False)
