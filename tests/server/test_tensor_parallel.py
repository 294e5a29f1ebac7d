"""A real `coserve up --tensor-parallel 2`: answers as of one rank, and what follows when a rank
dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import children_of, is_alive
from served import Served
from served_ranks import (
    OPTIONS,
    QUICKLY,
    check_answers,
    needs_two_cores,
    ranks_of,
    serving_on_two_ranks,
)

pytestmark = needs_two_cores


@pytest.fixture(scope="module")
def divided() -> Iterator[Served]:
    with serving_on_two_ranks() as running:
        yield running


def test_answers_are_those_of_transformers(divided: Served):
    check_answers(divided)


def test_status_and_metrics_show_both_ranks(divided: Served):
    divided.client().completions.create(model="small", prompt="x", max_tokens=8)
    status = divided.get("/v1/status").json()
    assert status["tensor_parallel"] == 2 and status["threads"] == 1
    assert [each["rank"] for each in status["ranks"]] == [0, 1]
    assert {each["pid"] for each in status["ranks"]} <= set(children_of(divided.engine_pid()))
    assert all(
        each["device"] == "cpu" and each["memory_bytes"] > 1 << 20 for each in status["ranks"]
    )
    metrics = divided.get("/metrics").text
    assert "coserve_ranks 2.0" in metrics
    for rank in (0, 1):
        assert f'coserve_rank_wait_seconds{{rank="{rank}"}}' in metrics
        assert f'coserve_rank_memory_bytes{{rank="{rank}"}}' in metrics


def test_a_rank_that_is_killed_while_nothing_runs_ends_the_group_and_the_next_one_answers():
    with serving_on_two_ranks() as served:
        served.wait_until(lambda: len(ranks_of(served)) == 2)
        engine, pids = served.engine_pid(), [each["pid"] for each in ranks_of(served)]
        time.sleep(1.5)  # until the engine waits for commands alone
        os.kill(pids[1], signal.SIGKILL)
        served.wait_until(lambda: not any(map(is_alive, (*pids, engine))), limit_s=30)
        served.wait_until(lambda: len(new := ranks_of(served)) == 2 and new[0]["pid"] not in pids)
        check_answers(served)
        last = [each["pid"] for each in ranks_of(served)]
        assert "coserve_engine_deaths_total 1.0" in served.get("/metrics").text
    assert not any(map(is_alive, last)), "the server's end is theirs"


def test_a_killed_server_leaves_no_rank():
    served = Served(*OPTIONS, before=QUICKLY)
    served.wait_until(lambda: len(ranks_of(served)) == 2)
    pids = [each["pid"] for each in ranks_of(served)]
    served.process.kill()
    served.process.wait()
    served.wait_until(lambda: not any(map(is_alive, pids)))
    served.stop()


def test_a_model_that_does_not_divide_is_refused_in_one_line(tmp_path: Path):
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "coserve",
                "up",
                f"dummy:{tmp_path / 'config.json'}",
                "--tensor-parallel",
                "2",
            ),
            *(
                "--port",
                "0",
                "--home",
                str(tmp_path / "home"),
                "--device",
                "cpu",
                "--memory",
                "16MB",
            ),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "3" in last and "2" in last and "heads" in last, done.stderr
