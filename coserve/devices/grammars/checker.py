"""Checks of grammars in a sandbox, before any process that others need compiles them, and their
size.
"""

from typing import Any, ClassVar

import msgspec

from coserve.devices.grammars.grammar import Grammar
from coserve.devices.grammars.matching import GrammarCompiler, Vocabulary, library
from coserve.errors import RequestError, SandboxError
from coserve.sandbox.sandbox import Sandbox, has_sandboxes
from coserve.sandbox.task import CallLimits, SandboxTask

# The stack is a sixteenth of that of the threads that compile in the engine (`device_grammars.py`).
LIMITS = CallLimits(memory_bytes=256 << 20, stack_bytes=1 << 20, cpu_s=5, wall_s=30.0)
# Of one compiled grammar.
MAX_BYTES = 64 << 20
_REASONS = {
    "crashed": (
        "it is nested too deeply, or refers to itself through too many steps, for the compiler's "
        "stack"
    ),
    "memory": f"it takes more than {LIMITS.memory_bytes >> 20} MB to compile",
    "time": f"it takes more than {LIMITS.cpu_s} s to compile",
}


class Verdict(msgspec.Struct, frozen=True):
    """Outcome of a grammar's check."""

    num_bytes: int = 0
    """Bytes that the compiled grammar takes; 0 if it is refused."""
    refused: str = ""
    """Why the grammar cannot be used; "" if it can."""


class CheckGrammar(SandboxTask):
    """SandboxTask of a sandbox that compiles a grammar and follows it for some tokens."""

    setup_type: ClassVar[Any] = Vocabulary
    """Type of what the sandbox's template is made with."""
    call_type: ClassVar[Any] = Grammar
    """Type of what each call gets."""
    reply_type: ClassVar[Any] = Verdict
    """Type of what each call returns."""

    def __init__(self, setup: Vocabulary) -> None:
        self._compiler = GrammarCompiler(setup)

    def run(self, call: Grammar) -> Verdict:
        try:
            return Verdict(num_bytes=self._compiler.measure(call))
        except RequestError as error:
            return Verdict(refused=str(error))


class GrammarChecker:
    """Checker of grammars of one vocabulary, for several threads at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Prepare a sandbox, which starts with the first check.

        Raises:
            RequestError: llguidance is not installed, or this system has no sandboxes.
        """
        library()
        if not has_sandboxes():
            raise RequestError(
                "structured output needs Linux: a grammar is first compiled in a process with "
                "limits on its memory, which no other system enforces"
            )
        self.vocabulary = vocabulary
        self._sandbox = Sandbox(CheckGrammar, vocabulary, LIMITS)

    @property
    def pid(self) -> int | None:
        """Return the process of the sandbox, if there is one now."""
        return self._sandbox.pid

    def measure(self, grammar: Grammar) -> int:
        """Return the bytes that a grammar takes compiled.

        Raises:
            RequestError: The grammar cannot be used, or compiling it would end this process or take
                too much.
            SandboxError: The machine is too busy for a verdict, or has no memory or threads to try
                the grammar; it may pass later.
        """
        try:
            verdict: Verdict = self._sandbox.run(grammar)
        except SandboxError as error:
            if error.failure not in _REASONS:
                raise
            reason = _REASONS[error.failure]
            raise RequestError(f"the grammar cannot be used: {reason}; make it smaller") from None
        if verdict.refused:
            raise RequestError(verdict.refused)
        if verdict.num_bytes > MAX_BYTES:
            raise RequestError(
                f"the grammar takes {verdict.num_bytes >> 20} MB when it is compiled; "
                f"{MAX_BYTES >> 20} MB are allowed"
            )
        return verdict.num_bytes

    def rest(self) -> None:
        """End the sandbox's process until it is needed again."""
        self._sandbox.rest()

    def close(self) -> None:
        """End the sandbox."""
        self._sandbox.close()
