"""Compiled grammars of requests that the device keeps, bounded in bytes.

A grammar is compiled ahead of its request, held while the request runs, and kept for the next one
as far as there is room: for all tenants, and for each of them. `rest` gives all back.

Its bytes are measured when it is tried in a sandbox. Then it grows with the texts that follow it:
its lexer makes states as they are needed, and keeps them. That cannot be measured beside other
work. So each grammar gets a number of states for which there is room, and is counted from the
beginning as if it had made them; where there is little room, it gets fewer. A request that needs
more states than its grammar has ends with an error.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

from coserve.devices.base import Device
from coserve.devices.grammars.grammar import MAX_STATES, STATE_BYTES, TOO_MANY_STATES, Grammar
from coserve.devices.grammars.matching import Vocabulary
from coserve.devices.messages.commands import (
    CloseGrammar,
    GrammarOpened,
    OpenGrammar,
    SetVocabulary,
)
from coserve.errors import CoserveError, GrammarMemoryError, RequestError

# Makes the pieces and the special tokens of a `Vocabulary`.
FindPieces = Callable[[], tuple[Sequence[bytes], Sequence[int]]]

# Bytes of compiled grammars of all tenants, and of each.
MAX_BYTES, MAX_TENANT_BYTES = 512 << 20, 256 << 20
# The part of the room left that the states of one grammar may take, and the states that each gets
# at least.
_PART_OF_ROOM, MIN_STATES = 8, 500


@dataclass(kw_only=True)
class _Compiled:
    """A grammar that the device has compiled."""

    own_bytes: int
    """Measured bytes."""
    max_states: int
    """Number of states that its lexer may make."""
    tenant: str
    """Tenant whose request it was compiled for last, and as whose it counts."""
    requests: set[str] = field(default_factory=set)
    """Requests under way that follow it."""

    @property
    def num_bytes(self) -> int:
        """Return the measured bytes, with those by which it may grow."""
        return self.own_bytes + self.max_states * STATE_BYTES


class Grammars:
    """The compiled grammars of one device. Any thread may call `prepare`."""

    def __init__(
        self, device: Device, end_tokens: frozenset[int], find_pieces: FindPieces | None
    ) -> None:
        """Begin without grammars. find_pieces: called with the first grammar, unless the vocabulary
        was set; None if there is no tokenizer.
        """
        self._device, self._end_tokens, self._find_pieces = device, end_tokens, find_pieces
        self.vocabulary: Vocabulary | None = None
        # The one that was used last is last.
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._of_request: dict[str, Grammar] = {}
        self._lock = Lock()

    # -- questions --------------------------------------------------------------------

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._compiled

    def __len__(self) -> int:
        return len(self._compiled)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all compiled grammars."""
        return sum(self.num_bytes_by_tenant().values())

    def num_bytes_by_tenant(self) -> Mapping[str, int]:
        """Return the bytes of compiled grammars by tenant."""
        with self._lock:
            return self._by_tenant()

    # -- verbs ------------------------------------------------------------------------

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """Set what tokens stand for.

        Raises:
            RequestError: the device has no library for grammars.
        """
        vocabulary = Vocabulary(tuple(pieces), tuple(special), tuple(sorted(self._end_tokens)))
        self._device.execute(SetVocabulary(vocabulary))
        self.vocabulary = vocabulary

    def prepare(self, grammar: Grammar, tenant: str, request: str = "") -> None:
        """Have a grammar compiled and counted, so that no step has to wait for it.

        Args:
            request: Request that follows it, for which it is held from then on; "" for none.

        Raises:
            RequestError: the grammar cannot be used.
            GrammarMemoryError: grammars under way take all the room.
        """
        with self._lock:
            if self._use(grammar, tenant, request):
                return
            max_states = self._states_for(tenant)
        own_bytes = self._opened_bytes(grammar, max_states)
        with self._lock:
            if self._use(grammar, tenant, request):  # another thread has compiled it meanwhile
                return
            self._compiled[grammar] = _Compiled(
                own_bytes=own_bytes, max_states=max_states, tenant=tenant
            )
            evicted = self._evicted(MAX_BYTES, MAX_TENANT_BYTES, kept=grammar)
            too_much = self._excess(tenant)
            if too_much:
                del self._compiled[grammar]
                evicted.append(grammar)
            else:
                self._use(grammar, tenant, request)
        self._close(evicted)
        if too_much:
            raise GrammarMemoryError(f"{too_much}; try again when some of them are done")

    def open(self, request: str, grammar: Grammar, tenant: str) -> None:
        """Hold a grammar for a request that follows it. Raises as `prepare` does."""
        if self.vocabulary is None:
            if self._find_pieces is None:
                raise RequestError("a grammar needs a tokenizer, and this model has none")
            self.use_vocabulary(*self._find_pieces())
        self.prepare(grammar, tenant, request)

    def close(self, request: str) -> None:
        """Let go of the grammar that a request has followed, if any."""
        if not self._of_request:
            return
        evicted = []
        with self._lock:
            if (grammar := self._of_request.pop(request, None)) is not None:
                compiled = self._compiled[grammar]
                compiled.requests.discard(request)
                if not compiled.requests and compiled.max_states < MAX_STATES:
                    # The next request may find more room, and so more states.
                    del self._compiled[grammar]
                    evicted.append(grammar)
        self._close(evicted)

    def rest(self) -> bool:
        """Give all grammars back, as no request runs now. Returns whether there were any."""
        with self._lock:
            for each in self._compiled.values():
                each.requests.clear()  # left by a request whose opening was interrupted
            self._of_request.clear()
            evicted = self._evicted(0, 0)
        self._close(evicted)
        return bool(evicted)

    def _use(self, grammar: Grammar, tenant: str, request: str) -> bool:
        """Mark a grammar as used now, and hold it for the request, if any. Returns False if it is
        not compiled.
        """
        if (known := self._compiled.get(grammar)) is None:
            return False
        known.tenant = tenant
        self._compiled.move_to_end(grammar)
        if request:
            known.requests.add(request)
            self._of_request[request] = grammar
        return True

    # -- bounds -----------------------------------------------------------------------

    def _states_for(self, tenant: str) -> int:
        """Return how many states a further grammar of a tenant may make, beside those that requests
        follow.
        """
        held: Counter[str] = Counter()
        for each in self._compiled.values():
            if each.requests:
                held[each.tenant] += each.num_bytes
        room = min(MAX_BYTES - held.total(), MAX_TENANT_BYTES - held[tenant])
        return min(MAX_STATES, max(MIN_STATES, room // _PART_OF_ROOM // STATE_BYTES))

    def _opened_bytes(self, grammar: Grammar, max_states: int) -> int:
        """Have the device compile a grammar, and return its bytes. Raises as `prepare` does."""
        try:
            opened = self._device.execute(OpenGrammar(grammar, max_states))
        except RequestError as error:
            if max_states < MAX_STATES and TOO_MANY_STATES in str(error):
                raise GrammarMemoryError(
                    f"the grammar needs more than the {max_states} states that there is room for "
                    f"beside those of "
                    "requests under way; try again when some of them are done"
                ) from None
            raise
        assert isinstance(opened, GrammarOpened)
        return opened.num_bytes

    def _by_tenant(self) -> Counter[str]:
        num_bytes: Counter[str] = Counter()
        for each in self._compiled.values():
            num_bytes[each.tenant] += each.num_bytes
        return num_bytes

    def _evicted(
        self, most: int, most_of_tenant: int, kept: Grammar | None = None
    ) -> list[Grammar]:
        """Forget grammars that no request follows, the ones unused longest first, until the others
        are within bounds; return those that were forgotten.
        """
        evicted = []
        by_tenant = self._by_tenant()
        free = [
            grammar
            for grammar, each in self._compiled.items()
            if not each.requests and grammar != kept
        ]
        for grammar in free:
            tenant = self._compiled[grammar].tenant
            # Room for all comes from the tenant that has most.
            is_due = by_tenant[tenant] > most_of_tenant or (
                by_tenant.total() > most and by_tenant[tenant] == max(by_tenant.values())
            )
            if is_due:
                by_tenant[tenant] -= self._compiled.pop(grammar).num_bytes
                evicted.append(grammar)
        for grammar in free:
            if by_tenant.total() > most and grammar in self._compiled:
                each = self._compiled.pop(grammar)
                by_tenant[each.tenant] -= each.num_bytes
                evicted.append(grammar)
        return evicted

    def _excess(self, tenant: str) -> str:
        """Return which bound the grammars exceed though nothing more can be evicted; "" if they are
        within bounds.
        """
        by_tenant = self._by_tenant()
        if by_tenant[tenant] > MAX_TENANT_BYTES:
            return (
                "compiled grammars of this tenant's requests would take more than "
                f"{MAX_TENANT_BYTES >> 20} MB"
            )
        if by_tenant.total() > MAX_BYTES:
            return (
                f"compiled grammars of requests under way would take more than {MAX_BYTES >> 20} MB"
            )
        return ""

    def _close(self, grammars: Sequence[Grammar]) -> None:
        for grammar in grammars:
            with suppress(CoserveError):  # a device that is gone keeps none
                self._device.execute(CloseGrammar(grammar))
