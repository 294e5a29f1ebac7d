"""The page pool: conservation under any storm, shared prefixes, and the same numbers as contiguous
memory."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    FAMILIES,
    make_adapter,
    make_backbone,
    make_model,
    random_sequences,
    random_tokens,
    worst_error,
)

from coserve.engine.page_manager import PageManager, WindowNeed
from coserve.errors import BudgetError
from coserve.memory.pages.allocator import PageAllocator
from coserve.memory.pages.kv_cache import KvCache, PagedSequence
from coserve.memory.pages.prefix_index import PrefixIndex, PrefixOwner
from coserve.memory.tensors.activations import LentRuns, group_bytes
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models import CachedSequence, forward, logits
from coserve.models.batch import RowSpan
from coserve.models.bypasses import Bypasses
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.pass_memory import saved_shapes, workspace_shapes

BLOCK = 4


def make_pool(num_pages: int = 20, page_bytes: int = 64) -> PageAllocator:
    return PageAllocator(num_pages, page_bytes)


class Cache(KvCache):
    """The bookkeeping of pages, and the tensors that a device has for them."""

    def __init__(self, num_pages: int = 40, family: str = "llama", dtype: str = "float32") -> None:
        self.tensors = PagedKv(
            make_backbone(family, dtype), num_pages=num_pages, block_tokens=BLOCK
        )
        self.backbone = self.tensors.backbone
        super().__init__(make_pool(num_pages, self.tensors.page_bytes), block_tokens=BLOCK)

    def begin(self, tokens: torch.Tensor | None = None, version: str = "") -> PagedSequence:
        """A sequence with the prefix of these tokens that is known."""
        ids = [] if tokens is None else tokens.tolist()
        return self.open(self.prefixes.keys(PrefixOwner(version), ids), len(ids))

    def extend(
        self, sequence: PagedSequence, tokens: torch.Tensor, bypasses: Bypasses | None = None
    ) -> RowSpan:
        """A span of a sequence's next tokens, in pages that it takes for them."""
        sequence.reserve(len(tokens))
        return self.tensors.rows([(sequence.pages, sequence.length, tokens.tolist())], bypasses)

    def run(
        self,
        sequence: PagedSequence,
        tokens: torch.Tensor,
        known: torch.Tensor | None = None,
        version: str = "",
    ) -> torch.Tensor:
        """The hidden rows of a sequence's next tokens, run alone; known: all its tokens, to make
        full blocks known."""
        hidden = forward(self.backbone, [self.extend(sequence, tokens)])
        self.commit(sequence, len(tokens), known, version)
        return hidden

    def commit(
        self,
        sequence: PagedSequence,
        num_tokens: int,
        known: torch.Tensor | None = None,
        version: str = "",
    ) -> None:
        if known is None:
            sequence.length += num_tokens
        else:
            sequence.commit(num_tokens, known.tolist(), PrefixOwner(version))


def lent(tensors: PagedKv, programs, pack) -> LentRuns:
    """Runs for a pass, one after another from the first page."""
    backbone = tensors.backbone
    groups = [workspace_shapes(programs, backbone, pack.num_rows)]
    groups += [
        saved_shapes(programs, backbone, part, pack.num_rows) for part in backbone.local.parts[:-1]
    ]
    runs, first = [], 0
    for shapes in groups:
        num_pages = -(-group_bytes(shapes) // tensors.page_bytes)
        runs.append((first, num_pages))
        first += num_pages
    return LentRuns(tensors, runs)


# -- pages ------------------------------------------------------------------------


def test_pages_come_from_the_bottom_and_runs_from_the_top():
    pool = make_pool(10)
    assert pool.take("kv", 3) == [0, 1, 2]
    assert pool.take_runs("activations", [3, 1]) == [range(7, 10), range(6, 7)]
    pool.give_back("kv", [1])
    assert pool.take("kv", 2) == [1, 3]
    assert pool.take_runs("activations", [3]) == [], "two are left, and they are neighbours"
    assert pool.take_runs("activations", [2, 3]) == [range(4, 6)]
    assert pool.num_free == 0
    assert pool.num_pages_by_owner() == {"kv": 4, "activations": 6}
    pool.check_integrity()


def test_too_little_takes_nothing():
    pool = make_pool(3)
    with pytest.raises(BudgetError, match="4 pages asked for, 3 are free"):
        pool.take("kv", 4)
    assert pool.num_free == 3
    with pytest.raises(BudgetError, match="multiples of 64 bytes"):
        make_pool(3, 100)


def test_pages_go_back_from_their_owner_alone():
    pool = make_pool(3)
    pages = pool.take("kv", 2)
    with pytest.raises(AssertionError, match="page 0 is kv's, not activations's"):
        pool.give_back("activations", pages)
    pool.give_back("kv", pages)
    with pytest.raises(AssertionError, match="page 0 is None's"):
        pool.give_back("kv", pages)
    (run,) = pool.take_runs("activations", [2])
    with pytest.raises(AssertionError, match=r"range\(1, 3\) is not all kv's"):
        pool.give_back_runs("kv", [run])


@given(st.lists(st.integers(0, 5), max_size=6), st.sets(st.integers(0, 19)))
def test_runs_at_once_are_as_one_after_the_other(lengths, used):
    pools = make_pool(20), make_pool(20)
    for pool in pools:
        pool.take("kv", 20)
        pool.give_back("kv", [page for page in range(20) if page not in used])
    one_by_one = [pools[0].take_runs("activations", [length]) for length in lengths]
    runs = pools[1].take_runs("activations", lengths)
    assert [runs] == [[run[0] for run in one_by_one[: len(runs)]]]
    assert len(runs) == len(lengths) or not one_by_one[len(runs)], (
        "up to the first that there is no room for"
    )
    pools[1].give_back_runs("activations", runs)
    pools[1].check_integrity()
    assert pools[1].num_free == 20 - len(used)


@settings(deadline=None)
@given(st.integers(0, 2**20))
def test_pages_are_conserved(seed):
    rng, pool = random.Random(seed), make_pool(30)
    lent: list[tuple[str, Sequence[int]]] = []
    for _ in range(80):
        owner, size = rng.choice(["kv", "activations"]), rng.randint(1, 12)
        if lent and rng.random() < 0.5:
            owner, pages = lent.pop(rng.randrange(len(lent)))
            if isinstance(pages, range):
                pool.give_back_runs(owner, [pages])
            else:
                pool.give_back(owner, pages)
        elif owner == "kv" and pool.can_take(size):
            lent.append((owner, pool.take(owner, size)))
        elif owner == "activations":
            lent += [(owner, run) for run in pool.take_runs(owner, [size, 2])]
        pool.check_integrity()
        assert sum(len(pages) for _, pages in lent) == pool.num_pages - pool.num_free
        assert len({page for _, pages in lent for page in pages}) == pool.num_pages - pool.num_free


# -- shared prefixes ----------------------------------------------------------------


def found(index: PrefixIndex, tokens: list[int], version: str = "") -> list[int]:
    return index.find(index.keys(PrefixOwner(version), tokens), len(tokens))


def test_prefixes_are_found_in_whole_blocks_and_leave_a_token_to_run():
    index = PrefixIndex(4)
    tokens = list(range(12))
    index.use([7, 8, 9])
    keys = index.keys(PrefixOwner(""), tokens)
    assert len(keys) == 3
    index.register(keys, [7, 8, 9], range(3))
    assert found(index, tokens) == [7, 8], "the last token of a prompt must be run"
    assert found(index, [*tokens, 99]) == [7, 8, 9]
    assert found(index, [*tokens[:7], 99, 99, 99]) == [7]
    assert found(index, [99, *tokens]) == []
    assert found(index, [*tokens, 99], "a@1") == [], "another version never sees it"
    longer = index.keys(PrefixOwner(""), [*tokens, 1, 2, 3, 4], known=keys)
    assert longer == index.keys(PrefixOwner(""), [*tokens, 1, 2, 3, 4])
    index.use([3])
    index.register(longer, [7, 8, 9, 3], range(3, 4))
    assert found(index, [*tokens, 1, 2, 3, 4, 5]) == [7, 8, 9, 3]


def test_what_was_unused_longest_goes_first_and_ends_before_their_prefixes():
    index = PrefixIndex(1)
    for version, pages in (("a", [0, 1, 2]), ("b", [3])):
        index.use(pages)
        index.register(
            index.keys(PrefixOwner(version), [5, 6, 7][: len(pages)]), pages, range(len(pages))
        )
    assert index.release([0, 1, 2]) == []
    assert index.release([3]) == []
    assert index.num_evictable == 4
    assert index.evict(1) == [2]
    index.use(found(index, [5, 6], "a"))
    assert index.evict(9) == [1, 3]
    assert found(index, [5, 6, 7], "a") == [0]
    index.check_integrity()


def test_a_known_prefix_is_not_run_again_and_gives_the_same_logits():
    cache = Cache()
    tokens = random_tokens(19, 1)
    first = cache.begin(tokens)
    assert first.length == 0
    hidden = cache.run(first, tokens, tokens)
    second = cache.begin(tokens)
    assert second.length == 16
    assert second.pages == first.pages[:4]
    torch.testing.assert_close(cache.run(second, tokens[16:]), hidden[16:], atol=1e-5, rtol=0)
    other = cache.begin(tokens, version="a@1")
    assert other.length == 0
    for sequence in (first, second, other):
        sequence.close()
    cache.check_integrity()
    assert cache.num_available == cache.pool.num_pages
    assert cache.prefixes.num_evictable == 4, "the full blocks stay until their pages are needed"


def test_pages_of_prefixes_that_no_request_uses_are_had_when_needed():
    cache = Cache(num_pages=6)
    tokens = random_tokens(16, 1)
    sequence = cache.begin(tokens)
    cache.run(sequence, tokens, tokens)
    sequence.close()
    assert (cache.pool.num_free, cache.num_available) == (2, 6)
    keys = cache.prefixes.keys(PrefixOwner(""), [*tokens.tolist(), 5])
    assert cache.num_pages_to_open(keys, 17) == (5, 16), (
        "one more page, and four that could not be had any more"
    )
    other = cache.begin(random_tokens(20, 2))
    assert other.num_pages_missing(20) == 5
    cache.run(other, random_tokens(20, 2))
    assert cache.begin(tokens).length == 4, "what was left of it"
    cache.check_integrity()


def test_a_request_that_does_not_fit_takes_nothing():
    cache = Cache(num_pages=3)
    sequence = cache.begin(torch.ones(20, dtype=torch.int64))
    with pytest.raises(BudgetError, match="5 pages asked for, 3 are available"):
        cache.extend(sequence, torch.ones(20, dtype=torch.int64))
    assert cache.num_available == 3
    assert sequence.pages == []


@pytest.mark.parametrize("family", [*FAMILIES, "mistral-sliding"])
def test_paged_sequences_equal_transformers_in_chunks_and_decoding(family):
    model, cache = make_model(family), Cache(family=family)
    first, second = random_tokens(21, 1), random_tokens(14, 2)
    a, b = cache.begin(), cache.begin()
    got: dict[int, list[torch.Tensor]] = {id(a): [], id(b): []}
    for chunk_a, chunk_b in [(7, 3), (6, 1), (1, 4), (1, 1), (5, 1), (1, 4)]:
        steps = [(a, first, chunk_a), (b, second, chunk_b)]
        spans = [
            cache.extend(seq, tokens[seq.length : seq.length + chunk])
            for seq, tokens, chunk in steps
        ]
        rows = logits(cache.backbone, forward(cache.backbone, spans)).split([chunk_a, chunk_b])
        for (seq, _, chunk), ours in zip(steps, rows, strict=True):
            cache.commit(seq, chunk)
            got[id(seq)].append(ours)
        cache.check_integrity()
    for seq, tokens in ((a, first), (b, second)):
        with torch.no_grad():
            theirs = model(tokens[None]).logits[0]
        torch.testing.assert_close(torch.cat(got[id(seq)]), theirs, atol=1e-4, rtol=0)


def test_paged_and_contiguous_caches_give_exactly_the_same():
    cache = Cache()
    tokens = random_tokens(18, 3)
    paged, plain = cache.begin(), CachedSequence(cache.backbone, 18)
    for start, end in ((0, 9), (9, 10), (10, 18)):
        ours = cache.run(paged, tokens[start:end])
        assert torch.equal(ours, forward(cache.backbone, [plain.extend(tokens[start:end])]))


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**20))
def test_a_storm_of_requests_conserves_pages_and_never_mixes_them_up(seed):
    """Arrivals with shared prefixes under two versions, decoding, ends and preemptions; every
    hidden row as if alone."""
    rng, cache = random.Random(seed), Cache(num_pages=14)
    bases = [random_tokens(12, base) for base in range(2)]
    live: list[tuple[PagedSequence, torch.Tensor, str]] = []
    for _ in range(25):
        if rng.random() < 0.4 and len(live) < 4:
            tokens = torch.cat(
                [
                    rng.choice(bases)[: rng.randint(1, 12)],
                    random_tokens(rng.randint(1, 3), rng.randint(0, 99)),
                ]
            )
            version = rng.choice(["", "a@1"])
            live.append((cache.begin(tokens, version), tokens, version))
        if live and rng.random() < 0.25:
            live.pop(rng.randrange(len(live)))[0].close()
        for index, (sequence, tokens, version) in enumerate(live):
            if sequence.length == len(tokens):
                tokens = torch.cat([tokens, random_tokens(1, rng.randint(0, 99))])
                live[index] = sequence, tokens, version
            count = rng.randint(1, len(tokens) - sequence.length)
            if sequence.num_pages_missing(count) > cache.num_available:
                sequence.close()
                live[index] = cache.begin(tokens), tokens, ""
                continue
            start = sequence.length
            hidden = cache.run(
                sequence, tokens[start : start + count], tokens[: start + count], version
            )
            alone = CachedSequence(cache.backbone, start + count)
            expected = forward(cache.backbone, [alone.extend(tokens[: start + count])])[start:]
            torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
        cache.check_integrity()
    for sequence, _, _ in live:
        sequence.close()
    assert cache.num_available == cache.pool.num_pages


# -- activations --------------------------------------------------------------------


def test_groups_lie_aligned_in_runs_and_do_not_overlap():
    tensors = PagedKv(make_backbone("llama"), num_pages=8, block_tokens=BLOCK)
    memory = LentRuns(tensors, [(5, 1), (6, 1)])
    shapes = {"a": ((3, 5), torch.float32), "b": ((7,), torch.uint8), "c": ((2, 2), torch.bfloat16)}
    assert group_bytes(shapes) == 64 + 64 + 64
    group = memory.take(shapes)
    assert {name: (tuple(t.shape), t.dtype) for name, t in group.items()} == shapes
    for value, tensor in enumerate(group.values(), 1):
        tensor.fill_(value)
    assert [int(tensor.flatten()[0]) for tensor in group.values()] == [1, 2, 3]
    with pytest.raises(
        BudgetError, match=f"{tensors.page_bytes + 64} bytes do not fit into 1 pages"
    ):
        memory.take({"d": ((tensors.page_bytes + 1,), torch.uint8)})


def test_a_pass_in_pages_gives_the_same_gradients():
    adapter = make_adapter(make_backbone("llama"))
    programs, pack = training_programs(adapter), make_pack(random_sequences((9, 4, 7)))
    plain = TrainingPass(adapter, programs, pack)
    run_alone(plain, forward_rows=8, backward_rows=6)
    tensors = PagedKv(adapter.backbone, num_pages=100, block_tokens=BLOCK)
    paged = TrainingPass(adapter, programs, pack, memory=lent(tensors, programs, pack))
    run_alone(paged, forward_rows=8, backward_rows=6)
    assert worst_error(paged.gradients, plain.gradients) == 0


def test_what_was_dropped_never_touches_pages_that_are_no_longer_its_own():
    adapter = make_adapter(make_backbone("llama"))
    programs, pack = training_programs(adapter), make_pack(random_sequences((9,)))
    tensors = PagedKv(adapter.backbone, num_pages=100, block_tokens=BLOCK)
    training = TrainingPass(adapter, programs, pack, memory=lent(tensors, programs, pack))
    window = training.next_window(9)
    training.finish_window(forward(adapter.backbone, [window]))
    training.run_loss(9)
    tasklet = training.next_tasklet(9)
    tasklet.run(4)
    training.release()
    before = tensors.storage.clone()
    for attempt in (
        tasklet.run,
        lambda: training.next_tasklet(9),
        lambda: training.run_loss(9),
        lambda: forward(adapter.backbone, [window]),
    ):
        with pytest.raises(AssertionError):
            attempt()
    assert torch.equal(tensors.storage, before)


def test_a_job_gets_the_pages_of_prefixes_that_no_request_uses():
    manager = PageManager(
        num_pages=60, page_bytes=64, block_tokens=BLOCK, send=list[object]().append
    )
    for seed in range(20):
        tokens = random_tokens(16, seed).tolist()
        sequence = manager.cache.open((), 16)
        sequence.reserve(16)
        sequence.commit(16, tokens, PrefixOwner(""))
        sequence.close()
    assert manager.pool.num_free == 0
    pack = manager.take_pack([40], 0)
    manager.check_integrity(set(), [pack])
    pack.release()
    with pytest.raises(BudgetError, match="side by side"):
        manager.take_pack([61], 0)
    manager.take_pack([0], 0).release()
    assert manager.cache.num_available == 60


def test_the_window_of_weights_grows_into_prefixes_that_no_request_uses():
    """Requests take most of it. Once they are over, and nobody has used their blocks for a pack's
    time, the next pack has all of it again.
    """
    manager, need = (
        PageManager(num_pages=60, page_bytes=64, block_tokens=BLOCK, send=list[object]().append),
        WindowNeed(5, 40),
    )
    pack = manager.take_pack([8], 0, need)
    assert len(manager.window.run) == 40
    sequences = [manager.cache.open((), 40) for _ in range(4)]
    for number, sequence in enumerate(sequences):
        sequence.reserve(40)
        sequence.commit(40, [number] * 40, PrefixOwner(""))
    least = len(manager.window.run)
    assert least < 30
    pack.release()
    manager.window.require(0)
    second = manager.take_pack([8], 0, need)
    assert len(manager.window.run) == least, "requests have what is below it"
    second.release()
    for sequence in sequences:
        sequence.close()
    third = manager.take_pack([8], 0, need)
    assert len(manager.window.run) == least, "they may have been used by the last step"
    third.release()
    fourth = manager.take_pack([8], 0, need)
    assert len(manager.window.run) == 40
    manager.check_integrity(set(), [fourth])


def test_the_window_of_weights_grows_past_pages_of_requests():
    """Of four requests the last is right below it, and stays: its pages move aside, and the pack's
    own runs come to lie where the window does not grow to.
    """
    manager, need = (
        PageManager(num_pages=80, page_bytes=64, block_tokens=BLOCK, send=list[object]().append),
        WindowNeed(5, 40),
    )
    open_sequences: list[PagedSequence] = []

    def move(targets):
        for sequence in open_sequences:
            sequence.move(targets)
        return True

    manager.on_move = move
    manager.take_pack([8], 0, need).release()
    assert len(manager.window.run) == 40
    for number in range(4):
        sequence = manager.cache.open((), 52)
        sequence.reserve(52)
        sequence.commit(52, [number] * 52, PrefixOwner(""))
        open_sequences.append(sequence)
    assert len(manager.window.run) == 28
    packs = [manager.take_pack([8], 0, need)]
    assert len(manager.window.run) < 28, "there is no room for both"
    for _ in range(3):
        open_sequences.pop(0).close()
    for _ in range(2):
        packs.pop().release()
        manager.window.require(0)
        packs.append(manager.take_pack([8], 0, need))
    assert len(manager.window.run) == 40 and manager.num_moved
    (last,) = open_sequences
    assert manager.pool.num_pages_by_owner()["weights"] == 40
    manager.check_integrity(set(last.pages), packs)
    assert not set(last.pages) & set(manager.window.run)


def test_requests_and_a_job_share_one_pool():
    cache = Cache(num_pages=200)
    adapter = make_adapter(cache.backbone)
    programs, pack = training_programs(adapter), make_pack(random_sequences((9, 4)))
    expected = TrainingPass(adapter, programs, pack)
    run_alone(expected, forward_rows=20, backward_rows=20)
    training = TrainingPass(adapter, programs, pack, memory=lent(cache.tensors, programs, pack))
    cache.pool.take("activations", 150)  # the first pages are the pass's
    tokens = random_tokens(10, 1)
    sequence = cache.begin()
    hidden = forward(cache.backbone, [cache.extend(sequence, tokens), training.next_window(20)])
    cache.commit(sequence, 10)
    training.finish_window(hidden[10:])
    training.run_loss(20)
    while not training.done:
        training.next_tasklet(5).run()
        cache.run(sequence, random_tokens(1, 2))
        cache.check_integrity()
    assert worst_error(training.gradients, expected.gradients) < 1e-5
