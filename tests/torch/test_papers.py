"""Cells of the papers' figures on modelled devices, short ones."""

from pathlib import Path

import pytest

from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import A100, RTX3090
from coserve.tuning.examples import Example
from experiments.papers import flexllm, harli, here, llmstation
from experiments.papers.__main__ import FIGURES
from experiments.papers.setting import Data, Setting

FOLDER = Path(__file__).parents[2] / ".." / "shared" / "data"
needs_data = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs ../shared/data")


@needs_data
def test_every_figure_has_tasks():
    data = Data(folder=FOLDER, seconds=1.0)
    assert all(figure.tasks(data) for figure in FIGURES.values())
    assert set(FIGURES) == {*flexllm.FIGURES, *llmstation.FIGURES, *harli.FIGURES, *here.FIGURES}


@needs_data
def test_a_co_served_cell_holds_its_slos_and_trains():
    data = Data(folder=FOLDER, seconds=5.0)
    (row,) = flexllm._co_served(flexllm._MODELS[0], ("slack",), 4, data)
    assert row["attainment"] == 1 and row["tuning_tokens_per_s"] > 10_000


def test_processes_on_parts_are_slower_than_the_parts_alone_and_have_a_copy_of_the_weights_each():
    setting = Setting(model="llama-3.1-8b", hardware=A100, slo=Slo(ttft_s=5.0, tpot_s=0.05))
    requests, jobs = setting.on_parts(6)
    for side, units in ((requests, 6), (jobs, 4)):
        assert side.hardware.flops_per_s < A100.part(units).flops_per_s
        assert side.hardware.bytes_per_s < A100.part(units).bytes_per_s
    assert requests.hardware.memory_bytes == A100.memory_bytes - 16_060_522_496


def test_sharded_weights_bound_what_torchtune_trains():
    """Two devices gather 16 GB for each pass: forward and backward."""
    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    setting = Setting(
        model="llama-3.1-8b", hardware=RTX3090, num_ranks=2, slo=slo, examples=_examples(100)
    )
    gather_s = 2 * 16_060_522_496 / 2 / 4.6e10
    assert llmstation._torchtune(setting) == pytest.approx(2 * 2 * 100 / gather_s, rel=0.01)


def _examples(num_tokens: int) -> tuple[Example, ...]:
    return (Example(tokens=(1,) * num_tokens, trained=(True,) * num_tokens),) * 8
