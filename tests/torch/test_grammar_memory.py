"""Compiled grammars that the engine keeps: counted in bytes, bounded for all and for each tenant, and given back."""

from dataclasses import replace

import pytest

from coserve.devices.grammar import Grammar
from coserve.devices.matching import Vocabulary
from coserve.devices.messages import CloseGrammar, Command, GrammarOpened, OpenGrammar, Reply
from coserve.engine import grammars as module
from coserve.engine.grammars import MAX_BYTES, MAX_TENANT_BYTES, Grammars
from coserve.errors import GrammarMemoryError

MB = 1 << 20


class ByteCounter:
    """A device that keeps grammars whose bytes they say themselves."""

    def __init__(self) -> None:
        self.opened: list[Grammar] = []

    def execute(self, command: Command) -> Reply:
        if isinstance(command, OpenGrammar):
            self.opened.append(command.grammar)
            return GrammarOpened(command.grammar.num_bytes)
        if isinstance(command, CloseGrammar):
            self.opened.remove(command.grammar)
        return None


@pytest.fixture
def device() -> ByteCounter:
    return ByteCounter()


@pytest.fixture
def grammars(device: ByteCounter) -> Grammars:
    made = Grammars(device, frozenset(), lambda: ((b"a",), ()))  # type: ignore[arg-type]
    made.vocabulary = Vocabulary((b"a",), (), ())
    return made


def grammar(number: int, num_bytes: int) -> Grammar:
    return replace(Grammar.choice([f"text {number}"]), num_bytes=num_bytes)


def test_what_no_request_follows_makes_room_the_longest_unused_first(device: ByteCounter, grammars: Grammars):
    some = [grammar(number, 30 * MB) for number in range(5)]
    for each in some[:4]:
        grammars.prepare(each, "a")
    grammars.prepare(some[0], "a")  # used again
    grammars.prepare(some[4], "a")
    assert device.opened == [some[0], some[2], some[3], some[4]]
    assert grammars.num_bytes == 120 * MB <= MAX_TENANT_BYTES


def test_a_tenant_takes_no_room_of_others(device: ByteCounter, grammars: Grammars):
    grammars.prepare(grammar(0, 60 * MB), "b")
    for number in range(1, 20):
        grammars.prepare(grammar(number, 30 * MB), "a")
    assert grammars.num_bytes_by_tenant() == {"a": 120 * MB, "b": 60 * MB}
    for number in range(20, 40):
        grammars.prepare(grammar(number, 50 * MB), "c")
    assert grammars.num_bytes <= MAX_BYTES
    assert set(grammars.num_bytes_by_tenant()) == {"a", "b", "c"}
    assert len(device.opened) == len(grammars)


def test_grammars_under_way_stay_and_what_finds_no_room_beside_them_is_refused(device: ByteCounter, grammars: Grammars):
    for number in range(2):
        grammars.open(f"request {number}", grammar(number, 60 * MB), "a")
    with pytest.raises(GrammarMemoryError, match="this tenant"):
        grammars.open("request 2", grammar(2, 60 * MB), "a")
    assert len(device.opened) == 2
    grammars.open("request 3", grammar(3, 60 * MB), "b")
    grammars.close("request 0", num_tokens=0)
    grammars.open("request 2", grammar(2, 60 * MB), "a")
    assert grammars.num_bytes_by_tenant() == {"a": 120 * MB, "b": 60 * MB}


def test_what_grows_with_its_texts_is_counted(grammars: Grammars):
    asked = grammar(0, MB)
    grammars.open("request", asked, "a")
    grammars.close("request", num_tokens=100)
    assert MB < grammars.num_bytes < 4 * MB
    grammars.open("request", asked, "a")
    grammars.close("request", num_tokens=1_000_000)
    assert grammars.num_bytes == MB + module._MAX_GROWTH_BYTES


def test_an_engine_at_rest_keeps_none(device: ByteCounter, grammars: Grammars):
    assert not grammars.rest()
    grammars.open("request", grammar(0, MB), "a")
    grammars.prepare(grammar(1, MB), "a")
    assert grammars.rest()
    assert device.opened == [] and grammars.num_bytes == 0 and not grammars.num_bytes_by_tenant()
