"""Adapters with embeddings, head or norms of their own, and vocabularies of their own, on ranks:
as on one rank, in answers, gradients and files."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import pytest
import torch
from lengths import covering, long_but
from peft_embeddings import Cell, cells, made_by_peft
from rank_training import CONFIG, make_driver, num_trained, on_ranks, packs, trainer_of
from rank_training import put_together as parameters_together
from ranks import (
    assert_gradients_agree,
    put_together,
    relative_error,
    train_adapter,
    whole_backbone,
)
from support import VOCAB, random_tokens

from coserve.adapters import load_adapter, save_adapter
from coserve.adapters.frozen_weights import FROZEN
from coserve.adapters.held_parameters import held_elements
from coserve.devices.messages.commands import OpenVersion
from coserve.devices.messages.jobs import TakeCheckpoint
from coserve.devices.messages.steps import Update
from coserve.errors import AdapterError
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.threads import run_ranks
from coserve.models import CachedSequence, forward, logits
from coserve.models.dividing import divided_backbone
from coserve.models.head import likeliest_on_rank_0, logits_on_rank_0
from coserve.models.shared_files import named_when_written

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*no implementation exists to tie:UserWarning"),
]
WIDE = Cell(tied=False, resized=True)
QUICK = [
    WIDE,
    Cell(tied=True, resized=True),
    Cell(tied=True, resized=True, tokens="list"),
    Cell(tied=False, resized=True, whole="norm", method="ia3"),
    Cell(tied=False, resized=True, targets="both"),
    Cell(tied=False, resized=False, whole="both"),
    Cell(tied=True, resized=False, whole="norm", targets="embed"),
]
CELLS = long_but(*QUICK, of=covering(cells(), astuple, together=2, keep=QUICK))


def directory_of(cell):
    """Return where PEFT has written the adapter; None where it makes none, or one rank refuses."""
    made = made_by_peft(cell)
    if isinstance(made, str):
        return None
    try:
        load_adapter(whole_backbone(cell.family), made[1])
    except AdapterError:
        return None
    return made[1]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_combinations_are_what_they_are_on_one_rank(cell, size, tmp_path):
    whole, directory = whole_backbone(cell.family), directory_of(cell)
    if directory is None:
        return
    one = load_adapter(whole, directory)
    alone = train_adapter(one)

    def run(group):
        adapter = load_adapter(divided_backbone(whole, group), directory)
        assert adapter.layout.frozen == one.layout.frozen
        held = held_elements(adapter.backbone, adapter.layout)
        own = sum(map(torch.Tensor.numel, adapter.frozen_weights.values()))
        assert (held.parameters, held.frozen) == (adapter.num_parameters, own)
        trained = train_adapter(adapter)
        save_adapter(adapter, tmp_path / "ranks")
        return trained

    (tmp_path / "ranks").mkdir()
    with named_when_written(tmp_path / "ranks"):
        found = put_together(run_ranks(size, run), one.layout.shapes)
    assert relative_error(found.logits, alone.logits) < 1e-5
    assert abs(found.loss - alone.loss) < 1e-5 * abs(alone.loss)
    assert_gradients_agree(found.gradients, alone.gradients)
    save_adapter(one, tmp_path / "one")
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("ranks", "one")
    ]
    assert written[0] == written[1], "files are those of one rank"


@pytest.mark.parametrize("cell", [WIDE, Cell(tied=True, resized=True)], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_all_vocabularies_share_a_batch(cell, size):
    """Rank 0 has the logits, and the likeliest tokens, that one rank has."""
    whole, wide = whole_backbone(cell.family), directory_of(cell)
    other = directory_of(Cell(tied=cell.tied, resized=False, whole="both"))
    tokens = [random_tokens(3 + index, index) for index in range(4)]
    tokens[0][1] = tokens[3][1] = VOCAB + 3

    def run(backbone):
        first, second = (load_adapter(backbone, each).bypasses() for each in (wide, other))
        users = [
            (len(rows), each)
            for rows, each in zip(tokens, (first, None, second, first), strict=True)
        ]
        spans = [
            CachedSequence(backbone, 20, bypasses).extend(rows)
            for rows, (_, bypasses) in zip(tokens, users, strict=True)
        ]
        hidden = forward(backbone, spans)
        return (
            logits(backbone, hidden, users),
            logits_on_rank_0(backbone, hidden, users),
            likeliest_on_rank_0(backbone, hidden, users),
        )

    [(expected, _, likeliest)] = [run(whole)]
    found = run_ranks(size, lambda group: run(divided_backbone(whole, group)))
    for rows, on_first, _ in found:
        for each in (rows, on_first):
            if each is not None:
                torch.testing.assert_close(each, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[0][2], likeliest)
    assert all(each[1:] == (None, None) for each in found[1:])


def test_ranks_hold_pieces_of_what_is_not_trained():
    whole, directory = whole_backbone("llama"), directory_of(WIDE)
    one = load_adapter(whole, directory)
    for rank, adapter in enumerate(
        run_ranks(2, lambda group: load_adapter(divided_backbone(whole, group), directory))
    ):
        for module, tensor in adapter.frozen_weights.items():
            cut = adapter.graphs.states[f"{module}.{FROZEN}"]
            assert isinstance(cut, Cut)
            assert torch.equal(tensor, cut.take(one.frozen_weights[module], rank))
            assert tensor.shape[0] == -(-one.frozen_weights[module].shape[0] // 2)


def step_of_job(backbone, directory, source, *, number):
    """Train one step of a job that begins with a version, or continues with a checkpoint, on a
    device, and take a checkpoint."""
    driver = make_driver(backbone)
    if "version" in source:
        driver.device.execute(OpenVersion("wide", str(directory)))
    opened = driver.open_trainer("job", CONFIG, **source)
    trainer, sequences = trainer_of(driver, "job"), new_tokens(packs(number)[number - 1])
    loss = driver.train("job", opened, sequences, window=9, tasklet=9).packs["job"].loss
    norm = driver.step(updates=[Update("job", num_trained(sequences), 3)]).norms["job"]
    driver.device.execute(TakeCheckpoint("job", "copy"))
    device: Any = driver.device
    parameters = {name: value.clone() for name, value in trainer.adapter.masters.items()}
    return loss, norm, parameters, trainer.states, device._checkpoints["copy"]


def new_tokens(sequences):
    """Return sequences with a token that only the wide model has."""
    return [((VOCAB + 1, *tokens[1:]), trained) for tokens, trained in sequences]


@pytest.mark.parametrize("cell", [WIDE, Cell(tied=True, resized=True, tokens="list")], ids=str)
def test_a_job_goes_from_two_ranks_to_one_and_to_four(cell, tmp_path):
    whole, directory = whole_backbone(cell.family), directory_of(cell)

    def run(sizes, written):
        found, source = [], {"version": "wide"}
        written.mkdir()
        for number, size in enumerate(sizes, 1):

            def train(backbone, number=number, source=source):
                return step_of_job(backbone, directory, source, number=number)

            results = [train(whole)] if size == 1 else on_ranks(whole, size, train)
            with named_when_written(written), ThreadPoolExecutor(size) as threads:
                list(threads.map(lambda each: each[4].write(written), results))
            found.append(results)
            source = {"checkpoint": str(written)}
        return found

    alone, found = run([1, 1, 1], tmp_path / "alone"), run([2, 1, 4], tmp_path / "ranks")
    for ranks, [(loss, norm, parameters, _, _)] in zip(found, alone, strict=True):
        assert all(each[0] == pytest.approx(loss, rel=1e-5) for each in ranks)
        assert all(each[1] == pytest.approx(norm, rel=1e-5) for each in ranks)
        pieces = [each[2] for each in ranks]
        for name, value in parameters_together(pieces, parameters, ranks[0][3]).items():
            torch.testing.assert_close(value, parameters[name], atol=2e-6, rtol=1e-5)
