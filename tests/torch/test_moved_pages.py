"""Pages of requests move aside for packs that need neighbours: the same tokens, prefixes and
adapters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import (
    BLOCK,
    assert_nothing_is_held,
    drain,
    examples_of,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
    watched,
)
from lengths import long_but
from safetensors.torch import load_file

from coserve.adapters import LoraConfig
from coserve.devices.messages.commands import Command, Reply
from coserve.devices.messages.pages import MovePages
from coserve.engine.engine import Engine
from coserve.engine.outbox import Event
from coserve.engine.page_manager import PageManager
from coserve.engine.request import Chunk
from coserve.errors import BudgetError, DeviceMemoryError
from coserve.memory.pages.kv_cache import PagedSequence
from coserve.memory.pages.prefix_index import PrefixOwner
from coserve.tuning.config import OptimizerConfig, TuningConfig

LORA = LoraConfig(r=3, target_modules="all-linear")
CONFIG = TuningConfig(
    batch_size=4, max_pack_tokens=40, seed=4, optimizer=OptimizerConfig(learning_rate=1e-2)
)
LENGTHS = (9, 11, 10, 10)


def tune(engine: Engine) -> str:
    return engine.submit_examples(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine")


def learned(engine: Engine, directory: Path) -> dict[str, Any]:
    engine.save_adapter("mine", directory)
    return load_file(directory / "adapter_model.safetensors")


def moves(engine: Engine) -> list[MovePages]:
    return [command for command in watched(engine).commands if isinstance(command, MovePages)]


def interrupt_moves(engine: Engine, when: str, times: int = 2) -> list[Command]:
    """The first calls of the device that move pages are interrupted, before or after it has done
    that; or it has no memory for them. Returns those calls, to be.
    """
    inner, calls = watched(engine).inner, list[Command]()
    execute, left = inner.execute, iter([True] * times)

    def call(command: Command) -> Reply:
        interrupted = isinstance(command, MovePages) and next(left, False)
        if interrupted:
            calls.append(command)
        if interrupted and when == "no memory":
            raise DeviceMemoryError("none")
        if interrupted and when == "before":
            raise KeyboardInterrupt
        reply = execute(command)
        if interrupted:
            raise KeyboardInterrupt
        return reply

    inner.execute = call  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize(
    "interrupted", long_but("", "after", of=["", "before", "after", "no memory"])
)
@pytest.mark.parametrize("num_host_pages", long_but(200, of=[0, 200]))
def test_requests_continue_in_other_pages_beside_the_pack_that_has_theirs(
    num_host_pages, interrupted, tmp_path
):
    """Every second of the requests that grew side by side is over: what is left of them lies in
    every second page."""
    alone = make_engine()
    alone.tune(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine")
    engine = make_engine(num_pages=190, num_host_pages=num_host_pages)
    calls = interrupt_moves(engine, interrupted) if interrupted else []
    lengths = [60, 120] * 3
    prompts = prompts_of([5] * len(lengths))
    names = [
        engine.add(prompt, greedy(length)) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    events: list[Event] = []
    while engine.stats().num_running + engine.stats().num_waiting > 3:
        events += engine.step()
    tune(engine)
    num_interrupted = 0
    while engine.has_work:
        try:
            events += engine.step()
        except KeyboardInterrupt:
            num_interrupted += 1
        engine.check_integrity()
    assert calls or moves(engine), "nothing was in the way"
    assert num_interrupted == (0 if interrupted == "no memory" else len(calls))
    if not num_interrupted:
        assert engine.stats().num_pages_moved == sum(
            len(command.pages) for command in moves(engine)
        )
    expected = [
        expected_tokens(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    assert tokens_by_request(events) == dict(zip(names, expected, strict=True))
    ours, theirs = learned(engine, tmp_path / "ours"), learned(alone, tmp_path / "theirs")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-6
    # What lies elsewhere now is found as the beginning of later requests.
    for prompt, length, tokens in zip(prompts[1::2], lengths[1::2], expected[1::2], strict=True):
        engine.add([*prompt, *tokens[:60]], greedy(length - 60))
        later = drain(engine)
        (found,) = tokens_by_request(later).values()
        assert found == tokens[60:]
        num_known = max(event.num_cached_tokens for event in later if isinstance(event, Chunk))
        assert num_known == 64 or interrupted == "no memory", "which costs prefixes"
    assert_nothing_is_held(engine)


def scattered(broker: PageManager, num_sequences: int, num_blocks: int) -> list[PagedSequence]:
    """Sequences whose pages lie in turns."""
    sequences = [broker.cache.open((), num_blocks * BLOCK) for _ in range(num_sequences)]
    for block in range(1, num_blocks + 1):
        for sequence in sequences:
            sequence.reserve(block * BLOCK)
    return sequences


def held(sequences: list[PagedSequence]) -> set[int]:
    return {page for sequence in sequences for page in sequence.pages}


def follow(broker: PageManager, sequences: list[PagedSequence]) -> list[dict[int, int]]:
    """Sequences go where the broker moves their pages; what it moved."""
    found: list[dict[int, int]] = []

    def move(targets: Mapping[int, int]) -> bool:
        found.append(dict(targets))
        for sequence in sequences:
            sequence.move(targets)
        return True

    broker.on_move = move
    return found


@pytest.mark.parametrize("known", [True, False], ids=["prefixes", "free"])
@pytest.mark.parametrize("sizes", [[8, 4], [1, 2], [4, 8], [2, 2, 2, 2, 2]])
def test_a_pack_gets_its_runs_where_every_second_page_is_a_request_s(known, sizes):
    broker = PageManager(
        num_pages=40, page_bytes=64, block_tokens=BLOCK, send=list[object]().append
    )
    sequences = scattered(broker, 4, 10)
    for number, sequence in enumerate(sequences if known else ()):
        sequence.commit(10 * BLOCK, [number] * (10 * BLOCK), PrefixOwner(""))
    for sequence in sequences[::2]:
        sequence.close()
    left = sequences[1::2]
    with pytest.raises(BudgetError, match="side by side"):
        broker.take_pack(sizes, 0)
    sequences[0] = broker.cache.open((), BLOCK)
    sequences[0].reserve(BLOCK)
    sequences[0].close()  # something has changed, so that it may be asked again
    keys = {page: broker.cache.prefixes._key.get(page) for page in held(left)}
    moved = follow(broker, left)
    pack = broker.take_pack(sizes, 0)
    (targets,) = moved
    assert [len(run) for run in pack.runs if run is not None] == sizes
    assert len(targets) == broker.num_moved <= -(-sum(sizes) // 2) + 1, (
        "no more than lay in its way"
    )
    assert {targets.get(page, page): key for page, key in keys.items()} == {
        page: broker.cache.prefixes._key.get(page) for page in held(left)
    }
    broker.check_integrity(held(left), [pack])
    for sequence in left:
        sequence.close()
    pack.release()
    broker.check_integrity(set(), [])


def test_pages_of_requests_stay_where_prefixes_alone_leave_room():
    broker = PageManager(
        num_pages=40, page_bytes=64, block_tokens=BLOCK, send=list[object]().append
    )
    one, other = (broker.cache.open((), 20 * BLOCK) for _ in range(2))
    for number, sequence in enumerate((one, other)):
        sequence.reserve(20 * BLOCK)
        sequence.commit(20 * BLOCK, [number] * (20 * BLOCK), PrefixOwner(""))
    one.close()
    moved = follow(broker, [other])
    pack = broker.take_pack([8, 8], 0)
    assert moved == []
    broker.check_integrity(held([other]), [pack])


@pytest.mark.parametrize("sizes", [[2], [17]], ids=["packs are in the way", "there are too few"])
def test_nothing_moves_where_that_would_not_help(sizes):
    broker = PageManager(
        num_pages=40, page_bytes=64, block_tokens=BLOCK, send=list[object]().append
    )
    packs = [broker.take_pack([1], 0) for _ in range(40)]
    for pack in packs[::2]:
        pack.release()
    sequences = scattered(broker, 2, 2)
    moved = follow(broker, sequences)
    with pytest.raises(BudgetError, match="side by side"):
        broker.take_pack(sizes, 0)
    assert moved == []
    broker.check_integrity(held(sequences), packs[1::2])


def test_a_device_that_has_no_memory_to_move_pages_leaves_all_as_it_was():
    broker = PageManager(
        num_pages=40, page_bytes=64, block_tokens=BLOCK, send=list[object]().append
    )
    sequences = scattered(broker, 4, 10)
    for sequence in sequences[::2]:
        sequence.close()
    left, asked = sequences[1::2], []
    before = held(left)

    def refuse(targets: Mapping[int, int]) -> bool:
        asked.append(targets)
        return False

    broker.on_move = refuse
    for _ in range(3):
        with pytest.raises(BudgetError, match="side by side"):
            broker.take_pack([8], 0)
    assert len(asked) == 1, "nothing has changed since"
    assert held(left) == before and not broker.num_moved
    broker.check_integrity(before, [])
