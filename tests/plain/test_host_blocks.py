"""Slots on the host: a request has all that its blocks need or none, shares them, and gives all of
them back."""

from random import Random

import pytest

from coserve.memory.pages.host_blocks import HostBlocks

A, B, C, D = b"a", b"b", b"c", b"d"


def test_a_request_gets_a_slot_for_each_block_or_none():
    blocks = HostBlocks(3)
    assert blocks.want("first", [A, B])
    assert not blocks.want("second", [C, D]), (
        "the last blocks would go to the host, and the first be lost"
    )
    assert blocks.want("third", [A, D]), "one is there already"
    assert blocks.num_used == 3
    blocks.check_integrity(["first", "third"])


def test_blocks_are_found_once_they_were_stored_and_up_to_the_first_that_was_not():
    blocks = HostBlocks(3)
    blocks.want("first", [A, B, C])
    assert blocks.slots_of([A, B, C]) == []
    (c,) = blocks.store([D, C])
    (b,) = blocks.store([B])
    assert c[0] == 1 and b[0] == 0 and blocks.store([B, C]) == [], "copied once"
    assert blocks.slots_of([A, B, C]) == [] and blocks.slots_of([B, C]) == [b[1], c[1]]


def test_a_slot_is_free_when_nobody_wants_its_block():
    blocks = HostBlocks(2)
    blocks.want("first", [A, B])
    blocks.want("second", [A])
    blocks.store([A, B])
    blocks.release("first")
    assert blocks.num_used == 1 and blocks.slots_of([A]) and not blocks.slots_of([B])
    blocks.release("second")
    blocks.release("nobody")
    assert blocks.num_used == 0 and not blocks.slots_of([A])
    blocks.want("first", [A])
    with pytest.raises(AssertionError):
        blocks.check_integrity([])


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_in_any_order(seed):
    rng, blocks = Random(seed), HostBlocks(12)
    keys = [bytes([number]) for number in range(20)]
    wanted: dict[str, list[bytes]] = {}
    for number in range(500):
        if wanted and rng.random() < 0.4:
            blocks.release(owner := rng.choice(list(wanted)))
            del wanted[owner]
        elif rng.random() < 0.5:
            some = rng.sample(keys, rng.randint(1, 5))
            if blocks.want(str(number), some):
                wanted[str(number)] = some
        else:
            blocks.store(rng.sample(keys, 4))
        blocks.check_integrity(wanted)
        assert blocks.num_used == len({key for some in wanted.values() for key in some})
    for owner in wanted:
        blocks.release(owner)
    assert blocks.num_used == 0
