"""Every PEFT method that there is, against PEFT: logits, gradients, steps, directories; alone and
in one batch."""

import json
import shutil

import pytest
import torch
from engines import examples_of, make_engine
from peft import PeftModel
from peft_methods import (
    CASES,
    Ours,
    config_of,
    ours_of,
    peft_directory,
    peft_gradients,
    peft_logits,
    reference,
    train_peft,
)
from peft_training import train_by_autograd
from support import (
    make_backbone,
    make_model,
    model_directory,
    random_sequences,
    random_tokens,
    worst_error,
)
from transformers import AutoModelForCausalLM

from coserve.adapters import Adapter, LoraConfig, load_adapter, save_adapter
from coserve.adapters.merge import export_merged
from coserve.adapters.methods import method
from coserve.adapters.methods.diff_pruning import DiffPruningConfig
from coserve.adapters.methods.ia3 import Ia3Config
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.adapters.peft_directory import adapter_config
from coserve.engine.jobs.events import JobEvent
from coserve.errors import AdapterError
from coserve.models import CachedSequence, forward, logits
from coserve.tuning.config import OptimizerConfig, TuningConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lora_bias:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*invalid shape:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
]
TEN_STEPS = ("lora", "dora", "pissa", "ia3", "p-tuning")  # the others' are long
PAIRS = [
    pytest.param(case, family, marks=() if number == 0 or case in TEN_STEPS else pytest.mark.long)
    for case, found in CASES.items()
    for number, family in enumerate(found.families)
]
TOKENS, SEQUENCES = random_tokens(12, 1), random_sequences((9, 6))


@pytest.mark.parametrize(("case", "family"), PAIRS)
def test_logits_and_gradients_equal_pefts(case, family):
    theirs, ours = reference(case, family), ours_of(case, family)
    torch.testing.assert_close(ours.logits(TOKENS), peft_logits(theirs, TOKENS), atol=1e-4, rtol=0)
    assert (
        worst_error(ours.in_peft(ours.gradients(SEQUENCES)), peft_gradients(theirs, SEQUENCES))
        < 1e-5
    )


@pytest.mark.parametrize("case", ["ia3", "dora", "vera", "bottleneck", "prefix-tuning"])
def test_gradients_are_the_same_where_little_is_kept(case):
    ours = ours_of(case, "qwen2")
    assert worst_error(ours.gradients(SEQUENCES, budget=500), ours.gradients(SEQUENCES)) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_directories_go_both_ways(case, tmp_path):
    family = CASES[case].families[0]
    ours = ours_of(case, family)
    save_adapter(ours.adapter, tmp_path)
    again = load_adapter(make_backbone(family), tmp_path)
    assert again.config == ours.adapter.config
    for name, master in ours.adapter.masters.items():
        assert torch.equal(again.masters[name], master)
    if CASES[case].peft is None:
        return
    theirs = PeftModel.from_pretrained(make_model(family), tmp_path).eval()
    torch.testing.assert_close(ours.logits(TOKENS), peft_logits(theirs, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in TEN_STEPS else pytest.mark.long) for case in CASES],
)
def test_ten_steps_give_pefts_adapter(case):
    family = CASES[case].families[0]
    theirs, ours = reference(case, family, seed=3), ours_of(case, family, seed=3)
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.01)
    batches = [random_sequences((7, 5), seed=step) for step in range(10)]
    before = ours.logits(TOKENS)
    ours.train(batches, config)
    train_peft(theirs, batches, config)
    assert (ours.logits(TOKENS) - before).abs().max() > 0.05, "it has learned something"
    torch.testing.assert_close(ours.logits(TOKENS), peft_logits(theirs, TOKENS), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "config", [PromptTuningConfig(num_virtual_tokens=3), PrefixTuningConfig(num_virtual_tokens=3)]
)
def test_peft_reads_virtual_tokens_of_a_model_whose_heads_it_does_not_find(config, tmp_path):
    """MPT's configuration has `n_heads`."""
    adapter = Adapter(make_backbone("mpt"), config, seed=2)
    save_adapter(adapter, tmp_path)
    assert load_adapter(make_backbone("mpt"), tmp_path).config == config
    model = PeftModel.from_pretrained(make_model("mpt"), tmp_path)
    (table,) = [each for name, each in model.named_parameters() if "prompt_encoder" in name]
    assert torch.equal(table, torch.cat(list(adapter.masters.values()), 1))


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite"])
def test_virtual_tokens_begin_as_the_embeddings_of_tokens(family):
    config = PromptTuningConfig(num_virtual_tokens=3, prompt_tuning_init="SAMPLE_VOCAB")
    (found,) = config.create(make_backbone(family), seed=0).masters.values()
    embeddings = make_model(family).get_input_embeddings()
    every = embeddings(torch.arange(embeddings.num_embeddings))
    assert (
        torch.cdist(found, every, compute_mode="donot_use_mm_for_euclid_dist").min(1).values < 1e-5
    ).all()


@pytest.mark.parametrize("family", ["llama", "llama-biases-tied"])
@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens",)])
def test_a_job_begins_with_whole_modules_as_the_model_has_them(family, modules, tmp_path):
    """Backends may lay weights by columns, as the CPU's does in float32: the adapter's own are
    learned row by row."""
    lora = LoraConfig(r=3, target_modules=("v_proj",), modules_to_save=modules)
    config = TuningConfig(
        num_epochs=2, batch_size=2, seed=4, optimizer=OptimizerConfig(learning_rate=1e-2)
    )
    examples, engine = examples_of((9, 14, 5)), make_engine(family)
    events = engine.tune(examples, config, adapter=lora, name="mine")
    save_adapter(Adapter(make_backbone(family), lora, seed=config.seed), tmp_path)
    model = PeftModel.from_pretrained(make_model(family), str(tmp_path), is_trainable=True)
    losses = [
        event.loss for event in events if isinstance(event, JobEvent) and event.kind == "step"
    ]
    assert losses == pytest.approx(train_by_autograd(model, examples, config), rel=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gptj", "qwen3-moe"])
def test_rows_of_all_methods_share_a_batch(family):
    """Each of which gets what it gets alone."""
    backbone = make_backbone(family)
    found = {case: ours_of(case, family) for case in CASES if family in CASES[case].families}
    assert len(found) >= 6
    users = [(case, random_tokens(3 + index, index)) for index, case in enumerate([*found, *found])]
    spans, rows = [], []
    for case, tokens in users:
        own, bypasses = found[case].with_virtual(tokens), found[case].adapter.bypasses()
        spans.append(CachedSequence(backbone, 60, bypasses).extend(own))
        rows.append((len(own), bypasses))
    together = logits(backbone, forward(backbone, spans), rows).split(
        [num_rows for num_rows, _ in rows]
    )
    for (case, tokens), mixed in zip(users, together, strict=True):
        torch.testing.assert_close(
            mixed[-len(tokens) :], found[case].logits(tokens), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("case", CASES)
def test_a_jobs_settings_are_pefts(case):
    """What a client asks for is what PEFT's own configuration says."""
    asked = config_of(case)
    assert adapter_config(asked.to_peft()) == asked
    if CASES[case].peft is None:
        return
    theirs = CASES[case].peft().to_dict()
    ours = {name: value for name, value in asked.to_peft().items() if name != "inference_mode"}
    assert {name: _plain(value) for name, value in ours.items()} == {
        name: _plain(theirs.get(name)) for name in ours
    }


def _plain(value):
    return (sorted(value) if isinstance(value, set | list | tuple) else value) or None


def test_gates_of_diff_pruning_are_those_of_the_paper():
    """Hard concrete gates with noise, their gradients and the penalty's, against autograd on the
    formulas."""
    config = DiffPruningConfig(fraction=0.1, penalty=0.01)
    adapter = Adapter(make_backbone("qwen2"), config)
    gates = config.reparametrization(adapter, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(1)
    for value in gates.parameters.values():
        value.copy_(torch.randn(value.shape, generator=generator))
    gates.apply(adapter)
    names = list(adapter.masters)
    grads = {
        name: torch.randn(master.shape, generator=generator)
        for name, master in adapter.masters.items()
    }
    w = [gates.parameters[name].clone().requires_grad_() for name in names]
    alpha = [gates.parameters[f"{name}.gate"].clone().requires_grad_() for name in names]
    draws, total = torch.Generator().manual_seed(5 + 1), torch.zeros(())
    for name, own, gate in zip(names, w, alpha, strict=True):
        u = torch.rand(own.shape, generator=draws).clamp(1e-6, 1 - 1e-6)
        s = torch.sigmoid(torch.log(u) - torch.log(1 - u) + gate)
        delta = own * torch.clamp(s * 3.0 - 1.5, 0, 1)
        torch.testing.assert_close(adapter.masters[name], delta.detach())
        total = total + (delta * grads[name]).sum() + 7 * 0.01 * torch.sigmoid(gate).sum()
    expected = torch.autograd.grad(total, [*w, *alpha])
    found = gates.pull_back(grads, num_trained=7)
    theirs = dict(zip([*names, *(f"{name}.gate" for name in names)], expected, strict=True))
    assert worst_error(found, theirs) < 1e-5
    published = torch.cat([value.flatten() for value in gates.published().values()])
    assert (published != 0).float().mean() == pytest.approx(0.1, abs=0.01)


PARALLEL = "lora-whole-parallel"
MERGED = [
    case
    for case, found in CASES.items()
    if not config_of(case).num_virtual_tokens and case != "bottleneck"
]


@pytest.mark.parametrize(
    ("case", "family"),
    [
        *[("lora", "gpt2"), ("lora-bias", "opt"), (PARALLEL, "gptj")],
        *((case, "qwen2") for case in MERGED if case not in ("lora-bias", PARALLEL)),
    ],
)
def test_a_merged_model_is_the_model_with_its_adapter(case, family, tmp_path):
    directory = peft_directory(case, family)
    export_merged(str(model_directory(family)), directory, tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(
        peft_logits(theirs, TOKENS), ours_of(case, family).logits(TOKENS), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("case", ["prompt-tuning", "bottleneck"])
def test_what_cannot_be_merged_says_so(case, tmp_path):
    with pytest.raises(
        AdapterError,
        match="adapters cannot be merged: they add what the model's weights cannot have",
    ):
        export_merged(str(model_directory("qwen2")), peft_directory(case, "qwen2"), tmp_path)


def test_a_head_that_was_tied_is_written_by_itself(tmp_path):
    family = "llama-biases-tied"
    adapter = Adapter(make_backbone(family), LoraConfig(target_modules=("lm_head",), r=2))
    for master in adapter.masters.values():
        master.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    adapter.sync_compute_copy()
    save_adapter(adapter, tmp_path / "adapter")
    export_merged(str(model_directory(family)), tmp_path / "adapter", tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ours = Ours(adapter, adapter.config).logits(TOKENS)
    torch.testing.assert_close(peft_logits(theirs, TOKENS), ours, atol=1e-4, rtol=0)


def test_modules_that_are_not_there_are_named():
    with pytest.raises(
        AdapterError,
        match=r"modules_to_save score matches no module .* it has embed_tokens, lm_head",
    ):
        Adapter(make_backbone("qwen2"), LoraConfig(modules_to_save=("score",)))


def test_nothing_is_said_where_something_is_taken_for_granted():
    config = Ia3Config(target_modules=("k_proj",), feedforward_modules=())
    assert config.to_peft()["feedforward_modules"] == []
    assert adapter_config(config.to_peft()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"type": "ia3", "target_modules": ["k_proj"]},
            "feedforward_modules down_proj must be among the target_modules",
        ),
        ({"type": "vera", "r": 0}, "VeRA's r must be a whole number from 1"),
        ({"type": "vera", "exclude_modules": ["q_proj"]}, "VERA has no exclude_modules"),
        (
            {"type": "bottleneck", "non_linearity": "cubic"},
            "non_linearity must be one of swish, .* not 'cubic'",
        ),
        (
            {"type": "prompt_tuning", "num_virtual_tokens": 0},
            "num_virtual_tokens must be a whole number from 1",
        ),
        (
            {"type": "prompt_tuning", "prompt_tuning_init": "TEXT"},
            "prompt_tuning_init must be RANDOM or SAMPLE_VOCAB",
        ),
        (
            {"type": "p_tuning", "encoder_reparameterization_type": "GRU"},
            "must be MLP or LSTM, not 'GRU'",
        ),
        (
            {"type": "prefix_tuning", "prefix_projection": "yes"},
            "prefix_projection must be true or false",
        ),
        (
            {"type": "diff_pruning", "fraction": 2},
            "fraction must be a number above 0 and at most 1",
        ),
        ({"type": "bitfit", "target_modules": "q_proj"}, "target_modules must be a list of names"),
        (
            {"type": "full", "layers_to_transform": ["0"]},
            "layers_to_transform must be a list of whole numbers",
        ),
        (
            {"type": "lora", "modules_to_save": "lm_head"},
            "modules_to_save must be a list of names, not 'lm_head'",
        ),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    named = {name: value for name, value in settings.items() if name != "type"}
    with pytest.raises(ValueError, match=message):
        method(settings["type"])(**named)


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("ia3", {"init_ia3_weights": False}, None),
        (
            "ia3",
            {"something_new": 3},
            "uses something_new=3, which is not supported; supported is IA3 on linear layers",
        ),
        ("vera", {"projection_prng_key": 7}, "is not what projection_prng_key=7 gives"),
        ("vera", {"r": 2**30}, "has shape"),
        (
            "prompt-tuning",
            {"num_virtual_tokens": 4},
            r"prompt_embeddings has shape \[3, 32\], .* needs \[4, 32\]",
        ),
        ("p-tuning", {"encoder_dropout": 0.5}, "uses encoder_dropout=0.5"),
        ("prefix-tuning", {"num_virtual_tokens": None}, "lacks 'num_virtual_tokens'"),
        (
            "bitfit",
            {"target_modules": ["fc9"]},
            "matches no module with a bias of this qwen2; it has q_proj, k_proj, v_proj",
        ),
        ("bottleneck", {"reduction_factor": 8}, r"has shape \[\d+, 32\], .* needs \[\d+, 32\]"),
        (
            "bottleneck",
            {"non_linearity": "cubic"},
            "non_linearity must be one of swish, .* not 'cubic'",
        ),
        (
            "diff-pruning",
            {"target_modules": ["q_proj", "up_proj"]},
            "lacks .*up_proj.*; it was made for another model",
        ),
        ("diff-pruning", {"fraction": "half"}, "fraction must be a number above 0 and at most 1"),
    ],
)
def test_a_bad_directory_gets_one_line(case, edit, message, tmp_path):
    directory = shutil.copytree(peft_directory(case, "qwen2"), tmp_path / "bad")
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    if message is None:
        load_adapter(make_backbone("qwen2"), directory)
        return
    with pytest.raises(AdapterError, match=message) as error:
        load_adapter(make_backbone("qwen2"), directory)
    assert "\n" not in str(error.value)


def test_bitfit_on_a_model_without_biases_says_so():
    with pytest.raises(AdapterError, match="this llama has no biases for BitFit to train"):
        Adapter(make_backbone("llama"), method("bitfit")())
