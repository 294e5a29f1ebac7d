"""Compiled grammars of a device. The engine decides which are kept: it opens and closes them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock, stack_size
from typing import TYPE_CHECKING

from coserve.devices.grammars.checker import GrammarChecker
from coserve.devices.grammars.grammar import MAX_STATES, Grammar
from coserve.devices.grammars.matching import GrammarCompiler, Matcher, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Grammars that are compiled at once.
_NUM_COMPILING = 2
# A call in the sandbox has 1 MiB, and is refused if that is too little: what was safe there is safe
# here, with a margin. Without this, threads have what `ulimit -s` says (2 MiB where that is
# "unlimited"). Pages of a stack that are not used take no memory.
_STACK_BYTES = 16 << 20
_starting = Lock()


class DeviceGrammars:
    """Grammars that are compiled once, on threads with a large stack, after they have passed a
    sandbox.
    """

    def __init__(self, *, compiles: bool = True) -> None:
        """Begin without a vocabulary.

        Args:
            compiles: False on a rank that chooses no tokens, which keeps neither vocabulary nor
                grammars.
        """
        self._compiles = compiles
        self._compiler: GrammarCompiler | None = None
        self._checker: GrammarChecker | None = None
        # By grammar: the compiled form, and its bytes.
        self._compiled: dict[Grammar, tuple[LLMatcher, int]] = {}
        self._lock = Lock()
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None

    def use(self, vocabulary: Vocabulary) -> None:
        """Carry out `SetVocabulary`."""
        if not self._compiles:
            return
        if self._compiler is None or self._compiler.vocabulary != vocabulary:
            compiler = GrammarCompiler(vocabulary)
            with self._lock:
                before, self._checker = self._checker, GrammarChecker(vocabulary)
                self._compiler = compiler
                self._compiled.clear()
                if self._threads is None:
                    # One computes masks, since forward passes use the other cores.
                    self._threads = (
                        _deep_threads(1, "masks"),
                        _deep_threads(_NUM_COMPILING, "grammars"),
                    )
            if before is not None:
                before.close()

    def open(self, grammar: Grammar, max_states: int = MAX_STATES) -> int:
        """Carry out `OpenGrammar`, and return the bytes that the grammar takes before texts follow
        it.
        """
        if not self._compiles:
            return 0
        return self._opened(grammar, max_states)[1]

    def close(self, grammar: Grammar) -> None:
        """Carry out `CloseGrammar`."""
        with self._lock:
            self._compiled.pop(grammar, None)
            checker = None if self._compiled else self._checker
        if checker is not None:
            checker.rest()

    def matcher(
        self, grammar: Grammar, output: Sequence[int], vocab_size: int | None = None
    ) -> Matcher:
        """Return a matcher for a sequence with these tokens.

        Args:
            grammar: A grammar that is open, or is compiled now.
            output: Tokens of the sequence so far.
            vocab_size: Number of tokens of its model, if that may be less than the vocabulary's.
        """
        compiled, _ = self._opened(grammar, MAX_STATES)
        assert self._compiler is not None and self._threads is not None
        num_tokens = len(self._compiler.vocabulary.pieces)
        return Matcher(compiled.deep_copy(), num_tokens, self._threads[0], output, vocab_size)

    def shutdown(self) -> None:
        """End the threads and the sandbox."""
        for threads in self._threads or ():
            threads.shutdown(wait=False, cancel_futures=True)
        if self._checker is not None:
            self._checker.close()

    def _opened(self, grammar: Grammar, max_states: int) -> "tuple[LLMatcher, int]":
        """Return the compiled form of a grammar and its bytes; compile it if need be."""
        with self._lock:
            compiler, checker = self._compiler, self._checker
            assert compiler is not None and checker is not None and self._threads is not None, (
                "no vocabulary was set"
            )
            _, compiling = self._threads
            if (opened := self._compiled.get(grammar)) is not None:
                return opened
        num_bytes = grammar.num_bytes or checker.measure(grammar)
        compiled = compiling.submit(compiler.compile, grammar, max_states=max_states).result()
        with self._lock:
            return self._compiled.setdefault(grammar, (compiled, num_bytes))


def _deep_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads, which have started, have a stack of `_STACK_BYTES`."""
    executor = ThreadPoolExecutor(number, name)
    started = Barrier(number + 1)
    with _starting:  # the size is one for the process
        before = stack_size(_STACK_BYTES)
        try:
            for _ in range(number):
                executor.submit(started.wait)
            started.wait()
        finally:
            stack_size(before)
    return executor
