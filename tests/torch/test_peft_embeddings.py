"""Adapters with embeddings, head or norms of their own, against PEFT: combinations are equal, or
refused by a line that says why. Any three settings meet in one of those that are tried; `make
test-every` tries all.
"""

import re
from dataclasses import astuple

import pytest
import torch
from lengths import covering, long_but
from peft import PeftModel
from peft_embeddings import RESIZED, Cell, base_of, cells, greedy, made_by_peft
from peft_methods import Ours, peft_gradients, peft_logits
from support import make_backbone, random_sequences, random_tokens, worst_error

from coserve.adapters import load_adapter, save_adapter
from coserve.adapters.peft_directory import read_config
from coserve.errors import AdapterError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*no implementation exists to tie:UserWarning"),
]
REFUSED = (
    r"is for \d+ tokens, .* and the weight of \S+ for them is not in it: name that module in "
    r"modules_to_save",
    r"modules_to_save and trainable_token_indices both mean \S+, which PEFT cannot run",
    r"target_modules and trainable_token_indices both mean \S+, which PEFT cannot run",
    r"modules_to_save and target_modules both mean \S+: name it in one of them",
    r"which ensure_weight_tying makes one: give both the same",
)
TOKENS, SEQUENCES = random_tokens(12, 1), random_sequences((9, 6))
QUICK = {
    "lora-untied-resized-whole-none-tokens-none-targets-none-ties-0",
    "lora-tied-resized-whole-none-tokens-none-targets-none-ties-0",
    "lora-untied-resized-whole-both-tokens-none-targets-none-ties-0",
    "lora-tied-same-whole-embed-tokens-none-targets-none-ties-1",
    "lora-tied-same-whole-norm-tokens-none-targets-embed-ties-0",
    "lora-tied-resized-whole-none-tokens-list-targets-none-ties-0",
    "lora-untied-same-whole-none-tokens-others-targets-none-ties-0",
    "lora-untied-resized-whole-none-tokens-none-targets-embed-ties-0",
    "lora-tied-same-whole-none-tokens-none-targets-both-ties-1",
    "ia3-untied-resized-whole-norm-tokens-none-targets-none-ties-0",
}
QUICK_CELLS = [cell for cell in cells() if str(cell) in QUICK]
CELLS = long_but(*QUICK_CELLS, of=covering(cells(), astuple, together=3, keep=QUICK_CELLS))


def load(cell, directory):
    return Ours(load_adapter(make_backbone(cell.family), directory), read_config(directory))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_combinations_are_equal_to_pefts_or_refused(cell: Cell, tmp_path):
    made = made_by_peft(cell)
    if isinstance(made, str):
        return
    theirs, directory = made
    try:
        ours = load(cell, directory)
    except AdapterError as error:
        line = str(error)
        assert any(re.search(known, line) for known in REFUSED), line
        assert len(line.splitlines()) == 1
        return
    tokens = torch.cat(
        (
            TOKENS,
            torch.arange(
                ours.adapter.architecture.vocab_size - 3, ours.adapter.architecture.vocab_size
            ),
        )
    )
    torch.testing.assert_close(ours.logits(tokens), peft_logits(theirs, tokens), atol=1e-4, rtol=0)
    expected = greedy(lambda rows: peft_logits(theirs, rows), TOKENS, 4)
    assert greedy(ours.logits, TOKENS, 4) == expected

    save_adapter(ours.adapter, tmp_path)
    again = PeftModel.from_pretrained(base_of(cell), str(tmp_path)).eval()
    torch.testing.assert_close(peft_logits(again, tokens), ours.logits(tokens), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        load(cell, tmp_path).logits(tokens), ours.logits(tokens), atol=0, rtol=0
    )
    if why_not := ours.config.why_not_trained(ours.adapter.architecture):
        assert cell.ties and "can be served and not be trained" in why_not
        return
    gradients = peft_gradients(theirs, SEQUENCES)
    found = {
        name: each
        for name, each in ours.in_peft(ours.gradients(SEQUENCES)).items()
        if name in gradients
    }
    assert worst_error(found, gradients) < 1e-5
    assert ours.adapter.backbone.architecture.vocab_size != RESIZED
