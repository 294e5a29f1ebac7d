"""Trial of grammars before they are sent to the engine, so that a too costly one is refused at
once.

A sandbox compiles each grammar in a process of its own (`coserve.devices.grammars.checker`), a few
at a time; tenants share its places. Outcomes are remembered.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from coserve.devices.grammars.checker import GrammarChecker
from coserve.devices.grammars.grammar import Grammar
from coserve.devices.grammars.matching import Vocabulary
from coserve.engine_client.access import EngineAccess
from coserve.errors import RequestError, SandboxError
from coserve.server.bodies.texts import check_texts
from coserve.server.errors import ApiError
from coserve.server.tenancy.fair_turns import FairTurns, TooManyWaitError
from coserve.server.text.prompts import Prompts

# Grammars that are tried at once. One tenant has one place fewer at most.
_NUM_PLACES = 3
# Grammars of one tenant that may wait, and for how long.
_MAX_WAITING, _MAX_WAIT_S = 64, 30.0
# Outcomes that are remembered, and the characters of their grammars together.
_MAX_REMEMBERED, _MAX_CHARACTERS = 1024, 8 << 20
# The sandbox's process ends when there has been nothing to try for this long.
_REST_S = 60.0

# The bytes that a grammar takes compiled, or why it is refused.
_Outcome = int | str


class GrammarChecks:
    """Trial of grammars in a sandbox; it belongs to the event loop."""

    def __init__(self, prompts: Prompts, link: EngineAccess) -> None:
        self._prompts, self._link = prompts, link
        self._threads = ThreadPoolExecutor(_NUM_PLACES, "grammars")
        self._turns = FairTurns(_NUM_PLACES, max_waiting=_MAX_WAITING, max_wait_s=_MAX_WAIT_S)
        self._checker: asyncio.Task[GrammarChecker] | None = None
        self._outcomes: OrderedDict[Grammar, _Outcome] = OrderedDict()
        self._num_characters = 0
        self._trying: dict[tuple[str, Grammar], asyncio.Task[None]] = {}
        self._rest: asyncio.TimerHandle | None = None

    @property
    def sandbox_pid(self) -> int | None:
        """Process id of the sandbox; None if it is not running."""
        checker = self._checker
        is_made = (
            checker is not None
            and checker.done()
            and not checker.cancelled()
            and checker.exception() is None
        )
        return checker.result().pid if checker is not None and is_made else None

    async def check(self, grammar: Grammar, *, tenant: str, param: str) -> Grammar:
        """Return a grammar with its measured bytes, and give the engine the vocabulary that it
        needs.

        Args:
            grammar: The grammar.
            tenant: Tenant that asks.
            param: Field of the body that has the grammar.

        Raises:
            ApiError: It cannot be used (400); or the tenant has too many trials waiting, or the
                machine cannot try it now (503).
        """
        check_texts(grammar.text, param=param)
        try:
            checker = await self._checker_of_model()
        except RequestError as error:
            raise ApiError(str(error), param=param, code="unsupported_parameter") from None
        # A loop: the outcome may be forgotten again before this task continues.
        while (outcome := self._outcomes.get(grammar)) is None:
            await self._tried(grammar, checker, tenant)
        if isinstance(outcome, str):
            raise ApiError(outcome, param=param)
        self._outcomes.move_to_end(grammar)
        # At every use, since a fresh engine has no vocabulary; otherwise nothing is sent.
        self._link.use_vocabulary(checker.vocabulary.pieces, checker.vocabulary.special)
        return replace(grammar, num_bytes=outcome)

    def close(self) -> None:
        """End the threads and the sandbox."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._rest is not None:
            self._rest.cancel()
        if self.sandbox_pid is not None and self._checker is not None:
            self._checker.result().close()

    async def _tried(self, grammar: Grammar, checker: GrammarChecker, tenant: str) -> None:
        """Wait for an outcome; requests of the tenant with the same grammar share one trial."""
        key = tenant, grammar
        if key not in self._trying:
            self._trying[key] = asyncio.ensure_future(self._try(grammar, checker, tenant))
            self._trying[key].add_done_callback(lambda task: self._end_trying(key, task))
        # Other requests may wait for this trial: it goes on if this client leaves.
        await asyncio.shield(self._trying[key])

    def _end_trying(self, key: tuple[str, Grammar], task: asyncio.Task[None]) -> None:
        """Forget a trial, and retrieve its error, for which nobody may wait any more."""
        del self._trying[key]
        if not task.cancelled():
            task.exception()

    async def _try(self, grammar: Grammar, checker: GrammarChecker, tenant: str) -> None:
        try:
            async with self._turns.turn(tenant):
                if grammar in self._outcomes:  # another tenant had the same one
                    return
                measuring = asyncio.get_running_loop().run_in_executor(
                    self._threads, checker.measure, grammar
                )
                outcome: _Outcome = await measuring
        except RequestError as error:
            outcome = str(error)
        except (SandboxError, TooManyWaitError):
            raise _busy() from None
        self._remember(grammar, outcome)
        self._rest_later(checker)

    def _remember(self, grammar: Grammar, outcome: _Outcome) -> None:
        self._outcomes[grammar] = outcome
        self._num_characters += len(grammar.text)
        while len(self._outcomes) > _MAX_REMEMBERED or self._num_characters > _MAX_CHARACTERS:
            forgotten, _ = self._outcomes.popitem(last=False)
            self._num_characters -= len(forgotten.text)

    def _rest_later(self, checker: GrammarChecker) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._rest = asyncio.get_running_loop().call_later(_REST_S, checker.rest)

    async def _checker_of_model(self) -> GrammarChecker:
        """Return the checker, which is made for the first grammar.

        Raises:
            RequestError: There is no tokenizer, or the library is missing.
        """
        if self._checker is None:
            self._checker = asyncio.ensure_future(self._make_checker())
        try:
            return await asyncio.shield(self._checker)
        except RequestError:
            self._checker = None
            raise

    async def _make_checker(self) -> GrammarChecker:
        pieces, special = await self._prompts.vocabulary(self._link.require_ready().vocab_size)
        vocabulary = Vocabulary(pieces, special, ())
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, GrammarChecker, vocabulary
        )


def _busy() -> ApiError:
    return ApiError(
        "the grammar cannot be tried now: too many are being compiled, or the machine is short of "
        "memory; try again in a few seconds",
        status=503,
        kind="server_error",
        headers={"Retry-After": "2"},
    )
