"""An adapter whose model had its vocabulary resized, in an engine: requests, sampling, jobs; beside
others."""

from pathlib import Path

import pytest
import torch
from engines import examples_of, make_engine
from peft import PeftModel
from peft_embeddings import RESIZED, Cell, base_of, greedy, made_by_peft
from peft_methods import peft_logits
from support import VOCAB, make_adapter, make_backbone, make_model, model_directory, random_tokens

from coserve import OptimizerConfig, SamplingParams, TuningConfig
from coserve.adapters import load_adapter, save_adapter
from coserve.devices.torch import adapter_memory
from coserve.engine.request import Chunk
from coserve.errors import AdapterError, AdapterTooLargeError, JobError, RequestError
from coserve.models import CachedSequence, forward, logits

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
WIDE = Cell(tied=False, resized=True)
PROMPTS = [[3, 8, 1, 9], [VOCAB + 2, 4, VOCAB + 5, 7], [2, 2, 6], [5, 1]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3)


def made(cell=WIDE):
    found = made_by_peft(cell)
    assert not isinstance(found, str)
    return found


def test_rows_of_all_vocabularies_share_a_batch():
    """Each of which gets what it gets alone, and -inf for tokens that its model does not have."""
    backbone = make_backbone("llama")
    _, directory = made()
    _, other = made(Cell(tied=False, resized=False, whole="both"))
    adapters = [
        load_adapter(backbone, directory),
        None,
        load_adapter(backbone, other),
        make_adapter(backbone),
    ]
    users = [
        (adapter, random_tokens(3 + index, index))
        for index, adapter in enumerate([*adapters, *adapters])
    ]
    users[0][1][1] = VOCAB + 3
    runs = [(len(tokens), adapter and adapter.bypasses()) for adapter, tokens in users]

    def run(chosen):
        spans = [
            CachedSequence(backbone, 60, adapter and adapter.bypasses()).extend(tokens)
            for adapter, tokens in chosen
        ]
        sizes = [(len(tokens), adapter and adapter.bypasses()) for adapter, tokens in chosen]
        return logits(backbone, forward(backbone, spans), sizes)

    together = run(users).split([num_rows for num_rows, _ in runs])
    for user, mixed in zip(users, together, strict=True):
        alone = run([user])
        assert mixed.shape[1] == RESIZED and alone.shape[1] in (VOCAB, RESIZED)
        torch.testing.assert_close(mixed[:, : alone.shape[1]], alone, atol=1e-5, rtol=1e-5)
        assert torch.isneginf(mixed[:, alone.shape[1] :]).all()


def test_results_that_depend_on_no_company_have_all_tokens_of_the_adapter():
    """Rows in blocks have the logits of rows as they come."""
    _, directory = made()
    tokens, found = torch.tensor([3, VOCAB + 1, 5]), []
    for backbone in (make_backbone("llama"), make_backbone("llama").deterministic()):
        bypasses = load_adapter(backbone, directory).bypasses()
        hidden = forward(backbone, [CachedSequence(backbone, 3, bypasses).extend(tokens)])
        found.append(logits(backbone, hidden, [(3, bypasses)]))
    assert found[0].shape == (3, RESIZED)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def engine_with(directory: Path, family: str = "llama"):
    engine = make_engine(family)
    engine.load_adapter("wide", str(directory))
    return engine


def test_requests_of_an_engine_get_pefts_tokens_beside_others():
    theirs, directory = made()
    engine = engine_with(directory)
    adapters = ["wide", "wide", None, "wide"]
    ids = [
        engine.add(prompt, GREEDY, adapter=adapter)
        for prompt, adapter in zip(PROMPTS, adapters, strict=True)
    ]
    found: dict[str, list[int]] = {request: [] for request in ids}
    while engine.requests:
        for chunk in engine.step():
            if isinstance(chunk, Chunk):
                found[chunk.request.partition("/")[0]] += chunk.tokens
    alone = make_engine().generate([PROMPTS[2]], GREEDY)[0]
    for prompt, adapter, tokens in zip(PROMPTS, adapters, found.values(), strict=True):
        expected = greedy(lambda rows: peft_logits(theirs, rows), torch.tensor(prompt), 6)
        assert list(tokens) == (list(alone.tokens) if adapter is None else expected)
        assert max(expected) < RESIZED


def test_settings_know_the_tokens_of_the_adapter():
    _, directory = made()
    engine, new = engine_with(directory), VOCAB + 3
    only = SamplingParams(max_tokens=2, allowed_token_ids=(new,), logprobs=2)
    assert list(engine.generate([[1, 2]], only, adapter="wide")[0].tokens) == [new, new]
    drawn = SamplingParams(
        max_tokens=5, temperature=1.5, top_k=4, top_p=0.9, min_p=0.01, seed=1, logit_bias={new: 3.0}
    )
    assert len(engine.generate([[1, 2]], drawn, adapter="wide")[0].tokens) == 5
    for adapter, prompt, params in (
        (None, [new], GREEDY),
        ("wide", [RESIZED], GREEDY),
        (None, [1], only),
    ):
        with pytest.raises(
            RequestError, match=f"the model has {VOCAB if adapter is None else RESIZED}"
        ):
            engine.generate([prompt], params, adapter=adapter)


def test_the_base_and_prompt_logprobs_are_what_they_were():
    _, directory = made()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    engine, alone = engine_with(directory), make_engine()
    assert engine.generate([PROMPTS[2]], params) == alone.generate([PROMPTS[2]], params)
    engine.add([3, VOCAB + 1, 7], params, adapter="wide")
    chunks = [chunk for chunk in engine.step() if isinstance(chunk, Chunk)]
    assert [line.token for line in chunks[0].prompt_logprobs] == [VOCAB + 1, 7]


@pytest.mark.parametrize("cell", [WIDE, Cell(tied=True, resized=True, tokens="list")], ids=str)
def test_a_job_continues_with_such_an_adapter_and_peft_reads_what_it_made(cell, tmp_path):
    _, directory = made(cell)
    engine = engine_with(directory, cell.family)
    data = [replace_token(example, VOCAB + 1) for example in examples_of((9, 7, 8, 6))]
    config = TuningConfig(num_epochs=3, batch_size=2, optimizer=OptimizerConfig(learning_rate=1e-2))
    with pytest.raises(JobError, match=f"has a token beyond the model's {VOCAB}"):
        engine.submit(data, config)
    losses = [
        event.loss
        for event in engine.tune(data, config, adapter="wide", name="more")
        if event.kind == "step"
    ]
    assert losses[-1] < losses[0]
    engine.save_adapter("more", tmp_path)
    again = PeftModel.from_pretrained(base_of(cell), str(tmp_path)).eval()
    ours, rows = (
        load_adapter(make_backbone(cell.family), tmp_path),
        torch.tensor([3, VOCAB + 1, 5, VOCAB + 4]),
    )
    hidden = forward(
        ours.backbone, [CachedSequence(ours.backbone, 4, ours.bypasses()).extend(rows)]
    )
    found = logits(ours.backbone, hidden, [(4, ours.bypasses())])
    torch.testing.assert_close(found, peft_logits(again, rows), atol=1e-4, rtol=0)


def replace_token(example, token):
    tokens = (example.tokens[0], token, *example.tokens[2:])
    return type(example)(tokens=tokens, trained=example.trained)


def test_a_checkpoint_of_such_a_job_is_continued(tmp_path):
    _, directory = made()
    engine, data = engine_with(directory), examples_of((9, 7, 8, 6))
    config = TuningConfig(num_epochs=3, batch_size=1, optimizer=OptimizerConfig(learning_rate=1e-2))
    job = engine.submit(data, config, adapter="wide", name="more")
    while engine.jobs[job].num_steps_done < 4:
        engine.step()
    checkpoint = engine.checkpoint(job).write(tmp_path)
    resumed = make_engine()
    resumed.submit_examples(data, config, checkpoint=checkpoint, job_id="again", name="again")
    while resumed.jobs["again"].num_steps_done < 6:
        resumed.step()
    while engine.jobs[job].num_steps_done < 6:
        engine.step()
    ours, theirs = (tmp_path / name for name in ("one", "two"))
    written = engine.checkpoint(job).write(ours), resumed.checkpoint("again").write(theirs)
    one, two = (load_adapter(make_backbone("llama"), each) for each in written)
    for name, master in one.masters.items():
        torch.testing.assert_close(two.masters[name], master, atol=1e-6, rtol=0)
    assert one.layout.frozen == two.layout.frozen


def test_memory_counts_what_is_not_trained(monkeypatch):
    _, directory = made()
    needed = RESIZED * 32 * 4 * 2
    monkeypatch.setattr(adapter_memory, "available_bytes", lambda device: needed)
    with pytest.raises(
        AdapterTooLargeError,
        match=rf"largest tensor is model.embed_tokens.weight, \[{RESIZED}, 32\]",
    ):
        engine_with(directory)


def test_weights_of_the_same_vocabulary_that_differ_are_used_and_equal_ones_take_no_memory(
    tmp_path,
):
    """`save_embedding_layers=True` writes them in any case."""
    from safetensors.torch import load_file, save_file

    backbone = make_backbone("llama")
    save_adapter(make_adapter(backbone), tmp_path)
    path, table = (
        tmp_path / "adapter_model.safetensors",
        "base_model.model.model.embed_tokens.weight",
    )
    own = make_model("llama").get_input_embeddings().weight.detach().clone()
    save_file({**load_file(path), table: own}, path, metadata={"format": "pt"})
    assert load_adapter(backbone, tmp_path).layout.frozen is None
    save_file({**load_file(path), table: own + 1}, path, metadata={"format": "pt"})
    found = load_adapter(backbone, tmp_path)
    assert found.layout.frozen is not None and found.layout.frozen.modules == (
        "model.embed_tokens",
    )
    assert found.layout.num_frozen == VOCAB * 32
    assert torch.equal(found.frozen_weights["model.embed_tokens"], own + 1)


def test_a_vocabulary_without_a_head_is_named(tmp_path):
    found = made_by_peft(Cell(tied=False, resized=True, targets="embed"))
    assert not isinstance(found, str)
    with pytest.raises(
        AdapterError,
        match=f"is for {RESIZED} tokens, .* the weight of lm_head for them is not in it",
    ):
        load_adapter(make_backbone("llama"), found[1])


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma2", "qwen3", "gemma3"])
def test_other_families_have_vocabularies_of_their_own(family, tmp_path):
    """Smaller ones, too, as a tokenizer with less than a padded table leaves them."""
    import peft

    base = make_model(family)
    base.name_or_path = str(model_directory(family))
    base.resize_token_embeddings(VOCAB - 7, mean_resizing=False)
    config = peft.LoraConfig(target_modules=r".*(q_proj|c_attn)", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path)
    ours, rows = load_adapter(make_backbone(family), tmp_path), random_tokens(9, 1) % (VOCAB - 7)
    hidden = forward(
        ours.backbone, [CachedSequence(ours.backbone, 9, ours.bypasses()).extend(rows)]
    )
    found = logits(ours.backbone, hidden, [(9, ours.bypasses())])
    assert found.shape[1] == VOCAB and torch.isneginf(found[:, VOCAB - 7 :]).all()
    torch.testing.assert_close(found[:, : VOCAB - 7], peft_logits(theirs, rows), atol=1e-4, rtol=0)
