"""The page pool: conservation under any storm, shared beginnings, and the same numbers as contiguous memory."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import FAMILIES, make_adapter, make_backbone, make_model, random_sequences, random_tokens, worst_error

from coserve.errors import BudgetError
from coserve.memory.activations import PooledMemory, group_bytes
from coserve.memory.kv_cache import KvCache, kv_page_bytes
from coserve.memory.pages import PagePool
from coserve.memory.prefix_index import PrefixIndex
from coserve.models import CachedSequence, forward, logits
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs

CPU = torch.device("cpu")
BLOCK = 4


def make_pool(num_pages: int = 20, page_bytes: int = 64) -> PagePool:
    return PagePool(num_pages, page_bytes, CPU)


def make_cache(num_pages: int = 40, family: str = "llama", dtype: str = "float32") -> KvCache:
    backbone = make_backbone(family, dtype)
    return KvCache(backbone, make_pool(num_pages, kv_page_bytes(backbone, BLOCK)), block_tokens=BLOCK)


def extend(sequence, tokens: torch.Tensor):
    """A span of a sequence's next tokens, in pages that it takes for them."""
    sequence.reserve(len(tokens))
    return sequence.rows(tokens.tolist())


def run(cache: KvCache, sequence, tokens: torch.Tensor, known: list[int] | None = None) -> torch.Tensor:
    """The hidden rows of a sequence's next tokens, run alone."""
    hidden = forward(cache.backbone, [extend(sequence, tokens)])
    sequence.commit(len(tokens), known)
    return hidden


# -- pages ------------------------------------------------------------------------


def test_pages_come_from_the_bottom_and_runs_from_the_top():
    pool = make_pool(10)
    assert pool.take("kv", 3) == [0, 1, 2]
    assert pool.take_run("activations", 4) == range(6, 10)
    pool.give_back("kv", [1])
    assert pool.take("kv", 2) == [1, 3]
    assert pool.take_run("activations", 3) is None, "two are left, and they are neighbours"
    assert pool.take_run("activations", 2) == range(4, 6)
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


@settings(deadline=None)
@given(st.integers(0, 2**20))
def test_pages_are_conserved(seed):
    rng, pool, lent = random.Random(seed), make_pool(30), []
    for _ in range(80):
        owner, size = rng.choice(["kv", "activations"]), rng.randint(1, 12)
        if lent and rng.random() < 0.5:
            pool.give_back(*lent.pop(rng.randrange(len(lent))))
        elif owner == "kv" and pool.can_take(size):
            lent.append((owner, pool.take(owner, size)))
        elif owner == "activations" and (taken := pool.take_run(owner, size)) is not None:
            lent.append((owner, taken))
        pool.check_integrity()
        assert sum(len(pages) for _, pages in lent) == pool.num_pages - pool.num_free
        assert len({page for _, pages in lent for page in pages}) == pool.num_pages - pool.num_free


# -- shared beginnings --------------------------------------------------------------


def test_beginnings_are_found_in_whole_blocks_and_leave_a_token_to_run():
    index = PrefixIndex(4)
    tokens = list(range(12))
    index.use([7, 8, 9])
    chain = index.register(index.find("", tokens)[1], tokens, [7, 8, 9])
    assert chain.num_blocks == 3
    assert index.find("", tokens)[0] == [7, 8], "the last token of a prompt must be run"
    assert index.find("", [*tokens, 99]) == ([7, 8, 9], chain)
    assert index.find("", [*tokens[:7], 99, 99, 99])[0] == [7]
    assert index.find("", [99, *tokens])[0] == []
    assert index.find("a@1", [*tokens, 99])[0] == [], "another version never sees it"
    longer = [*tokens, 1, 2, 3, 4]
    index.use([3])
    assert index.register(chain, longer, [7, 8, 9, 3]) == index.find("", [*longer, 5])[1]


def test_what_was_unused_longest_goes_first_and_ends_before_beginnings():
    index = PrefixIndex(1)
    for version, pages in (("a", [0, 1, 2]), ("b", [3])):
        index.use(pages)
        index.register(index.find(version, [])[1], [5, 6, 7][: len(pages)], pages)
    assert index.release([0, 1, 2]) == []
    assert index.release([3]) == []
    assert index.num_evictable == 4
    assert index.evict(1) == [2]
    index.use(index.find("a", [5, 6])[0])
    assert index.evict(9) == [1, 3]
    assert index.find("a", [5, 6, 7])[0] == [0]
    index.check_integrity()


def test_a_known_beginning_is_not_run_again_and_gives_the_same_logits():
    cache = make_cache()
    tokens = random_tokens(19, 1)
    first = cache.open(tokens.tolist())
    assert first.length == 0
    hidden = run(cache, first, tokens, tokens.tolist())
    second = cache.open(tokens.tolist())
    assert second.length == 16
    assert second.pages == first.pages[:4]
    torch.testing.assert_close(run(cache, second, tokens[16:]), hidden[16:], atol=1e-5, rtol=0)
    other = cache.open(tokens.tolist(), version="a@1")
    assert other.length == 0
    for sequence in (first, second, other):
        sequence.close()
    cache.check_integrity()
    assert cache.num_available == cache.pool.num_pages
    assert cache.prefixes.num_evictable == 4, "the full blocks stay until somebody needs their pages"


def test_pages_of_beginnings_that_nobody_uses_are_had_when_needed():
    cache = make_cache(num_pages=6)
    tokens = random_tokens(16, 1)
    sequence = cache.open(tokens.tolist())
    run(cache, sequence, tokens, tokens.tolist())
    sequence.close()
    assert (cache.pool.num_free, cache.num_available) == (2, 6)
    other = cache.open(random_tokens(20, 2).tolist())
    assert other.num_pages_missing(20) == 5
    run(cache, other, random_tokens(20, 2))
    assert cache.open(tokens.tolist()).length == 4, "what was left of it"
    cache.check_integrity()


def test_a_request_that_does_not_fit_takes_nothing():
    cache = make_cache(num_pages=3)
    sequence = cache.open([1] * 20)
    with pytest.raises(BudgetError, match="5 pages asked for, 3 are available"):
        extend(sequence, torch.ones(20, dtype=torch.int64))
    assert cache.num_available == 3
    assert sequence.pages == []


@pytest.mark.parametrize("family", [*FAMILIES, "mistral-sliding"])
def test_paged_sequences_equal_transformers_in_chunks_and_decoding(family):
    model, cache = make_model(family), make_cache(family=family)
    first, second = random_tokens(21, 1), random_tokens(14, 2)
    a, b = cache.open(first.tolist()), cache.open(second.tolist())
    got = {id(a): [], id(b): []}
    for chunk_a, chunk_b in [(7, 3), (6, 1), (1, 4), (1, 1), (5, 1), (1, 4)]:
        steps = [(a, first, chunk_a), (b, second, chunk_b)]
        spans = [extend(seq, tokens[seq.length : seq.length + chunk]) for seq, tokens, chunk in steps]
        rows = logits(cache.backbone, forward(cache.backbone, spans)).split([chunk_a, chunk_b])
        for (seq, _, chunk), ours in zip(steps, rows, strict=True):
            seq.commit(chunk)
            got[id(seq)].append(ours)
        cache.check_integrity()
    for seq, tokens in ((a, first), (b, second)):
        with torch.no_grad():
            theirs = model(tokens[None]).logits[0]
        torch.testing.assert_close(torch.cat(got[id(seq)]), theirs, atol=1e-4, rtol=0)


def test_paged_and_contiguous_caches_give_exactly_the_same():
    cache = make_cache()
    tokens = random_tokens(18, 3)
    paged, plain = cache.open(tokens.tolist()), CachedSequence(cache.backbone, 18)
    for start, end in ((0, 9), (9, 10), (10, 18)):
        ours = run(cache, paged, tokens[start:end])
        assert torch.equal(ours, forward(cache.backbone, [plain.extend(tokens[start:end])]))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**20))
def test_a_storm_of_requests_conserves_pages_and_never_mixes_them_up(seed):
    """Arrivals with shared beginnings under two versions, decoding, ends and preemptions; every hidden row as if
    alone."""
    rng, cache = random.Random(seed), make_cache(num_pages=14)
    bases = [random_tokens(12, base) for base in range(2)]
    live = []
    for _ in range(25):
        if rng.random() < 0.4 and len(live) < 4:
            tokens = torch.cat(
                [rng.choice(bases)[: rng.randint(1, 12)], random_tokens(rng.randint(1, 3), rng.randint(0, 99))]
            )
            live.append((cache.open(tokens.tolist(), version=rng.choice(["", "a@1"])), tokens))
        if live and rng.random() < 0.25:
            live.pop(rng.randrange(len(live)))[0].close()
        for index, (sequence, tokens) in enumerate(live):
            if sequence.length == len(tokens):
                tokens = torch.cat([tokens, random_tokens(1, rng.randint(0, 99))])
                live[index] = sequence, tokens
            count = rng.randint(1, len(tokens) - sequence.length)
            if sequence.num_pages_missing(count) > cache.num_available:
                sequence.close()
                live[index] = cache.open(tokens.tolist()), tokens
                continue
            start = sequence.length
            hidden = run(cache, sequence, tokens[start : start + count], tokens[: start + count].tolist())
            alone = CachedSequence(cache.backbone, start + count)
            expected = forward(cache.backbone, [alone.extend(tokens[: start + count])])[start:]
            torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
        cache.check_integrity()
    for sequence, _ in live:
        sequence.close()
    assert cache.num_available == cache.pool.num_pages


# -- activations --------------------------------------------------------------------


def test_groups_lie_aligned_in_runs_and_do_not_overlap():
    pool = make_pool(8, 128)
    memory = PooledMemory(pool)
    shapes = {"a": ((3, 5), torch.float32), "b": ((7,), torch.uint8), "c": ((2, 2), torch.bfloat16)}
    assert group_bytes(shapes) == 64 + 64 + 64
    group = memory.take(shapes)
    assert {name: (tuple(t.shape), t.dtype) for name, t in group.items()} == shapes
    for value, tensor in enumerate(group.values(), 1):
        tensor.fill_(value)
    assert [int(tensor.flatten()[0]) for tensor in group.values()] == [1, 2, 3]
    assert pool.num_free == 6
    with pytest.raises(BudgetError, match="8 neighbouring pages asked for; 6 are free, 6 of them side by side"):
        memory.take({"d": ((1024,), torch.uint8)})
    memory.give_back(group)
    assert (pool.num_free, group) == (8, {})


def test_a_pass_in_pages_gives_the_same_gradients_and_its_pages_back():
    adapter = make_adapter(make_backbone("llama"))
    programs, pack = training_programs(adapter), make_pack(random_sequences((9, 4, 7)))
    plain = TrainingPass(adapter, programs, pack)
    run_alone(plain, forward_rows=8, backward_rows=6)
    pool = make_pool(300, 256)
    paged = TrainingPass(adapter, programs, pack, memory=PooledMemory(pool))
    assert pool.num_pages_by_owner().keys() == {"activations"}
    run_alone(paged, forward_rows=8, backward_rows=6)
    assert worst_error(paged.gradients, plain.gradients) == 0
    assert pool.num_free == 300
    pool.check_integrity()


def test_a_pass_that_does_not_fit_takes_nothing_and_one_that_is_dropped_gives_all_back():
    adapter = make_adapter(make_backbone("llama"))
    programs, pack = training_programs(adapter), make_pack(random_sequences((9, 4, 7)))
    small = make_pool(100, 256)
    with pytest.raises(BudgetError, match="neighbouring pages"):
        TrainingPass(adapter, programs, pack, memory=PooledMemory(small))
    assert small.num_free == 100
    pool = make_pool(300, 256)
    dropped = TrainingPass(adapter, programs, pack, memory=PooledMemory(pool))
    dropped.finish_window(forward(adapter.backbone, [dropped.next_window(20)]))
    dropped.run_loss(20)
    dropped.next_tasklet(5).run(3)
    dropped.release()
    assert pool.num_free == 300


def test_what_was_dropped_never_touches_pages_that_are_no_longer_its_own():
    adapter = make_adapter(make_backbone("llama"))
    pool = make_pool(300, 256)
    training = TrainingPass(
        adapter, training_programs(adapter), make_pack(random_sequences((9,))), memory=PooledMemory(pool)
    )
    window = training.next_window(9)
    training.finish_window(forward(adapter.backbone, [window]))
    training.run_loss(9)
    tasklet = training.next_tasklet(9)
    tasklet.run(4)
    training.release()
    before = pool.storage.clone()
    for attempt in (
        tasklet.run,
        lambda: training.next_tasklet(9),
        lambda: training.run_loss(9),
        lambda: forward(adapter.backbone, [window]),
    ):
        with pytest.raises(AssertionError):
            attempt()
    assert torch.equal(pool.storage, before)
    cache = make_cache()
    sequence = cache.open([1, 2, 3])
    span = extend(sequence, torch.tensor([1, 2, 3]))
    sequence.close()
    with pytest.raises(AssertionError, match="the sequence was closed"):
        forward(cache.backbone, [span])


def test_any_failure_while_a_pass_is_made_gives_its_pages_back(monkeypatch):
    adapter, pool = make_adapter(make_backbone("llama")), make_pool(300, 256)
    memory, taken = PooledMemory(pool), []

    def take(shapes):
        if len(taken) == 2:
            raise torch.OutOfMemoryError("no more")
        taken.append(PooledMemory.take(memory, shapes))
        return taken[-1]

    monkeypatch.setattr(memory, "take", take)
    with pytest.raises(torch.OutOfMemoryError):
        TrainingPass(adapter, training_programs(adapter), make_pack(random_sequences((9,))), memory=memory)
    assert pool.num_free == 300


def test_a_job_gets_the_pages_of_beginnings_that_nobody_uses():
    cache = make_cache(num_pages=60)
    for seed in range(20):
        tokens = random_tokens(16, seed)
        sequence = cache.open(tokens.tolist())
        run(cache, sequence, tokens, tokens.tolist())
        sequence.close()
    assert cache.pool.num_free == 0
    memory = PooledMemory(cache.pool, cache.evict)
    group = memory.take({"a": ((40 * cache.pool.page_bytes,), torch.uint8)})
    cache.check_integrity()
    memory.give_back(group)
    with pytest.raises(BudgetError, match="side by side"):
        memory.take({"a": ((61 * cache.pool.page_bytes,), torch.uint8)})
    empty = memory.take({"a": ((0, 5), torch.float32)})
    assert empty["a"].shape == (0, 5)
    memory.give_back(empty)
    assert cache.num_available == 60


def test_requests_and_a_job_share_one_pool():
    cache = make_cache(num_pages=200)
    adapter = make_adapter(cache.backbone)
    programs, pack = training_programs(adapter), make_pack(random_sequences((9, 4)))
    expected = TrainingPass(adapter, programs, pack)
    run_alone(expected, forward_rows=20, backward_rows=20)
    training = TrainingPass(adapter, programs, pack, memory=PooledMemory(cache.pool))
    tokens = random_tokens(10, 1)
    sequence = cache.open(tokens.tolist())
    hidden = forward(cache.backbone, [extend(sequence, tokens), training.next_window(20)])
    sequence.commit(10)
    training.finish_window(hidden[10:])
    training.run_loss(20)
    assert set(cache.pool.num_pages_by_owner()) == {"kv", "activations"}
    while not training.done:
        training.next_tasklet(5).run()
        run(cache, sequence, random_tokens(1, 2))
        cache.check_integrity()
    assert worst_error(training.gradients, expected.gradients) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_sequences_of_all_lengths_decode_together_as_each_does_alone(dtype, tolerance):
    """Pages come with whatever was in them, and rows with any adapter."""
    cache = make_cache(num_pages=60, dtype=dtype)
    cache.pages.fill_(torch.nan)
    adapters = [make_adapter(cache.backbone, seed=seed).bypasses() for seed in (1, 2)]
    bypasses = [None, adapters[0], None, adapters[1], adapters[0]]
    lengths, last = (30, 3, 9, 4, 1), torch.tensor([7])
    sequences, expected = [], []
    for length, own in zip(lengths, bypasses, strict=True):
        tokens = random_tokens(length, length)
        plain, paged = CachedSequence(cache.backbone, length + 1, own), cache.open([])
        paged.reserve(length)
        forward(cache.backbone, [plain.extend(tokens)])
        forward(cache.backbone, [paged.rows(tokens, own)])
        paged.commit(length)
        paged.reserve(9)
        sequences.append(paged)
        expected.append(forward(cache.backbone, [plain.extend(last)]))
    together = [seq.rows(last, own) for seq, own in zip(sequences, bypasses, strict=True)]
    torch.testing.assert_close(forward(cache.backbone, together), torch.cat(expected), atol=tolerance, rtol=tolerance)
