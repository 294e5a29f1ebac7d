"""What a rank keeps of each row of a pack between forward and backward, where ranks hold a model together."""

import pytest
import torch

from coserve.adapters import Adapter, LoraConfig
from coserve.kernels.groups.threads import run_ranks
from coserve.models import load_backbone
from coserve.models.dividing import divided_backbone
from coserve.tuning import training_programs

ALL_LINEAR = LoraConfig(r=16, target_modules="all-linear")


def kept_by_rank(model, size, config=ALL_LINEAR):
    """Return the names and the bytes of what rank 0 keeps of a row in a block."""
    whole = load_backbone(model, device="meta", dtype="bfloat16")

    def run(group):
        program = training_programs(Adapter(divided_backbone(whole, group), config)).program[1]
        return program.saved, program.saved_bytes_per_token(torch.bfloat16)

    return run_ranks(size, run)[0]


@pytest.mark.parametrize(("model", "size"), [("dummy:qwen2.5-0.5b", 2), ("dummy:llama-3.1-8b", 4)])
def test_what_ranks_only_copy_is_not_kept_twice(model, size):
    """The gradient of lora_A reads the norm's output under the name that it has after `rank_copy`."""
    names, _ = kept_by_rank(model, size)
    alone, _ = kept_by_rank(model, 1)
    assert names == alone
