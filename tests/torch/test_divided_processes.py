"""A model that is divided among processes: their blocks run as one call, sums and all; and they
train together."""

import pytest
import torch
from peft_methods import config_of
from rank_models import decode, keep_windows, link_pace
from rank_processes import run_processes
from rank_training import assert_trained_alike, train_directory
from ranks import relative_error
from steps_at_once import wide_directory
from support import model_directory

from coserve.kernels.cpu import CpuBackend
from coserve.kernels.groups.base import SingleRank

pytestmark = pytest.mark.long
compiled = pytest.mark.skipif(
    not CpuBackend.is_available(torch.device("cpu")), reason="needs compiled kernels"
)


@compiled
def test_traced_blocks_of_ranks_give_what_blocks_one_by_one_give():
    directory = str(wide_directory("llama"))
    expected, _, num_traces = decode(SingleRank(), directory, "float32")
    assert num_traces
    for traced, one_by_one, num_traces in run_processes(2, decode, directory, "float32"):
        assert num_traces, "its steps are one call"
        assert relative_error(traced, expected) < 1e-5
        assert relative_error(traced, one_by_one) < 1e-5


@compiled
def test_traced_blocks_of_ranks_in_16_bits_are_as_exact_as_those_of_one_rank():
    directory = str(wide_directory("llama"))
    exact = decode(SingleRank(), directory, "float32")[1]
    alone = decode(SingleRank(), directory, "bfloat16")[0].float()
    for traced, _, num_traces in run_processes(2, decode, directory, "bfloat16"):
        assert num_traces
        # What ranks sum is rounded once more.
        assert relative_error(traced.float(), exact) < 2 * relative_error(alone, exact)


@pytest.mark.parametrize(
    ("case", "num_steps"),
    [("lora", 200), ("dora", 3), ("pissa", 3), ("p-tuning", 3), ("diff-pruning", 3)],
)
def test_jobs_of_processes_train_as_those_of_one(case, num_steps):
    """Parameters that both hold have the same bits on both, which putting them together checks."""
    directory, config = str(model_directory("qwen2")), config_of(case)
    alone = train_directory(SingleRank(), directory, config, num_steps)
    found = run_processes(2, train_directory, directory, config, num_steps)
    assert_trained_alike(found, alone)
    for name, value in alone.version.items():
        assert sum(each.version[name].count_nonzero() for each in found) >= value.count_nonzero()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_windows_in_traced_steps_keep_a_ranks_columns(dtype):
    """A call copies them to where block after block puts them."""
    for rank, (found, gradients, num_traces) in enumerate(
        run_processes(2, keep_windows, str(wide_directory("llama")), dtype)
    ):
        traced, one_by_one = found
        assert num_traces, "windows are part of a call"
        assert {"1.x.piece", "1.attention_residual.piece"} <= traced.keys() and "1.x" not in traced
        assert traced["1.x.piece"].shape[1] == 32
        for name, rows in one_by_one.items():
            assert relative_error(traced[name].float(), rows.float()) < (
                1e-5 if dtype == "float32" else 0.05
            ), name
        assert relative_error(gradients[0], gradients[1]) < (1e-5 if dtype == "float32" else 0.1), (
            rank
        )


def test_processes_agree_on_what_their_link_costs():
    found = run_processes(2, link_pace, str(wide_directory("llama")))
    assert found[0] == found[1] > 0
