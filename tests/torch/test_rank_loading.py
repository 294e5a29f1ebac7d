"""A rank reads its share of a checkpoint, and holds bit for bit what would be cut from the whole
model."""

import shutil
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from family_configs import MORE_CONFIGS
from lengths import long_but
from rank_loading import assert_ranks_hold_pieces, load_rank
from ranks import REFUSED
from safetensors.torch import load_file, save_file
from support import CONFIGS, model_directory

from coserve.errors import UnsupportedModelError, WeightsError
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.threads import run_ranks, thread_groups
from coserve.models import entries, reading
from coserve.models.weights import WeightStorage, weight_tensors

EVERY = [
    (name, size)
    for name in [*CONFIGS, *MORE_CONFIGS]
    for size in (2, 4)
    if (name, size) not in REFUSED
] + [
    ("falcon-alibi", 3),
    ("mpt-clipped", 3),
]
SHORT = [
    ("llama-biases-tied", 2),
    ("gpt2", 4),
    ("falcon-new", 4),
    ("mixtral", 2),
    ("gpt-oss", 2),
    ("qwen3-next", 4),
]


@pytest.mark.parametrize("divided", long_but(*SHORT, of=EVERY), ids=str)
def test_ranks_hold_what_is_cut_from_the_whole_model(divided):
    name, size = divided
    assert_ranks_hold_pieces(str(model_directory(name)), size)


@pytest.mark.parametrize("name", ["llama-biases-tied", "mixtral", "phi3", "gpt2-scaled", "gpt-oss"])
def test_int8_weights_of_ranks_are_cut_from_whole_rows(name):
    ranks = assert_ranks_hold_pieces(str(model_directory(name)), 2, "int8")
    assert all(
        torch.int8 in {tensor.dtype for tensor in weight_tensors(rank.weights[0])} for rank in ranks
    )


@pytest.mark.parametrize("weights", ["dense", "int8"])
def test_random_weights_of_ranks_are_those_of_one_rank(weights):
    assert_ranks_hold_pieces(f"dummy:{model_directory('mixtral') / 'config.json'}", 2, weights)


def num_bytes_read(monkeypatch: pytest.MonkeyPatch, directory: str, group: RankGroup | None) -> int:
    """Return the bytes of the tensors, and of their pieces, that are asked of a model's files."""
    number = 0

    class Counted:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def keys(self) -> list[str]:
            return list(self.inner.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            return self.count(self.inner.get_tensor(name))

        def get_slice(self, name: str) -> Any:
            return CountedSlice(self, self.inner.get_slice(name))

        def count(self, tensor: torch.Tensor) -> torch.Tensor:
            nonlocal number
            number += tensor.nbytes
            return tensor

    class CountedSlice:
        def __init__(self, reader: Counted, inner: Any) -> None:
            self.reader, self.inner = reader, inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, index: Any) -> torch.Tensor:
            return self.reader.count(self.inner[index])

    real = entries.open_file

    @contextmanager
    def open_counted(file):
        with real(file) as reader:
            yield Counted(reader)

    monkeypatch.setattr(reading, "open_file", open_counted)
    load_rank(directory, group or thread_groups(1)[0])
    return number


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3.5-moe-published"])
def test_a_rank_reads_its_share_of_the_files(name, monkeypatch):
    directory = str(model_directory(name))
    whole = num_bytes_read(monkeypatch, directory, None)
    parts = [num_bytes_read(monkeypatch, directory, group) for group in thread_groups(2)]
    assert max(parts) < 0.6 * whole, "norms, routers and the like are read by both"


def test_a_drawn_model_is_in_memory_tensor_by_tensor(monkeypatch):
    """A whole tensor is gone when the next one is drawn."""
    drawn, num_alive = list[weakref.ref[torch.Tensor]](), list[int]()
    real = WeightStorage.made

    def made(self, architecture, name, tensor):
        num_alive.append(sum(each() is not None for each in drawn))
        if tensor.ndim > 1:
            drawn.append(weakref.ref(tensor))
        return real(self, architecture, name, tensor)

    monkeypatch.setattr(WeightStorage, "made", made)
    load_rank(f"dummy:{model_directory('llama') / 'config.json'}", thread_groups(2)[1])
    assert len(drawn) > 10 and max(num_alive) <= 1


@pytest.mark.parametrize(("name", "size"), sorted(REFUSED))
def test_heads_that_ranks_cannot_share_are_refused_before_weights_are_read(name, size, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(model_directory(name) / "config.json", directory)  # and no weights
    with pytest.raises(
        UnsupportedModelError,
        match=rf"\d heads of (attention|a state) .* among {size} ranks; .* is 1",
    ):
        load_rank(str(directory), thread_groups(size)[0])


def test_each_rank_compares_its_piece_of_a_tied_head(tmp_path):
    directory = shutil.copytree(model_directory("llama-biases-tied"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors")
    run_ranks(2, lambda group: load_rank(str(directory), group))
    head[-1, 3] += 1  # of the last rank
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors")
    load_rank(str(directory), thread_groups(2)[0])
    with pytest.raises(WeightsError, match=r"lm_head\.weight is not the embedding"):
        load_rank(str(directory), thread_groups(2)[1])
