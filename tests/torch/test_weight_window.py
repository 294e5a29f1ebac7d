"""The window that a model's weights pass through, and training through it: what is there when, and
PEFT's gradients."""

import shutil
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from support import make_adapter, make_backbone, model_directory, random_sequences, worst_error

from coserve.errors import WeightsError
from coserve.kernels.weights import as_weight
from coserve.memory.tensors.weight_window import WeightWindow
from coserve.models.backbone import Backbone
from coserve.models.mapped_weights import MappedWeights
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.layerwise import LayerwisePass
from coserve.tuning.programs import evaluation_programs

LENGTHS = (7, 11, 1, 5)


def make_window(
    name: str = "llama", *, dtype: torch.dtype = torch.float32, directory: Any = None
) -> WeightWindow:
    """Over its own memory, of which it has nothing yet."""
    architecture = make_backbone(name).architecture
    mapped = MappedWeights(architecture, directory or model_directory(name))
    return WeightWindow(architecture, mapped, torch.empty(1 << 20, dtype=torch.uint8), dtype=dtype)


def through(name: str, window: WeightWindow) -> Backbone:
    return replace(make_backbone(name), weights=window)


def values(window: WeightWindow, part: Any) -> dict[str, torch.Tensor]:
    """Of a part that is in use."""
    return {name: as_weight(value).dense() for name, value in window[part].items()}


def assert_is_the_model(window: WeightWindow, part: Any, name: str = "llama") -> None:
    own = make_backbone(name).weights[part]
    found = values(window, part)
    assert found.keys() == own.keys()
    for key, value in found.items():
        assert torch.equal(value, as_weight(own[key]).dense().to(value.dtype)), (part, key)


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "opt", "qwen3"])
def test_parts_are_the_models_in_any_order_and_any_room(name):
    window, rng = make_window(name), Random(0)
    parts = make_backbone(name).architecture.parts
    for turn in range(60):
        start = rng.randrange(1000)
        size = (
            rng.randrange(window.least_bytes + 64, window.all_bytes + 64)
            if turn
            else window.all_bytes + 64
        )
        window.resize(range(start, start + size))
        for _ in range(rng.randrange(1, 6)):
            order = rng.sample(parts, len(parts))
            window.use(order)
            assert_is_the_model(window, order[0], name)
            window.release()
            held = [copy.bytes for copy in window._copies.values()]
            assert all(start <= one.start and one.stop <= start + size for one in held), (
                "never beyond its bytes"
            )
            taken = [byte for one in held for byte in (one.start, one.stop)]
            assert sorted(taken) == [
                x for one in sorted(held, key=lambda one: one.start) for x in (one.start, one.stop)
            ]
            assert sum(map(len, held)) <= size
            if not turn:
                assert len(held) == len(parts) - 1, (
                    "all but the table of embeddings, which is read where it lies"
                )
    window.close()
    assert not window.parts_held


def test_what_lies_outside_of_a_smaller_room_takes_time_to_go():
    window, parts = make_window(), make_backbone().architecture.parts
    everything = range(window.all_bytes + 64)
    assert window.resize(everything) == 0, "there was nothing"
    window.use(parts[1:])
    window.release()
    held = len(window.parts_held)
    assert held and window.resize(everything) == 0, "nothing lay outside"
    assert window.resize(range(window.least_bytes + 64)) > 0 and len(window.parts_held) < held
    window.close()


def run_layerwise(training: LayerwisePass, rng: Random, *, most_rows: int = 9) -> None:
    while not training.done:
        training.run_tasklet(rng.randint(1, most_rows))


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "mistral-sliding", "opt"])
@pytest.mark.parametrize("targets", ["all-linear", ["k_proj"]])
def test_gradients_through_the_window_are_those_of_resident_weights(name, targets):
    backbone, window, rng = make_backbone(name), make_window(name), Random(1)
    pack = make_pack(random_sequences(LENGTHS))
    resident = make_adapter(backbone, seed=1, target_modules=targets)
    expected = TrainingPass(resident, training_programs(resident), pack)
    run_alone(expected, forward_rows=100, backward_rows=100)
    adapter = make_adapter(through(name, window), seed=1, target_modules=targets)
    window.resize(range(64, 64 + window.least_bytes + 64))
    for _ in range(2):
        training = LayerwisePass(window, adapter, training_programs(adapter), pack)
        run_layerwise(training, rng)
        assert training.sums.loss == pytest.approx(expected.sums.loss, rel=1e-6)
        assert training.sums.num_correct == expected.sums.num_correct
        assert worst_error(training.gradients, expected.gradients) < 1e-5
        assert not training.num_saved_bytes
    measured = LayerwisePass(window, adapter, evaluation_programs(adapter), pack, training=False)
    run_layerwise(measured, rng)
    assert measured.sums.loss == pytest.approx(expected.sums.loss, rel=1e-6)
    assert window.num_bytes_copied > window.all_bytes, "it was too small for all of it"


def test_room_that_comes_and_goes_changes_nothing_but_the_copies():
    backbone, rng = make_backbone(), Random(2)
    pack = make_pack(random_sequences(LENGTHS))
    copied = []
    gradients: list[dict[str, torch.Tensor]] = []
    for changes in (False, True):
        window = make_window()
        adapter = make_adapter(replace(backbone, weights=window), seed=1)
        training = LayerwisePass(window, adapter, training_programs(adapter), pack)
        window.resize(range(window.all_bytes + 64))
        while not training.done:
            if changes and rng.random() < 0.5:
                window.resize(range(rng.randrange(window.least_bytes + 64, window.all_bytes + 64)))
            training.run_tasklet(6)
        copied.append(window.num_bytes_copied)
        gradients.append(training.gradients)
    assert copied[0] == window.all_bytes < copied[1]
    assert worst_error(*gradients) == 0


def test_the_next_parts_are_there_before_they_are_asked_for():
    window = make_window()
    window.resize(range(window.all_bytes + 64))
    order = make_backbone().architecture.parts
    window.use(order)
    window.release()
    for part in order:
        assert window.wait(part)
    before = window.num_bytes_copied
    for turn in range(len(order)):
        assert window.wait(order[turn], 0.0)
        window.use(order[turn:])
        window.release()
    assert window.num_bytes_copied == before == window.all_bytes


def test_a_part_that_is_needed_sooner_keeps_its_place():
    window = make_window()
    window.resize(range(window.least_bytes + 64))
    window.use([1, 2, 0])
    window.release()
    assert window.wait(2)
    assert 0 not in window.parts_held
    window.fetch([1, 2, 0])
    assert set(window.parts_held) == {1, 2}
    window.fetch([2, 0, 1])
    assert set(window.parts_held) == {2, 0}


def test_weights_take_the_dtype_that_is_asked_for():
    window = make_window(dtype=torch.bfloat16)
    window.resize(range(window.all_bytes + 64))
    for part in make_backbone().architecture.parts:
        window.use([part])
        assert_is_the_model(window, part)
        assert all(value.dtype == torch.bfloat16 for value in values(window, part).values())
        window.release()


def test_files_that_are_cut_short_are_named(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(model_directory(), directory)
    file = directory / "model.safetensors"
    window = make_window(directory=directory)
    window.resize(range(window.least_bytes + 64))
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(
        WeightsError,
        match=r"model\.safetensors had [\d,]+ bytes, and has [\d,]+ now; fetch it again",
    ):
        window.use([0])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged or cut short"):
        make_window(directory=directory)
    file.unlink()
    with pytest.raises(WeightsError, match="cannot be read any more"):
        window.use([1])
