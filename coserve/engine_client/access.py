"""Interface of the engine as a server uses it, wherever it is: one beside it, or many on the nodes
of a cluster.
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
    """The interface that `EngineLink` implements for one engine, and `ClusterLink` for many."""

    # -- questions ------------------------------------------------------------------

    @property
    def ready(self) -> Ready | None:
        """Report of the engine that is ready; None while there is none."""
        ...

    @property
    def start_progress(self) -> StartProgress | None:
        """Stage of an engine that is starting; None if that is not known, or none is starting."""
        ...

    @property
    def num_open(self) -> int:
        """Number of requests that are not over."""
        ...

    @property
    def is_silent(self) -> bool:
        """Return whether no step loop makes progress."""
        ...

    @property
    def jobs_at_death(self) -> tuple[str, ...] | None:
        """The jobs that may have killed the last engine; None if that is not known."""
        ...

    @property
    def jobs_lost(self) -> frozenset[str] | None:
        """The jobs of the last engine that died; None: all, since there was no other engine."""
        ...

    @property
    def num_nodes(self) -> int:
        """Number of nodes among which a job can be divided now."""
        ...

    def require_ready(self) -> Ready:
        """Return the report of the engine that is ready.

        Raises:
            EngineGoneError: There is no engine now.
        """
        ...

    def require_alive(self) -> None:
        """Check that an engine is ready and makes progress.

        Raises:
            EngineGoneError: There is no engine now, or it hangs.
        """
        ...

    def listen(self, listener: EngineListener) -> None:
        """Notify a listener of what happens, and at once of an engine that is ready."""
        ...

    # -- life -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the engine running until `stop`.

        Raises:
            ModelError: It cannot start with these settings.
        """
        ...

    async def stop(self) -> None:
        """Stop the engine, with checkpoints of all jobs if it still answers; open requests end with
        an error.
        """
        ...

    def close_to_requests(self) -> None:
        """Refuse all further requests."""
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
        """Send requests to the engine.

        Args:
            requests: Requests that belong together.
            tokenizer: Makes text of their tokens; None: there is no text.
            shown_tokens: See `TextStream`.

        Returns:
            Their stream, which must be closed in any case.

        Raises:
            EngineGoneError: There is no engine now.
            RequestError: There are stop strings and no tokenizer.
        """
        ...

    def close(self, stream: RequestStream) -> None:
        """Close a stream; its unfinished requests are cancelled."""
        ...

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """Send the engine the text of its tokens; must come before requests with grammars.

        Raises:
            EngineGoneError: There is no engine now.
        """
        ...

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Load an adapter onto the device.

        Raises:
            AdapterError: It cannot be read.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; no new request finds it."""
        ...
