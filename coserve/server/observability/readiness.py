"""Readiness of the engine: it has made a step lately, or makes one now for a probe request."""

import asyncio
import time
from contextlib import suppress

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import AddRequest
from coserve.engine_client.access import EngineAccess
from coserve.errors import CoserveError, EngineGoneError
from coserve.protocol.messages import Ready, StepReport


class Readiness:
    """An `EngineListener` that tells whether the engine makes steps."""

    def __init__(self, link: EngineAccess, *, lately_s: float = 10.0, proof_s: float = 5.0) -> None:
        """Listen to an engine.

        Args:
            link: The engine.
            lately_s: Maximum age of a step that proves readiness.
            proof_s: Time within which a probe request must cause a step.
        """
        self._link, self._lately_s, self._proof_s = link, lately_s, proof_s
        self._stepped_s = float("-inf")
        self._proof: asyncio.Task[None] | None = None

    async def require(self) -> None:
        """Return if the engine makes steps; concurrent callers share one probe request.

        Raises:
            EngineGoneError: It does not.
        """
        self._link.require_alive()
        if self._has_stepped():
            return
        if self._proof is None or self._proof.done():
            self._proof = asyncio.create_task(self._make_step())
        with suppress(TimeoutError):
            # Other callers may wait for the same probe after this one gives up.
            await asyncio.wait_for(asyncio.shield(self._proof), self._proof_s)
        if not self._has_stepped():
            raise EngineGoneError(
                f"the engine was asked for a step and made none within {self._proof_s:g} s"
            )

    def _has_stepped(self) -> bool:
        return time.monotonic() - self._stepped_s < self._lately_s

    async def _make_step(self) -> None:
        request = AddRequest(
            id="proof",
            prompt=[0],
            params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            arrival_s=time.monotonic(),
        )
        with suppress(CoserveError):  # an engine that is gone has made no step
            stream = self._link.open([request])
            try:
                async for _ in stream.batches():
                    pass
            finally:
                self._link.close(stream)

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        self._stepped_s = float("-inf")

    def engine_reported(self, report: StepReport) -> None:
        if report.steps or report.chunks:
            self._stepped_s = time.monotonic()
