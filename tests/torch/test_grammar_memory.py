"""Compiled grammars that the engine keeps: counted in bytes, bounded for all and for each tenant,
and given back."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from coserve.devices.grammars.grammar import MAX_STATES, STATE_BYTES, TOO_MANY_STATES, Grammar
from coserve.devices.grammars.matching import Vocabulary
from coserve.devices.messages.commands import (
    CloseGrammar,
    Command,
    GrammarOpened,
    OpenGrammar,
    Reply,
)
from coserve.engine.grammars import MAX_BYTES, MAX_TENANT_BYTES, MIN_STATES, Grammars
from coserve.errors import GrammarMemoryError, RequestError

MB = 1 << 20
# Bytes by which a grammar may grow that has found much room.
GROWTH = MAX_STATES * STATE_BYTES


class ByteCounter:
    """A device that keeps grammars whose bytes they say themselves."""

    def __init__(self) -> None:
        self.opened: dict[Grammar, int] = {}  # the states that each may make
        self.needed_states = 0
        self.while_compiling: Callable[[], None] | None = None  # called once

    def execute(self, command: Command) -> Reply:
        if isinstance(command, OpenGrammar):
            call, self.while_compiling = self.while_compiling, None
            if call is not None:
                call()
            if self.needed_states > command.max_states:
                raise RequestError(f"the grammar cannot be used: lexer error: {TOO_MANY_STATES}")
            self.opened[command.grammar] = command.max_states
            return GrammarOpened(command.grammar.num_bytes)
        if isinstance(command, CloseGrammar):
            del self.opened[command.grammar]
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


def test_what_no_request_follows_makes_room_the_longest_unused_first(
    device: ByteCounter, grammars: Grammars
):
    some = [grammar(number, 40 * MB) for number in range(5)]
    for each in some[:4]:
        grammars.prepare(each, "a")
    grammars.prepare(some[0], "a")  # used again
    grammars.prepare(some[4], "a")
    assert list(device.opened) == [some[0], some[2], some[3], some[4]]
    assert grammars.num_bytes == 4 * (40 * MB + GROWTH) <= MAX_TENANT_BYTES


def test_a_tenant_takes_no_room_of_others(device: ByteCounter, grammars: Grammars):
    grammars.prepare(grammar(0, 60 * MB), "b")
    for number in range(1, 20):
        grammars.prepare(grammar(number, 30 * MB), "a")
    assert grammars.num_bytes_by_tenant() == {"a": 5 * (30 * MB + GROWTH), "b": 60 * MB + GROWTH}
    for number in range(20, 40):
        grammars.prepare(grammar(number, 50 * MB), "c")
    assert grammars.num_bytes <= MAX_BYTES
    assert set(grammars.num_bytes_by_tenant()) == {"a", "b", "c"}
    assert len(device.opened) == len(grammars)


def test_grammars_under_way_stay_and_what_finds_no_room_beside_them_is_refused(
    device: ByteCounter, grammars: Grammars
):
    for number in range(2):
        grammars.open(f"request {number}", grammar(number, 100 * MB), "a")
    with pytest.raises(GrammarMemoryError, match="this tenant"):
        grammars.open("request 2", grammar(2, 100 * MB), "a")
    assert len(device.opened) == 2
    grammars.open("request 3", grammar(3, 100 * MB), "b")
    grammars.close("request 0")
    grammars.open("request 2", grammar(2, 100 * MB), "a")
    assert list(device.opened) == [grammar(number, 100 * MB) for number in (1, 3, 2)]


def test_what_a_grammar_may_grow_by_counts_from_its_beginning(
    device: ByteCounter, grammars: Grammars
):
    grammars.open("request", grammar(0, MB), "a")
    assert grammars.num_bytes == MB + GROWTH
    assert list(device.opened.values()) == [MAX_STATES]


def test_the_fuller_it_is_the_fewer_states_a_grammar_gets(device: ByteCounter, grammars: Grammars):
    """Many grammars are followed at once, and can never take more than the bound, however long
    their texts are."""
    while True:
        number = len(device.opened)
        try:
            grammars.open(f"request {number}", grammar(number, MB // 4), "a")
        except GrammarMemoryError:
            break
    states = list(device.opened.values())
    assert number == len(states) >= 30
    assert (
        states == sorted(states, reverse=True)
        and states[0] == MAX_STATES
        and states[-1] == MIN_STATES
    )
    assert (
        grammars.num_bytes
        == sum(MB // 4 + each * STATE_BYTES for each in states)
        <= MAX_TENANT_BYTES
    )
    grammars.open("of another", grammar(number, MB // 4), "b")
    assert list(device.opened.values())[-1] == MAX_STATES
    for each in range(number):
        grammars.close(f"request {each}")
    assert set(device.opened.values()) == {
        MAX_STATES
    }  # the others may get more states the next time
    grammars.open("again", grammar(number - 1, MB // 4), "a")
    assert list(device.opened.values())[-1] == MAX_STATES


def test_what_needs_more_states_than_there_is_room_for_is_told_to_try_again(
    device: ByteCounter, grammars: Grammars
):
    needs = MAX_STATES // 2
    device.needed_states = needs
    grammars.open("request", grammar(0, 100 * MB), "a")
    grammars.open("other request", grammar(1, 100 * MB), "a")
    with pytest.raises(GrammarMemoryError, match="states that there is room for"):
        grammars.open("third request", grammar(2, MB), "a")
    assert len(grammars) == len(device.opened) == 2
    device.needed_states = MAX_STATES + 1
    with pytest.raises(RequestError, match="too many states"):
        grammars.open("first request of another", grammar(3, MB), "b")


def test_a_grammar_that_two_threads_compile_at_once_stays_as_long_as_a_request_follows_it(
    device: ByteCounter, grammars: Grammars
):
    asked = grammar(0, 60 * MB)
    device.while_compiling = lambda: grammars.open("request", asked, "a")
    grammars.prepare(asked, "a")
    for number in range(1, 5):
        grammars.prepare(grammar(number, 60 * MB), "a")
    assert asked in grammars
    grammars.close("request")
    for number in range(5, 8):
        grammars.prepare(grammar(number, 60 * MB), "a")
    assert asked not in grammars, "no request follows it any more"


def test_an_engine_at_rest_keeps_none(device: ByteCounter, grammars: Grammars):
    assert not grammars.rest()
    grammars.open("request", grammar(0, MB), "a")
    grammars.prepare(grammar(1, MB), "a")
    assert grammars.rest()
    assert not device.opened and grammars.num_bytes == 0 and not grammars.num_bytes_by_tenant()
