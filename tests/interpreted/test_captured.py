"""What a GPU runs as captured calls gives what the plain backend gives: requests that decode, and
windows of jobs. On a GPU, or interpreted on a CPU, where a call runs again what it was made of
(`make test-triton`).
"""

import pytest
import torch
from rank_models import decode
from rank_processes import run_torch_processes
from steps_at_once import Steps, wide_directory
from support import make_adapter, model_directory, random_sequences, random_tokens, worst_error
from torch import distributed as dist

from coserve.adapters.full_weights import FullWeights
from coserve.adapters.methods.full import FullConfig
from coserve.kernels.groups.base import SingleRank
from coserve.kernels.triton import TritonBackend
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models import forward, load_backbone
from coserve.tuning import (
    TrainingPass,
    captured,
    make_pack,
    run_alone,
    training_programs,
    window_rooms,
)
from coserve.tuning.captured import CapturedWindows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(
        not TritonBackend.is_available(DEVICE),
        reason="needs a GPU, or Triton's interpreter (make test-triton)",
    ),
    # Of rows with which a call is filled up: memory that nobody has written.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


def load(directory, kernels):
    return load_backbone(str(directory), dtype="float32", device=DEVICE, kernels=kernels)


@pytest.fixture
def _few_splits(monkeypatch):
    """An interpreter takes its time for splits without a key."""
    if DEVICE.type == "cpu":
        from coserve.kernels.triton import attention_tables, graphs  # needs Triton

        monkeypatch.setattr(graphs, "_SPLITS", ((4, 4), (1024, 2)))
        monkeypatch.setattr(attention_tables, "SPLITS", 2)


@pytest.mark.usefixtures("_few_splits")
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-biases-tied", "qwen2-sliding"])
def test_decode_steps(name):
    """Of growing and of fewer requests; without adapters, with one, with several of several ranks
    and targets."""
    targets = [["q_proj", "v_proj"], "all-linear", ["down_proj"]]
    found = []
    for kernels in ("triton", "plain"):
        backbone = load(wide_directory(name), kernels)
        bypasses = [
            make_adapter(backbone, seed=seed, r=rank, target_modules=target).bypasses()
            for seed, rank, target in zip((1, 2, 3), (4, 8, 2), targets, strict=True)
        ]
        companies = [
            [None, 0, None, 0, 0],
            [0, 1, None, 1, 0],
            [2] * 5,
            [0, 1, 2, 1, 0],
            [1, 0, 2, 0, 1],
        ]
        with torch.inference_mode():
            steps = Steps(backbone)
            rows = [
                steps.step(which=which).clone()
                for which in (None, [4, 2], None, [0], [3, 1, 0], None)
            ]
            rows += [
                steps.step(
                    [None if index is None else bypasses[index] for index in company]
                ).clone()
                for company in companies
            ]
        if kernels == "triton":
            assert steps.num_traces > 1
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(
    DEVICE.type == "cuda" or not dist.is_available(), reason="needs the interpreter, and gloo"
)
def test_ranks_capture_nothing():
    """Their sums would be among what is captured."""
    directory = str(wide_directory("llama"))
    expected = decode(SingleRank(), directory, "float32", "plain")[0]
    for found, _, num_traces in run_torch_processes(2, decode, directory, "float32", "triton"):
        assert not num_traces
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# Of each step, rows of some sequences; of those that are not named, one.
PROMPTS: list[dict[int, int]] = [{1: 6, 4: 2}, {0: 5}, {}, {1: 2}, {2: 3, 3: 4, 4: 5}, {1: 4}]


@pytest.fixture
def _small_graphs(monkeypatch):
    """For steps with prompts."""
    from coserve.kernels.triton import graphs  # needs Triton

    monkeypatch.setattr(graphs, "PROMPT_ROWS", (8, 16))
    monkeypatch.setattr(graphs, "_SEGMENTS", (2, 4, 16))


@pytest.fixture
def captured_sizes(monkeypatch):
    """Of the graphs that are captured."""
    from coserve.kernels.triton import graphs

    sizes, capture = [], graphs.GraphCalls._captured

    def note(self, step, size):
        sizes.append(size)
        return capture(self, step, size)

    monkeypatch.setattr(graphs.GraphCalls, "_captured", note)
    return sizes


def run_prompts(name, kernels):
    """Steps of growing and of fewer rows, with prompts and without, in turn."""
    backbone = load(wide_directory(name), kernels)
    targets = (["q_proj", "v_proj"], "all-linear")
    bypasses = [
        make_adapter(backbone, seed=seed, r=rank, target_modules=target).bypasses()
        for seed, rank, target in zip((1, 2), (4, 20), targets, strict=True)
    ]
    one, other = bypasses
    companies = (
        None,
        None,
        None,
        [one, other, None, other, one],
        [other, one, one, other, None],
        [other] * 5,
    )
    with torch.inference_mode():
        steps = Steps(backbone)
        rows = [
            steps.step(own, counts=counts).clone()
            for counts, own in zip(PROMPTS, companies, strict=True)
        ]
        rows += [steps.step(which=[2, 0], counts={0: 3}).clone(), steps.step(which=[2, 1]).clone()]
    return torch.cat(rows)


@pytest.mark.usefixtures("_small_graphs", "_few_splits")
@pytest.mark.parametrize(
    "name", ["qwen2-sliding", *(["llama-biases-tied"] if DEVICE.type == "cuda" else [])]
)
def test_steps_with_pieces_of_prompts(name, captured_sizes):
    found, expected = (run_prompts(name, kernels) for kernels in ("triton", "plain"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    of_prompts = {(size.rows, size.segments, size.rank) for size in captured_sizes if size.segments}
    assert of_prompts == {(16, 16, 0), (8, 2, 0), (8, 8, 32), (16, 16, 32)}, (
        "5 steps, one without adapters twice"
    )


@pytest.mark.usefixtures("_small_graphs")
def test_more_requests_than_graphs_of_decode_steps_have_room_for(captured_sizes, monkeypatch):
    from coserve.kernels.triton import graphs

    monkeypatch.setattr(graphs, "DECODE_ROWS", (1, 2))
    with torch.inference_mode():
        found, expected = (
            Steps(load(wide_directory("llama"), kernels)).step().clone()
            for kernels in ("triton", "plain")
        )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert [(size.rows, size.segments) for size in captured_sizes] == [(8, 8)]


@pytest.mark.usefixtures("_small_graphs")
def test_steps_that_were_captured_at_the_start_change_nothing():
    found = []
    for kernels in ("triton", "plain"):
        backbone = load(wide_directory("llama"), kernels)
        backbone.backend.captured_rows = (1, 4) if kernels == "triton" else ()
        backbone.backend.captured_prompts = (8,) if kernels == "triton" else ()
        pages = PagedKv(backbone, num_pages=4, block_tokens=4)
        pages.storage.zero_()
        pages.capture()
        assert len(pages.stores.traces) == (kernels == "triton")
        with torch.inference_mode():
            forward(
                backbone, [pages.rows([([0, 1], 0, random_tokens(5, 1).tolist()), ([2], 0, [7])])]
            )
            steps = [
                forward(backbone, [pages.rows([([0, 1], 5 + i, [9]), ([2], 1 + i, [3])])]).clone()
                for i in (0, 1)
            ]
        found.append(torch.cat(steps))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_small_graphs")
def test_steps_with_prompts_of_too_many_rows_run_as_always(captured_sizes):
    """And such steps with a job's rows among them."""
    found = []
    for kernels in ("triton", "plain"):
        adapter = make_adapter(load(wide_directory("llama"), kernels), seed=1)
        training = TrainingPass(
            adapter, training_programs(adapter), make_pack(random_sequences((6,))), first_row=0
        )
        with torch.inference_mode():
            steps = Steps(adapter.backbone)
            rows = [
                steps.step(counts={1: 10, 4: 8}).clone(),
                steps.step(which=[0, 2, 3], counts={0: 2}).clone(),
            ]
            pages = steps.pages.rows([(steps.table(1), steps.lengths[1], [3, 4])])
            rows.append(forward(adapter.backbone, [pages, training.next_window(6)]).clone())
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    assert [size.rows for size in captured_sizes] == [8], "the second step's"


@pytest.mark.usefixtures("_small_graphs")
def test_a_graph_leaves_what_it_was_not_given():
    """Capturing another size between steps writes to no page of theirs."""
    backbone = load(wide_directory("llama"), "triton")
    with torch.inference_mode():
        steps = Steps(backbone)
        steps.step(counts={0: 4})
        before = steps.pages.pages.clone()
        steps.step(which=[2, 3], counts={2: 2})
    places = {steps.table(index)[number // 4] for index, number in ((2, 8), (2, 9), (3, 13))}
    others = [page for page in range(before.shape[2]) if page not in places]
    assert torch.equal(
        steps.pages.pages[:, :, others].nan_to_num(7), before[:, :, others].nan_to_num(7)
    )


@pytest.fixture
def _small_rooms(monkeypatch):
    """An interpreter takes its time for tiles of nothing."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(window_rooms, "_ROWS", (16, 32))
        monkeypatch.setattr(window_rooms, "_KEYS", (32,))
        monkeypatch.setattr(window_rooms, "_SEGMENTS", 4)


def gradients(adapter, programs, lengths, *, rows, calls=None):
    training = TrainingPass(
        adapter, programs, make_pack(random_sequences(lengths)), first_row=7, captured=calls
    )
    with torch.inference_mode():
        run_alone(training, forward_rows=rows, backward_rows=rows - 3)
    return {
        name: gradient.cpu() for name, gradient in training.gradients.items()
    }, training.totals.cpu()


@pytest.mark.usefixtures("_small_rooms")
@pytest.mark.parametrize(("family", "dropout"), [("llama", 0.0), ("llama", 0.2), ("qwen3", 0.0)])
def test_windows_of_packs(family, dropout):
    """Several windows of a pack, and packs of other lengths through the same rooms."""
    sides = []
    for kernels in ("triton", "plain"):
        adapter = make_adapter(load(model_directory(family), kernels), seed=1, dropout=dropout)
        sides.append((adapter, training_programs(adapter)))
    calls = CapturedWindows.of(sides[0][0])
    assert calls is not None and CapturedWindows.of(sides[1][0]) is None
    for lengths in ((9, 6), (9, 6), (5, 3, 2)):
        ours, our_totals = gradients(*sides[0], lengths, rows=8, calls=calls)
        theirs, their_totals = gradients(*sides[1], lengths, rows=8)
        assert worst_error(ours, theirs) < 1e-5
        torch.testing.assert_close(our_totals, their_totals, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_small_rooms")
def test_rooms_that_are_let_go_are_made_again(monkeypatch):
    """With room for fewer sizes than packs have."""
    monkeypatch.setattr(captured, "_MAX_ROOMS", 1)
    adapter = make_adapter(load(model_directory("llama"), "triton"), seed=1)
    programs, calls = training_programs(adapter), CapturedWindows.of(adapter)
    for lengths in ((9,), (9,), (20,), (20,), (9,), (9,)):
        ours, _ = gradients(adapter, programs, lengths, rows=20, calls=calls)
        theirs, _ = gradients(adapter, programs, lengths, rows=20)
        assert worst_error(ours, theirs) < 1e-5


@pytest.mark.usefixtures("_small_rooms")
def test_blocks_above_the_trained_ones_are_captured(caplog):
    """They have no parameters."""
    caplog.set_level("INFO")
    adapter = make_adapter(
        load(model_directory("llama"), "triton"),
        seed=1,
        target_modules=["q_proj", "down_proj"],
        layers_to_transform=[0],
    )
    programs, calls = training_programs(adapter), CapturedWindows.of(adapter)
    for _ in range(3):
        ours, _ = gradients(adapter, programs, (9,), rows=12, calls=calls)
    assert worst_error(ours, gradients(adapter, programs, (9,), rows=12)[0]) < 1e-5
    assert "kernel by kernel" not in caplog.text


def test_a_model_that_is_trained_itself_is_not_captured():
    backbone, config = load(model_directory("llama"), "triton"), FullConfig()
    assert (
        CapturedWindows.of(FullWeights(backbone, config, config.chosen(backbone.architecture)))
        is None
    )


# -- what cannot be captured ----------------------------------------------------------


def test_what_waits_for_the_device_is_not_captured():
    """As experts are counted, say."""
    backend, x = (
        load(model_directory("llama"), "triton").backend,
        torch.tensor([3, 1], device=DEVICE),
    )
    assert backend.capture(lambda: torch.bincount(x)) is None
    assert backend.capture(lambda: x.sum().item()) is None
    y = torch.zeros(2, device=DEVICE)
    call = backend.capture(lambda: y.add_(1))
    before = y.clone()
    call()
    assert torch.equal(y, before + 1)


@pytest.mark.usefixtures("_small_rooms")
@pytest.mark.parametrize("what", ["WindowRoom", "CapturedForward", "CapturedBackward"])
def test_without_memory_for_it_windows_run_as_always(monkeypatch, what):
    adapter = make_adapter(load(model_directory("llama"), "triton"), seed=1)
    programs, calls = training_programs(adapter), CapturedWindows.of(adapter)
    expected, _ = gradients(adapter, programs, (9,), rows=12)
    asked = []

    def room(*_):
        asked.append(1)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(captured, what, room)
    for _ in range(3):
        found, _ = gradients(adapter, programs, (9,), rows=12, calls=calls)
        assert worst_error(found, expected) < 1e-5
    assert 0 < len(asked) <= 4, "each program, and each call, asks once"


@pytest.mark.usefixtures("_small_rooms")
def test_what_is_no_number_in_one_pack_is_not_in_the_next():
    """A longer pack leaves its rows in the room."""
    adapter = make_adapter(load(model_directory("llama"), "triton"), seed=1)
    programs, calls = training_programs(adapter), CapturedWindows.of(adapter)
    expected, _ = gradients(adapter, programs, (5,), rows=5)
    for _ in range(2):
        gradients(adapter, programs, (9, 6), rows=15, calls=calls)
    kept = {name: master.clone() for name, master in adapter.masters.items()}
    for master in adapter.masters.values():
        master.fill_(torch.nan)
    adapter.sync_compute_copy()
    broken, _ = gradients(adapter, programs, (9, 6), rows=15, calls=calls)
    assert all(gradient.isnan().any() for gradient in broken.values())
    for name, master in adapter.masters.items():
        master.copy_(kept[name])
    adapter.sync_compute_copy()
    found, _ = gradients(adapter, programs, (5,), rows=5, calls=calls)
    assert worst_error(found, expected) < 1e-5
