"""Files that ranks write together are those that one rank writes, byte for byte, and any number of
ranks reads them.
"""

import errno
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from lengths import covering, long_but
from peft import PeftModel
from peft_methods import CASES, config_of
from rank_models import save_adapter_of_ranks
from rank_processes import KILLED, run_processes
from ranks import REFUSED, random_masters, relative_error, whole_backbone
from safetensors.torch import load_file, save, save_file
from support import make_model, model_directory, random_tokens

from coserve.adapters import Adapter, LoraConfig, load_adapter, save_adapter
from coserve.adapters.divided_files import DividedAdapter
from coserve.adapters.file_names import CONFIG_FILE, WEIGHTS_FILE
from coserve.adapters.full_model import serve_full_model
from coserve.adapters.full_weights import FullWeights
from coserve.adapters.methods.full import FullConfig
from coserve.errors import AdapterError, DeviceGoneError
from coserve.graph.layouts import FIRST, WHOLE
from coserve.kernels.cuts import Cut, CutRun, even_cut
from coserve.kernels.groups.base import Ranks
from coserve.kernels.groups.threads import run_ranks
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.dividing import divided_backbone
from coserve.models.regions import TensorView, owned_runs, region_blocks
from coserve.models.shared_files import (
    FileTensor,
    named_when_written,
    pending,
    write_shared_tensors,
)
from coserve.models.shares import piece

EVERY = [(case, family) for case, found in CASES.items() for family in found.families]
EACH_ONCE = covering(EVERY, tuple, together=1)
SHORT = [
    ("lora", "gptj"),
    ("dora", "qwen2"),
    ("vera", "gptj"),
    ("bottleneck", "gptj"),
    ("ia3", "qwen2"),
]
SHORT += [("prefix-tuning", "qwen2"), ("bitfit", "opt"), ("lora-whole", "llama-biases-tied")]
FILES = {CONFIG_FILE, WEIGHTS_FILE}
EXPERTS = LoraConfig(
    r=4,
    target_modules=("q_proj",),
    target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


def written_by(size, whole, config, masters, directory):
    """Write an adapter of these masters by as many ranks; returns the files' contents by name."""
    directory.mkdir()

    def write(group):
        backbone = divided_backbone(whole, group) if size > 1 else whole
        save_adapter(Adapter(backbone, config, masters=masters), directory)

    with named_when_written(directory):
        run_ranks(size, write)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def check(whole, config, tmp_path, sizes=(2,)):
    masters = random_masters(whole, config)
    alone = written_by(1, whole, config, masters, tmp_path / "alone")
    assert set(alone) == FILES
    for size in sizes:
        assert written_by(size, whole, config, masters, tmp_path / f"{size}") == alone
    expected = load_adapter(whole, tmp_path / "alone")
    for size in sizes:
        for rank, found in enumerate(
            run_ranks(
                size, lambda group: load_adapter(divided_backbone(whole, group), tmp_path / "alone")
            )
        ):
            assert (
                found.config == expected.config and found.masters.keys() == expected.masters.keys()
            )
            for name, master in expected.masters.items():
                own = piece(master, found.graphs.states.get(name, WHOLE), rank)
                assert torch.equal(found.masters[name], own), name


@pytest.mark.parametrize("method", long_but(*SHORT, of=EVERY), ids=str)
def test_an_adapter_of_two_ranks_is_one_ranks_on_disk(method, tmp_path):
    case, family = method
    check(whole_backbone(family), config_of(case), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("case", "family"), EACH_ONCE)
def test_an_adapter_of_four_ranks_is_one_ranks_on_disk(case, family, tmp_path):
    check(whole_backbone(family), config_of(case), tmp_path, sizes=(4,))


@pytest.mark.parametrize(
    "family", long_but("mixtral", of=["mixtral", "qwen3-moe", "gpt-oss", "qwen3-next"])
)
def test_experts_loras_are_one_ranks_on_disk(family, tmp_path):
    check(whole_backbone(family), EXPERTS, tmp_path, sizes=(2, 4))


def test_peft_loads_an_adapter_of_two_ranks(tmp_path):
    whole, config = (
        whole_backbone("qwen2"),
        LoraConfig(r=4, use_dora=True, target_modules="all-linear"),
    )
    masters = random_masters(whole, config)
    written_by(2, whole, config, masters, tmp_path / "written")
    theirs = PeftModel.from_pretrained(make_model("qwen2"), tmp_path / "written").eval()
    tokens = random_tokens(9, 4)
    bypasses = Adapter(whole, config, masters=masters).bypasses()
    hidden = forward(whole, [CachedSequence(whole, len(tokens), bypasses).extend(tokens)])
    ours = logits(whole, hidden, [(len(tokens), bypasses)])
    with torch.no_grad():
        assert relative_error(theirs(tokens[None]).logits[0], ours) < 1e-5


@pytest.mark.parametrize("family", ["qwen2", "llama-biases-tied"])
def test_embeddings_in_a_file_that_are_the_models_own_are_left_out(family, tmp_path):
    """PEFT may write them beside the adapter; of those of another model each rank has its piece,
    though one rank alone has what differs."""
    whole = whole_backbone(family)
    save_adapter(Adapter(whole, LoraConfig(r=4, target_modules=("q_proj",))), tmp_path)
    tensors, table = (
        load_file(tmp_path / WEIGHTS_FILE),
        whole.weights["embed"]["model.embed_tokens.weight"],
    )
    assert isinstance(table, torch.Tensor)
    tensors["base_model.model.model.embed_tokens.weight"] = table.clone()
    save_file(tensors, tmp_path / WEIGHTS_FILE)

    def load(group):
        return load_adapter(divided_backbone(whole, group), tmp_path)

    assert all(adapter.layout.frozen is None for adapter in run_ranks(2, load))
    tensors["base_model.model.model.embed_tokens.weight"][-1] += 1
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    for adapter in run_ranks(2, load):
        assert adapter.layout.frozen is not None
        [own] = adapter.frozen_weights.values()
        assert own.shape[0] == -(-table.shape[0] // 2)


@pytest.mark.parametrize("fault", ["nan", "infinite", "cut short", "misshapen"])
def test_a_damaged_file_is_refused(tmp_path, fault):
    """The rank that reads it refuses; a command that one rank refuses fails for all."""
    whole, config = whole_backbone("qwen2"), LoraConfig(r=4, target_modules=("q_proj",))
    save_adapter(Adapter(whole, config, masters=random_masters(whole, config)), tmp_path)
    path = tmp_path / WEIGHTS_FILE
    tensors = load_file(path)
    name = next(name for name in tensors if "lora_B" in name)
    if fault == "misshapen":
        tensors[name] = tensors[name][1:].clone()
    else:
        tensors[name][-1] = float("nan") if fault == "nan" else float("inf")
    save_file(tensors, path)
    if fault == "cut short":
        path.write_bytes(path.read_bytes()[:-8])

    def refused(group):
        try:
            load_adapter(divided_backbone(whole, group), tmp_path)
        except AdapterError as error:
            return str(error)
        return ""

    first, second = run_ranks(2, refused)
    words = {
        "nan": "numbers that are NaN",
        "infinite": "infinite numbers",
        "cut short": "damaged or cut short",
    }
    assert words.get(fault, "has shape") in second
    assert bool(first) == (fault in ("cut short", "misshapen")), "rank 0 has the rows before"


# -- whole models -------------------------------------------------------------------------


MODELS = [
    "llama",
    "llama-biases-tied",
    "gpt2",
    "phi3",
    "falcon-new",
    "gpt-neox",
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
]
MODELS += ["qwen3-next", "opt", "qwen3.5-moe"]


def full_weights(backbone, seed=None, **settings):
    """Weights as a job trains them; with a seed, others than the backbone has."""
    config = FullConfig(**settings)
    weights = FullWeights(backbone, config, config.chosen(backbone.architecture))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for name, (part, tensor) in weights.sites.items():
            whole = torch.randn(backbone.architecture.weight_shapes[name], generator=generator)
            weights.masters[name] = piece(
                whole, backbone.local.state(part, tensor), backbone.ranks.rank
            )
    return weights


def write_all(made, directory):
    """Have what ranks hold written by all of them, the last one first; returns the files' contents
    by name."""
    directory.mkdir(exist_ok=True)
    with named_when_written(directory):
        for each in reversed(made):
            each.save(directory)
    return files_below(directory)


def files_below(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    "settings", [{}, {"target_modules": ("q_proj", "down_proj", "c_attn", "qkv_proj")}], ids=str
)
@pytest.mark.parametrize(
    "family", long_but("llama-biases-tied", "gpt2", "phi3", "mixtral", of=MODELS)
)
def test_a_model_of_ranks_is_one_ranks_on_disk(family, settings, tmp_path):
    """Fused projections and experts lie in files as they do in the model's own."""
    try:
        FullConfig(**settings).chosen(whole_backbone(family).architecture)
    except AdapterError:
        pytest.skip("this model has none of the modules")
    whole = whole_backbone(family)
    full_weights(whole, seed=1, **settings).save(tmp_path / "alone")
    alone = files_below(tmp_path / "alone")
    sizes = [size for size in (2, 4) if (family, size) not in REFUSED]
    for size in sizes:
        made = run_ranks(
            size, lambda group: full_weights(divided_backbone(whole, group), 1, **settings)
        )
        assert write_all(made, tmp_path / str(size)) == alone

    def served(group):
        fresh = load_backbone(str(model_directory(family)), dtype="float32", kernels="plain")
        backbone = divided_backbone(fresh, group) if group.size > 1 else fresh
        serve_full_model(backbone, tmp_path / str(sizes[0]), lambda what, layout: nullcontext())
        return full_weights(backbone, **settings)

    (expected,) = run_ranks(1, served)
    for size in sizes:
        for rank, found in enumerate(run_ranks(size, served)):
            states = found.graphs.states
            assert found.masters.keys() == expected.masters.keys()
            for name, master in expected.masters.items():
                assert torch.equal(
                    found.masters[name], piece(master, states.get(name, WHOLE), rank)
                ), name


# -- files of pieces ----------------------------------------------------------------------


TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
TYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def whole_file(tensors):
    """The tensors as rank 0 alone writes them."""
    return {
        name: FileTensor(
            shape=tuple(each.shape),
            dtype=each.dtype,
            blocks=region_blocks(
                partial(TensorView.all_of(tuple(each.shape)).owned_regions, each, WHOLE, 0),
                tuple(each.shape),
            ),
        )
        for name, each in tensors.items()
    }


def test_a_file_is_laid_out_as_safetensors_lays_it(tmp_path):
    tensors = {
        f"{number}/é{dtype}": torch.ones(number, 3).to(dtype) for number, dtype in enumerate(TYPES)
    }
    tensors["number"] = torch.tensor(7)
    with named_when_written(tmp_path):
        write_shared_tensors(tmp_path / "a", whole_file(tensors), Ranks(rank=0, size=2))
    assert (tmp_path / "a").read_bytes() == save(tensors, metadata={"format": "pt"})


CUTS = {
    "even": even_cut(12, 2),
    "padded": even_cut(12, 5, padded=True),
    "fused": Cut(
        width=12,
        runs=(
            (CutRun(start=0, stop=3), CutRun(start=6, stop=9)),
            (CutRun(start=3, stop=6), CutRun(start=6, stop=9)),
            (CutRun(start=1, stop=2), CutRun(start=7, stop=12)),
        ),
    ),
    "whole on both": Cut(width=12, runs=((CutRun(start=0, stop=12),), (CutRun(start=0, stop=12),))),
}
VIEWS = {
    "as it is": lambda whole: [whole],
    "transposed": lambda whole: [whole.mT],
    "by expert": lambda whole: [part for expert in whole.unbind() for part in expert.chunk(4)],
    "rows": lambda whole: list(whole.split(1, -2)),
}


@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("view", VIEWS)
def test_ranks_write_each_element_once_and_read_their_own(view, cut, dim):
    shape = [4, 4, 4]
    shape[dim] = 12
    cut = CUTS[cut].along(dim)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    absent = torch.empty(shape, device="meta")
    views = [TensorView.of(each, absent) for each in VIEWS[view](absent)]
    expected = VIEWS[view](whole)
    pieces = [cut.take(whole, rank) for rank in range(cut.size)]
    read = [torch.zeros_like(each) for each in pieces]
    for own, tensor in zip(views, expected, strict=True):
        assert own.shape == tuple(tensor.shape)
        found, counts = torch.zeros(own.shape), torch.zeros(own.shape)
        for rank, each in enumerate(pieces):
            for region in own.owned_regions(each, cut, rank):
                assert torch.equal(region.part, tensor[region.at])
                for block in region.blocks(own.shape):
                    for start, row in zip(block.starts, block.rows, strict=True):
                        found.view(-1)[start : start + len(row)] = row
                        counts.view(-1)[start : start + len(row)] += 1
            for region in own.regions(read[rank], cut, rank):
                region.part.copy_(tensor[region.at])
        assert torch.equal(found, tensor) and bool((counts == 1).all())
    assert all(torch.equal(*each) for each in zip(read, pieces, strict=True))


def test_what_rank_0_alone_holds_is_written_and_read_by_it():
    view = TensorView.all_of((3,))
    whole, none = torch.ones(3), torch.zeros(3)
    assert [region.at for region in view.owned_regions(whole, FIRST, 0)] == [(slice(0, 3),)]
    assert not list(view.owned_regions(none, FIRST, 1)) and not list(view.regions(none, FIRST, 1))
    assert (
        not list(view.owned_regions(whole, WHOLE, 1))
        and len(list(view.regions(whole, WHOLE, 1))) == 1
    )


def test_dimensions_that_are_taken_together_are_no_view():
    absent = torch.empty(3, 4, 5, device="meta")
    assert TensorView.of(absent.flatten(0, 1), absent) is None
    assert TensorView.of(torch.empty(3, 4, 5, device="meta"), absent) is None
    assert TensorView.of(absent.contiguous().clone(), absent) is None


def test_runs_of_entries_belong_to_the_first_rank_that_has_them():
    cut = CUTS["fused"]
    owned = [
        [(run.start, run.stop, start) for run, start in owned_runs(cut, rank)] for rank in range(3)
    ]
    assert owned == [[(0, 3, 0), (6, 9, 3)], [(3, 6, 0)], [(9, 12, 3)]]


def test_files_have_no_names_before_all_ranks_have_written_them(tmp_path):
    whole, config = whole_backbone("qwen2"), LoraConfig(r=4, target_modules="all-linear")
    masters = random_masters(whole, config)

    def write(group):
        save_adapter(Adapter(divided_backbone(whole, group), config, masters=masters), tmp_path)

    run_ranks(2, write)
    assert {path.name for path in tmp_path.iterdir()} == {
        pending(tmp_path / name).name for name in FILES
    }
    with named_when_written(tmp_path):
        assert not list(tmp_path.iterdir()), "what an earlier writer has left is nobody's"
        run_ranks(2, write)
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_a_rank_that_fails_leaves_no_file(tmp_path, monkeypatch):
    """Files of an adapter that was there before stay as they were."""
    whole, config = whole_backbone("qwen2"), LoraConfig(r=4, target_modules="all-linear")
    masters = random_masters(whole, config)
    before = written_by(2, whole, config, masters, tmp_path / "there")
    tensors_of = DividedAdapter.tensors

    def failing(adapter, masters):
        found = tensors_of(adapter, masters)
        if adapter.ranks.rank == 1:
            last = max(name for name in found if "o_proj.lora_A" in name)
            found[last] = replace(found[last], blocks=fail)
        return found

    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DividedAdapter, "tensors", failing)
    with pytest.raises(OSError, match="No space left"), named_when_written(tmp_path / "there"):
        run_ranks(
            2,
            lambda group: save_adapter(
                Adapter(divided_backbone(whole, group), config), tmp_path / "there"
            ),
        )
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == before


@pytest.mark.long
@pytest.mark.parametrize("dies_after", [0, 3, 12])
def test_a_rank_that_is_killed_leaves_nothing_that_looks_whole(dies_after, tmp_path):
    """Leftover files have other names, and are gone once the adapter is written again."""
    model, target = str(model_directory("qwen2")), tmp_path / "adapter"

    def write():
        with named_when_written(target):
            assert (
                run_processes(2, save_adapter_of_ranks, model, str(target), dies_after)[1] == KILLED
            )
            assert {path.name for path in target.iterdir()} == {
                pending(target / name).name for name in FILES
            }
            raise DeviceGoneError("rank 1 has ended")

    with pytest.raises(DeviceGoneError):
        write()
    assert not list(target.iterdir())
    with named_when_written(target):
        assert run_processes(2, save_adapter_of_ranks, model, str(target), None) == [None, None]
    whole = whole_backbone("qwen2")
    save_adapter(
        Adapter(whole, LoraConfig(r=4, target_modules="all-linear"), seed=3), tmp_path / "alone"
    )
    assert files_below(target) == files_below(tmp_path / "alone")


def test_the_system_may_take_a_part_of_what_is_written(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(5, 7), "b": torch.arange(9)}
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: pwrite(file, content[:3], at))
    with named_when_written(tmp_path):
        write_shared_tensors(tmp_path / "a", whole_file(tensors), Ranks(rank=0, size=2))
    assert (tmp_path / "a").read_bytes() == save(tensors, metadata={"format": "pt"})
