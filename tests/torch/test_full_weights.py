"""Full fine-tuning: the model's own weights are trained where they are served."""

import json
from dataclasses import replace

import pytest
import torch
from engines import drain, examples_of, greedy, make_engine, prompts_of, tokens_by_request
from small_disk import small_disk
from support import (
    make_adapter,
    make_model,
    model_directory,
    peft_gradients,
    random_sequences,
    random_tokens,
    summed_loss,
    worst_error,
)
from transformers import AutoModelForCausalLM

from coserve.adapters import save_adapter
from coserve.adapters.full_weights import FullWeights
from coserve.adapters.methods.full import FullConfig
from coserve.devices.messages.jobs import ReadContributions
from coserve.engine.request import Chunk
from coserve.errors import AdapterError, AdapterTooLargeError
from coserve.home import is_disk_full
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.optimizer import AdapterOptimizer
from coserve.tuning.shard import Combination, Shard

SEQUENCES, TOKENS = random_sequences((9, 6)), random_tokens(12, 1)
CONFIG = TuningConfig(
    num_epochs=3, batch_size=2, live=True, optimizer=OptimizerConfig(learning_rate=3e-3)
)
DATA = examples_of((9, 12, 7, 10))


def fresh(name="llama", dtype="float32"):
    """A backbone of its own: its weights are about to change."""
    return load_backbone(str(model_directory(name)), dtype=dtype)


def full_of(backbone, **settings):
    config = FullConfig(**settings)
    return FullWeights(backbone, config, config.chosen(backbone.architecture))


def gradients(weights):
    training = TrainingPass(weights, training_programs(weights), make_pack(SEQUENCES))
    run_alone(training, forward_rows=7, backward_rows=5)
    return training.gradients


def logits_of(backbone):
    return logits(
        backbone, forward(backbone, [CachedSequence(backbone, len(TOKENS)).extend(TOKENS)])
    )


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "opt", "qwen3"])
def test_gradients_of_all_weights_equal_autograds(name):
    weights, model = full_of(fresh(name)), make_model(name)
    theirs = peft_gradients(model, SEQUENCES)
    ours = gradients(weights)
    assert worst_error(ours, {key: theirs[key] for key in ours}) < 1e-5
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"}, "but for a head that is the table"


def test_chosen_layers_and_modules_alone_are_trained():
    backbone = fresh()
    some = full_of(backbone, layers_to_transform=(1,), target_modules=("q_proj", "down_proj"))
    names = ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    assert list(some.masters) == names
    theirs = peft_gradients(make_model(), SEQUENCES)
    assert worst_error(gradients(some), {name: theirs[name] for name in names}) < 1e-5
    with pytest.raises(AdapterError, match="leave no weight of this model to train"):
        full_of(backbone, target_modules=("fc9",))


def test_ten_steps_equal_those_of_torch():
    backbone, model = fresh(), make_model()
    weights, config = full_of(backbone), OptimizerConfig(learning_rate=1e-3, weight_decay=0.01)
    ours, theirs = (
        AdapterOptimizer(weights.masters, config),
        torch.optim.AdamW(model.parameters(), 1e-3),
    )
    for group in theirs.param_groups:
        group["weight_decay"] = 0.01
    for _ in range(10):
        ours.step(gradients(weights), num_trained=1, num_steps=10)
        weights.sync_compute_copy()
        model.zero_grad()
        summed_loss(model, SEQUENCES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        theirs.step()
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(backbone), model(TOKENS[None]).logits[0], atol=1e-3, rtol=0
        )


def test_what_serves_in_bfloat16_is_the_masters_rounded():
    backbone = fresh(dtype="bfloat16")
    weights = full_of(backbone)
    for master in weights.masters.values():
        master.add_(0.125)
    weights.sync_compute_copy()
    part = weights.parameters(1)
    assert torch.equal(
        part["mlp.up_proj.weight"], weights.masters["model.layers.1.mlp.up_proj.weight"].bfloat16()
    )
    held = backbone.weights[1]["mlp.up_proj.weight"]
    assert held.tensors()[0].data_ptr() == part["mlp.up_proj.weight"].data_ptr(), (
        "there is no second copy"
    )


@pytest.fixture
def engine(monkeypatch):
    """An engine on weights that no other test has."""
    monkeypatch.setattr("engines.make_backbone", lambda *_: fresh())
    return make_engine()


def run_to_end(engine):
    events = []
    while not all(job.is_terminal for job in engine.jobs.values()):
        events += engine.step()
        engine.check_integrity()
    return events + engine.step()


def test_a_job_serves_each_step_and_its_checkpoint_is_a_model(engine, tmp_path):
    prompt = prompts_of((20,))[0]
    engine.generate([prompt], greedy(4))  # what it computes of the prompt is kept
    engine.submit_examples(DATA, CONFIG, adapter=FullConfig(), job_id="job", name="mine")
    events = run_to_end(engine)
    losses = [event.loss for event in events if event.kind == "step"]
    assert losses[-1] < losses[0]
    written = engine.checkpoint("job").write(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(written).eval()
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    for adapter in (None, "mine"):
        name = engine.add(prompt, greedy(6), adapter=adapter)
        events = drain(engine)
        assert tokens_by_request(events)[name] == tuple(out[0, len(prompt) :].tolist())
        first = next(
            event for event in events if isinstance(event, Chunk) and event.request == name
        )
        assert not first.num_cached_tokens, (
            "what was computed with the old weights is none of its prefix"
        )


def test_a_job_that_resumes_ends_as_one_that_was_never_stopped(monkeypatch, tmp_path):
    results = []
    for stops in (False, True):
        monkeypatch.setattr("engines.make_backbone", lambda *_: fresh())
        engine = make_engine()
        engine.submit_examples(DATA, CONFIG, adapter=FullConfig(), job_id="job", name="mine")
        if stops:
            while engine.jobs["job"].num_steps_done < 3:
                engine.step()
            checkpoint = engine.checkpoint("job").write(tmp_path / "stopped")
            engine = make_engine()
            engine.submit_examples(
                DATA, CONFIG, adapter=FullConfig(), checkpoint=checkpoint, job_id="job", name="mine"
            )
        run_to_end(engine)
        results.append(
            AutoModelForCausalLM.from_pretrained(
                engine.checkpoint("job").write(tmp_path / str(stops))
            )
        )
    for ours, theirs in zip(*(model.parameters() for model in results), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_adapters_and_full_weights_keep_out_of_each_others_way(engine, tmp_path):
    directory = str(tmp_path / "adapter")
    save_adapter(make_adapter(fresh()), directory)
    engine.load_adapter("old", directory)
    with pytest.raises(
        AdapterError, match="would change the weights that others were trained on: old@0"
    ):
        engine.submit_examples(DATA, CONFIG, adapter=FullConfig(), job_id="first", name="first")
    engine.unload_adapter("old")
    engine.step()
    engine.submit_examples(DATA, CONFIG, adapter=FullConfig(), job_id="job", name="mine")
    with pytest.raises(AdapterError, match="job job has changed the weights of"):
        engine.load_adapter("old", directory)


def test_too_little_memory_is_refused_with_what_is_missing(engine, monkeypatch):
    monkeypatch.setattr("coserve.devices.torch.adapter_memory.available_bytes", lambda device: 1000)
    with pytest.raises(AdapterTooLargeError, match=r"[\d,]+ bytes are missing"):
        engine.submit_examples(DATA, CONFIG, adapter=FullConfig(), job_id="job", name="mine")


def test_int8_weights_cannot_be_trained():
    backbone = load_backbone(str(model_directory()), dtype="float32", weights="int8")
    with pytest.raises(AdapterError, match="int8 weights cannot be trained"):
        full_of(backbone)


def test_between_exchanges_of_nodes_nothing_of_older_weights_is_a_prefix(engine, tmp_path):
    prompt = prompts_of((20,))[0]
    shard = Shard(
        job="job",
        index=0,
        count=2,
        synchronization="local-sgd",
        every_steps=1,
        meet_every_steps=0,
        directory=str(tmp_path),
    )
    engine.generate([prompt], greedy(4))  # what it computes of the prompt is kept
    engine.submit_examples(
        DATA, CONFIG, adapter=FullConfig(), job_id="job.0", name="mine", shard=shard
    )

    def cached() -> int:
        name = engine.add(prompt, greedy(1))
        return next(
            e.num_cached_tokens for e in drain(engine) if isinstance(e, Chunk) and e.request == name
        )

    while not engine.jobs["job.0"].exchange.is_waiting:
        engine.step()
    assert cached() == 0, "it waits for the other, and has made a step of its own"
    contribution = engine.contribution("job.0")
    contribution.write(tmp_path)
    engine.device.execute(ReadContributions("job.0", (str(tmp_path),) * 2))
    engine.combine("job.0", Combination(directories=(str(tmp_path),) * 2, num_trained=2))
    assert cached() == 0, "it has what both have made"


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", ()), ("llama", ("lm_head",)), ("llama-biases-tied", ("embed_tokens",))],
)
def test_an_objective_over_sequences_does_not_train_the_output_layer(monkeypatch, name, targets):
    monkeypatch.setattr("engines.make_backbone", lambda *_: fresh(name))
    pairs = [
        Example(tokens=tuple(range(1, 9)), trained=(False, True, True, True) * 2, parts=(4, 4))
    ]
    config = TuningConfig(num_epochs=1, batch_size=1, live=True, objective="simpo")
    with pytest.raises(
        AdapterError,
        match="simpo does not train the output layer, nor a table of embeddings that is one",
    ):
        make_engine(name).submit_examples(pairs, config, adapter=FullConfig(target_modules=targets))
    with pytest.raises(
        AdapterError, match="dpo compares with the model as it was, and full fine-tuning changes it"
    ):
        make_engine(name).submit_examples(
            pairs, replace(config, objective="dpo"), adapter=FullConfig(layers_to_transform=(1,))
        )


def test_a_full_disk_is_told_as_one(tmp_path):
    """So that a checkpoint waits for room: safetensors' own error does not say which it is."""
    with (
        small_disk(tmp_path / "disk", size="16k") as disk,
        pytest.raises(OSError, match="No space left") as caught,
    ):
        FullConfig().create(fresh(), seed=0).save(disk.path / "checkpoint")
    assert is_disk_full(caught.value)


def test_a_model_of_its_own_is_saved_and_loaded_as_no_adapter(engine, tmp_path):
    engine.tune(DATA, CONFIG, adapter=FullConfig(), name="full")
    with pytest.raises(
        AdapterError, match=r"a model of its own, and no adapter.*checkpoint\(job_id\)"
    ):
        engine.save_adapter("full", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "adapter_config.json").write_text(json.dumps(FullConfig().to_peft()))
    with pytest.raises(
        AdapterError,
        match="FULL is full fine-tuning, which makes a model of its own, and no adapter",
    ):
        engine.load_adapter("again", tmp_path)
