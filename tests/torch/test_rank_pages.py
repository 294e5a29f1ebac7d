"""Pages go from one device to another whatever the numbers of their ranks, and fingerprints do not
depend on these."""

from pathlib import Path

import pytest
import torch
from lengths import long_but
from ranks import relative_error, whole_backbone
from support import model_directory, random_tokens

from coserve.devices.counting import device_info
from coserve.devices.fingerprint import fingerprint
from coserve.devices.messages.commands import DeviceInfo
from coserve.handover.messages import difference, identity_of
from coserve.kernels.cuts import Cut, CutRun, even_cut, head_cut
from coserve.kernels.groups.threads import run_ranks
from coserve.memory.tensors.page_files import PageFiles
from coserve.memory.tensors.paged_kv import PagedKv, whole_page_bytes
from coserve.models import Backbone, forward, load_backbone, logits
from coserve.models.dividing import divided_backbone
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile

BLOCK = 4
TOKENS = random_tokens(3 * BLOCK, 1).tolist()
HARDWARE = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)


def on_ranks(whole: Backbone, size: int, run) -> list:
    """CutRun a function with each rank's backbone, or with the whole one."""
    return (
        [run(whole)]
        if size == 1
        else run_ranks(size, lambda group: run(divided_backbone(whole, group)))
    )


def prefill(backbone: Backbone, path: Path) -> None:
    """Compute keys and values of a prompt, and copy their pages to places of a file in another
    order."""
    pages = PagedKv(backbone, num_pages=6, block_tokens=BLOCK)
    forward(backbone, [pages.rows([((2, 5, 0), 0, TOKENS)])])
    PageFiles(pages).export(str(path), [2, 5], [1, 0])
    PageFiles(pages).export(str(path), [0], [2])


def decode(backbone: Backbone, path: Path, data: bytes = b"") -> torch.Tensor:
    """Return the logits of a token after the prompt, of which no row was computed here."""
    pages = PagedKv(backbone, num_pages=6, block_tokens=BLOCK)
    pages.storage.zero_()
    PageFiles(pages).take(str(path), [4, 1, 3], [0, 1, 2] if data else [1, 0, 2], data)
    table = (1, 4, 3, 0) if data else (4, 1, 3, 0)
    return logits(backbone, forward(backbone, [pages.rows([(table, len(TOKENS), [7])])]))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize(
    "name", long_but("llama", "falcon-old", of=["llama", "falcon-old", "gpt2"])
)
def test_a_prompt_of_some_ranks_is_decoded_on_others(name, sizes, tmp_path):
    """Each of the two key heads of a Llama is on two of four ranks."""
    whole, path, (before, after) = whole_backbone(name), tmp_path / "pages", sizes
    path.write_bytes(bytes(3 * whole_page_bytes(whole, BLOCK)))
    alone = PagedKv(whole, num_pages=6, block_tokens=BLOCK)
    forward(whole, [alone.rows([((4, 1, 3, 0), 0, TOKENS)])])
    expected = logits(whole, forward(whole, [alone.rows([((4, 1, 3, 0), len(TOKENS), [7])])]))
    on_ranks(whole, before, lambda backbone: prefill(backbone, path))
    for found in on_ranks(whole, after, lambda backbone: decode(backbone, path)):
        assert relative_error(found, expected) < 1e-5
    recorded = path.read_bytes()
    path.unlink()
    for found in on_ranks(whole, after, lambda backbone: decode(backbone, path, recorded)):
        assert relative_error(found, expected) < 1e-5


def test_each_entry_of_a_cut_is_owned_once():
    runs = (
        (CutRun(start=0, stop=2), CutRun(start=4, stop=6)),
        (CutRun(start=1, stop=3), CutRun(start=6, stop=8)),
    )
    fused = Cut(width=8, runs=runs)
    for cut in (head_cut(2, 3, 4, name="", may_copy=True), fused, even_cut(7, 4, padded=True)):
        assert cut is not None
        whole, covered = torch.arange(cut.width), torch.zeros(cut.width, dtype=torch.int64)
        for rank in range(cut.size):
            piece = cut.take(whole, rank)
            for start, run in cut.owned_runs(rank):
                assert piece[start : start + run.stop - run.start].equal(
                    whole[run.start : run.stop]
                )
                covered[run.start : run.stop] += 1
        assert covered.tolist() == [
            int(any(r.start <= e < r.stop for runs in cut.runs for r in runs)) for e in whole
        ]


@pytest.mark.parametrize("weights", ["dense", "int8"])
@pytest.mark.parametrize(
    "name",
    long_but("llama", of=["llama", "llama-biases-tied", "phi3", "mixtral", "qwen3-next", "gpt2"]),
)
def test_a_fingerprint_does_not_depend_on_ranks(name, weights):
    whole = load_backbone(
        str(model_directory(name)), dtype="float32", weights=weights, kernels="plain"
    )
    found = run_ranks(2, lambda group: fingerprint(divided_backbone(whole, group)))
    assert found == [fingerprint(whole)] * 2


def test_a_fingerprint_tells_what_the_last_rank_holds():
    whole, other = (
        load_backbone(str(model_directory()), dtype="float32", kernels="plain") for _ in range(2)
    )
    tensor = other.weights["embed"]["model.embed_tokens.weight"]
    assert isinstance(tensor, torch.Tensor)
    tensor[96, 0] += 1
    before, after = (
        run_ranks(2, lambda group: fingerprint(divided_backbone(each, group)))  # noqa: B023
        for each in (whole, other)
    )
    assert before[0] != after[0] == after[1] == fingerprint(other)


def test_devices_with_different_numbers_of_ranks_can_hand_over():
    whole = whole_backbone("llama")

    def info_of(backbone: Backbone) -> DeviceInfo:
        return device_info(
            backbone,
            num_pages=4,
            block_tokens=BLOCK,
            threads=1,
            profile=roofline_profile(whole, HARDWARE),
        )

    alone, (first, second) = (
        info_of(whole),
        run_ranks(2, lambda group: info_of(divided_backbone(whole, group))),
    )
    assert first == second
    assert (
        first.page_bytes == alone.page_bytes // 2
        and first.place_bytes == alone.place_bytes == alone.page_bytes
    )
    assert difference(identity_of(first), identity_of(alone)) is None
