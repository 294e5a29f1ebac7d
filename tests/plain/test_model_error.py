"""What a plan says of its model's error: by the size of the model, and by the device where that was
measured."""

import re
from pathlib import Path

import pytest

from coserve.bench.model_error import MEASURED, model_error
from coserve.simulate.hardware import CATALOGUE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("billions", "model", "least", "most"),
    [
        (0.5, "Qwen2.5-0.5B", 2.1, 2.2),
        (8.0, "LLaMA-3.1-8B", 1.6, 1.8),
        (14.8, "Qwen2.5-14B", 4.3, 6.0),
        (32.8, "Qwen2.5-32B", 4.5, 5.3),
        (70.6, "Qwen2.5-32B", 4.5, 5.3),
    ],
)
def test_the_error_is_that_of_the_model_nearest_in_size(billions, model, least, most):
    found = model_error("A100", int(1e9 * billions))
    assert found["measured"]["model"] == model
    assert least < 1 + found["tuning_tokens_per_s_least"] <= 1 + found["tuning_tokens_per_s"] < most
    assert model in found["words"] and found["measured"]["source"] in found["words"]


def test_a_device_that_was_measured_has_its_own_error():
    for each in MEASURED:
        for chip in each.chips:
            assert (
                model_error(chip, int(each.num_parameters))["measured"]["hardware"] == each.chips[0]
            )
    assert {found for each in MEASURED for found in each.chips} <= {
        hardware.name for hardware in CATALOGUE.values()
    }


def test_the_numbers_are_those_of_the_documents_that_are_named():
    text = (BENCHMARKS / "papers.md").read_text()
    for each in [each for each in MEASURED if "papers.md" in each.source]:
        size = re.sub(r".*-", "", each.model)
        ours, theirs = (
            re.search(rf"\| {size}, {name} \| ([\d,]+)\D.* ([\d,]+)(?: \([\d.]+%\))? \|\n", text)
            for name in ("`token-fusion`", "FlexLLM in the paper")
        )
        assert ours is not None and theirs is not None
        rows = [[int(number.replace(",", "")) for number in row.groups()] for row in (ours, theirs)]
        assert list(zip(*rows, strict=True)) == list(each.pairs)
    for each in [each for each in MEASURED if "gpu.md" in each.source]:
        for modelled, measured in each.pairs:
            assert f"{measured:,.0f}" in (BENCHMARKS / "gpu.md").read_text()
            assert f"{modelled:,.0f}" in (BENCHMARKS / "hardware.md").read_text()
