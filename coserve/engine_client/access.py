"""The engine as a server sees it, wherever it is: one beside it, or many on the nodes of a
cluster.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from coserve.engine.commands import AdapterRef, AddRequest
from coserve.engine_client.link import EngineListener
from coserve.engine_client.streams import RequestStream
from coserve.jobs.messages import JobEngine
from coserve.protocol.messages import Ready, StartProgress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineAccess(JobEngine, Protocol):
    """What `EngineLink` does for one engine, and `ClusterLink` for many."""

    # -- questions ------------------------------------------------------------------

    @property
    def ready(self) -> Ready | None:
        """What the engine said of itself; None while there is none."""
        ...

    @property
    def start_progress(self) -> StartProgress | None:
        """Return the stage of an engine that is starting; None if that is not known, or none is
        starting.
        """
        ...

    @property
    def num_open(self) -> int:
        """Requests that are not over."""
        ...

    @property
    def is_silent(self) -> bool:
        """Whether no step loop comes round."""
        ...

    @property
    def jobs_at_death(self) -> tuple[str, ...] | None:
        """The jobs that the last engine may have died of; None if that is not known."""
        ...

    @property
    def jobs_lost(self) -> frozenset[str] | None:
        """The jobs that the last engine had that has died; None: all, since there was no other."""
        ...

    @property
    def num_nodes(self) -> int:
        """Among which a job can be divided now."""
        ...

    def require_ready(self) -> Ready:
        """EngineGoneError if there is no engine to ask now."""
        ...

    def require_alive(self) -> None:
        """EngineGoneError if there is no engine to ask now, or if it stands still."""
        ...

    def listen(self, listener: EngineListener) -> None:
        """Tell it what happens, and that the engine is ready if it is already."""
        ...

    # -- life -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep it running until `stop`; ModelError if it cannot start as it was asked."""
        ...

    async def stop(self) -> None:
        """End it, with checkpoints of all jobs if it still answers; open requests end with an
        error.
        """
        ...

    def close_to_requests(self) -> None:
        """Refuse what comes from now on."""
        ...

    def fail_open_requests(self, reason: str) -> None:
        """End every open request with an error."""
        ...

    # -- requests and adapters --------------------------------------------------------

    def open(
        self,
        requests: list[AddRequest],
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        shown_tokens: tuple[str, ...] = (),
    ) -> RequestStream:
        """Have requests answered; to be closed in any case. tokenizer: for their text.
        shown_tokens: see `TextStream`.

        Raises:
            EngineGoneError: there is no engine now. RequestError: stop strings without a tokenizer.
        """
        ...

    def close(self, stream: RequestStream) -> None:
        """Its chunks are no longer wanted: what has not ended is cancelled."""
        ...

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """What tokens stand for; before requests with grammars. EngineGoneError."""
        ...

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Have it on the device; AdapterError if it cannot be read."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """No new request finds it."""
        ...
