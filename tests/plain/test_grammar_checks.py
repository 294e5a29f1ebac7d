"""Grammars that are tried before the engine hears of them: which outcomes are remembered."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any, cast

import pytest
from crashing_tasks import Obedient

from coserve.devices.grammars.checker import GrammarChecker
from coserve.devices.grammars.grammar import Grammar
from coserve.devices.grammars.matching import Vocabulary
from coserve.errors import SandboxError
from coserve.sandbox.sandbox import Sandbox
from coserve.server.errors import ApiError
from coserve.server.generation import grammar_checks
from coserve.server.generation.grammar_checks import GrammarChecks

GRAMMAR = Grammar.regex("a+")


class Deeds(GrammarChecker):
    """Does one deed after the other in a real sandbox, in place of compiling."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *deeds: str) -> None:
        self.vocabulary = Vocabulary((b"a",), (), ())
        self._sandbox = Sandbox(Obedient, "ab")
        self.num_calls = 0
        run, left = self._sandbox.run, list(deeds)

        def do(_: Any) -> Any:
            self.num_calls += 1
            return run((left.pop(0), 0))

        monkeypatch.setattr(self._sandbox, "run", do)


class Link:
    """Stands for the engine, which needs nothing here but a size."""

    vocab_size = 1

    def require_ready(self) -> "Link":
        return self

    def use_vocabulary(self, pieces: Any, special: Any) -> None:
        pass

    async def vocabulary(self, vocab_size: int) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        return (b"a",), ()


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    link = cast(Any, Link())
    made = GrammarChecks(link, link)
    yield made
    made.close()


def use(monkeypatch: pytest.MonkeyPatch, *deeds: str) -> Deeds:
    checker = Deeds(monkeypatch, *deeds)
    monkeypatch.setattr(grammar_checks, "GrammarChecker", lambda vocabulary: checker)
    return checker


async def status_of(checks: GrammarChecks) -> int:
    with pytest.raises(ApiError) as error:
        await checks.check(GRAMMAR, tenant="ann", param="guided_regex")
    return error.value.status


@pytest.mark.parametrize("deed", ["be_killed", "be_unstarted"])
def test_a_trial_that_the_machine_ended_is_tried_again(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch, deed: str
):
    async def ask() -> list[int]:
        return [await status_of(checks), await status_of(checks), await status_of(checks)]

    checker = use(monkeypatch, deed, "fault")
    # The crash is the grammar's own, and is remembered.
    assert asyncio.run(ask()) == [503, 400, 400]
    assert checker.num_calls == 2


def test_a_trial_that_fails_when_nobody_waits_any_longer_is_no_error_of_the_server(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def leave() -> None:
        asked = asyncio.ensure_future(checks.check(GRAMMAR, tenant="ann", param="guided_regex"))
        while not checks._trying:
            await asyncio.sleep(0.01)
        asked.cancel()
        while checks._trying:
            await asyncio.sleep(0.01)
        gc.collect()

    use(monkeypatch, "be_killed")
    asyncio.run(leave())
    assert "never retrieved" not in caplog.text


def test_a_checker_says_nothing_of_a_grammar_that_the_machine_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    checker = Deeds(monkeypatch, "be_killed")
    with pytest.raises(SandboxError):
        checker.measure(GRAMMAR)
    checker.close()
