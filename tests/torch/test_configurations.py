"""What a configuration's fields mean is what they mean to transformers, family by family: a field
that transformers does not read for a family changes nothing.
"""

import json
from typing import Any

import pytest
import torch
from family_configs import MORE_CONFIGS
from support import CONFIGS, auto_class, random_tokens, random_weights_
from transformers import AutoConfig

from coserve.errors import UnsupportedModelError
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.families import build_architecture

# Of fields that transformers does not read for the family, or reads otherwise than their names say.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt-head-dim": ("opt", {"head_dim": 10}),
    "gpt2-head-dim": ("gpt2", {"head_dim": 24}),
    "gpt2-key-heads": ("gpt2", {"num_key_value_heads": 2}),
    "gptj-key-heads": ("gptj", {"num_key_value_heads": 1, "head_dim": 16}),
    "mpt-head-dim": ("mpt", {"head_dim": 16, "num_key_value_heads": 2}),
    "gpt-neox-key-heads": ("gpt-neox", {"num_key_value_heads": 2}),
    "falcon-key-heads": ("falcon-old", {"num_key_value_heads": 2, "multi_query": False}),
    "gemma3-score-cap": ("gemma3", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "gemma3-published-caps": (
        "gemma3-published",
        {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    ),
    "smollm3-no-windows": ("smollm3-sliding", {"use_sliding_window": False}),
    "qwen3.5-moe-shares": ("qwen3.5-moe", {"norm_topk_prob": False}),
    "qwen3-moe-shared": ("qwen3-moe", {"shared_expert_intermediate_size": 8}),
    "qwen3.5-moe-dense": ("qwen3.5-moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_fields_mean_what_they_mean_to_transformers(case, tmp_path):
    """A prompt in one piece, and then token by token."""
    name, fields = CASES[case]
    config = json.loads(json.dumps((CONFIGS | MORE_CONFIGS)[name]))
    text = config.get("text_config", config)
    for field, value in fields.items():
        text[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        read = AutoConfig.from_pretrained(tmp_path)
        model: Any = random_weights_(
            auto_class(config).from_config(read, attn_implementation="eager")
        ).eval()
    model.tie_weights()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))

    tokens = random_tokens(20, 1)
    with torch.no_grad():
        theirs = model(tokens[None]).logits[0]
    backbone = load_backbone(str(tmp_path), dtype="float32")
    sequence = CachedSequence(backbone, 20)
    pieces = (tokens[:16], *tokens[16:].split(1))
    ours = [logits(backbone, forward(backbone, [sequence.extend(piece)])) for piece in pieces]
    torch.testing.assert_close(torch.cat(ours), theirs, atol=1e-4, rtol=0)


def test_scaled_angles_of_a_part_are_refused_where_whole_heads_turn():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.25}
    config = AutoConfig.for_model(**MORE_CONFIGS["gpt-oss"] | {"rope_parameters": rope})
    with pytest.raises(
        UnsupportedModelError,
        match=r"partial_rotary_factor=0.25 is not .* gpt_oss turns whole heads",
    ):
        build_architecture(config).rotary_tables()
