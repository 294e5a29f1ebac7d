"""`coserve bench serve` against real servers, and without the other one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from served import is_alive, model_directory, tokenizer

from coserve.bench import serve
from coserve.bench.model_directory import write_model
from coserve.bench.openvino import openvino_model
from coserve.bench.vllm import vllm_server
from coserve.errors import CoserveError

ROOT = Path(__file__).parents[2]


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
        pytest.raises(CoserveError, match=r"vLLM does not start with .*No module named 'vllm'"),
        vllm_server(python, tmp_path, dtype="float32", log=tmp_path / "log", cores=(0,)),
    ):
        raise AssertionError("it does not start")


def test_an_environment_without_openvino_is_named(tmp_path):
    with (
        pytest.raises(CoserveError, match=r"OpenVINO did not answer: .*No module named 'optimum"),
        openvino_model(Path(sys.executable), str(tmp_path), dtype=torch.bfloat16),
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


def descendants(pid):
    children = [
        int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]
    return children + [each for child in children for each in descendants(child)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("coserve", "bench", "serve", "--dtype", "float32", "--runs", "100"), "turn 0 of 100"),
        (
            (
                "experiments.compare",
                "--device",
                "modelled",
                "--hardware",
                "a100",
                "--workers",
                "2",
                "--trace",
                "trace.csv",
            ),
            "requests/s",
        ),
    ],
)
def test_nothing_that_it_started_is_left_over_when_it_is_ended(options, line, tmp_path):
    model = str(model_directory()) if "serve" in options else "dummy:llama-3.1-8b"
    arrivals = [
        f"2024-01-01 00:{second // 60:02}:{second % 60:02}.0,300,300" for second in range(3000)
    ]
    (tmp_path / "trace.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *arrivals])
    )
    process = subprocess.Popen(
        (sys.executable, "-m", *options, "--model", model),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stderr is not None
    assert any(line in said for said in process.stderr)
    started = descendants(process.pid)
    assert len(started) >= 2, "a server and its engine; two workers"
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 128 + 15
    until_s = time.monotonic() + 60
    while any(map(is_alive, started)) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not any(map(is_alive, started))
