"""`coserve bench serve` against real servers, and without the other one."""

import sys
from pathlib import Path

import pytest
from served import tokenizer

from coserve.bench import serve
from coserve.bench.model_directory import write_model
from coserve.bench.vllm import vllm_server
from coserve.errors import CoserveError


@pytest.mark.long
def test_servers_take_turns_and_are_told_apart(served):
    found = serve.run(
        {"ours": served.url, "theirs": f"{served.url}/v1"},
        vocab_size=len(tokenizer()),
        runs=1,
        concurrent=(1, 2),
        prompt_tokens=12,
        output_tokens=16,
    )
    assert [(row["server"], row["concurrent"]) for row in found["rows"]] == [
        *(("ours", 1), ("theirs", 1)),
        *(("ours", 2), ("theirs", 2)),
    ]
    for row in found["rows"]:
        assert row["output_tokens_per_s"] > 0
        for name in ("ttft", "tpot"):
            assert 0 < row[f"{name}_p50_ms"] <= row[f"{name}_p90_ms"] <= row[f"{name}_p99_ms"]


def test_what_a_server_refuses_ends_the_experiment_in_its_words(served):
    with pytest.raises(CoserveError, match=r"a request to ours failed: .*maximum context length"):
        serve.run({"ours": served.url}, vocab_size=len(tokenizer()), runs=1, prompt_tokens=10_000)


def test_an_environment_without_vllm_is_named(tmp_path):
    python = Path(sys.executable)
    with (
        pytest.raises(CoserveError, match=r"has no vLLM that starts: .*No module named 'vllm'"),
        vllm_server(python, tmp_path, dtype="float32", log=tmp_path / "log", cores=(0,)),
    ):
        raise AssertionError("it does not start")


def test_a_dummy_model_is_written_so_that_each_token_is_seen(tmp_path):
    from transformers import AutoTokenizer

    from coserve.models import load_backbone

    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, '
        '"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}'
    )
    write_model(f"dummy:{config}", tmp_path / "model", dtype="float32")
    assert load_backbone(str(tmp_path / "model"), dtype="float32").architecture.vocab_size == 50
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([3, 49]) == "w3 w49"
