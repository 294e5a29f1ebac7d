"""Setup of this process's part in the handover of prompts.

The role "prefill" computes prompts for decode instances, which connect to its socket; "decode" has
its prompts computed by the instance at that socket; "both" has no other instance. Pages go through
files next to the socket of this process and its server, so that they are removed with it, however
it ends.
"""

from functools import partial
from pathlib import Path

from coserve.engine.engine import Engine
from coserve.errors import ModelError
from coserve.handover.base import HandoverEnd, NoHandover
from coserve.handover.decode import DecodeEnd
from coserve.handover.prefill import PrefillEnd
from coserve.handover.transport import Listener, connect
from coserve.protocol.messages import EngineSettings
from coserve.protocol.run_directory import make_pages_directory


def open_handover(engine: Engine, settings: EngineSettings) -> HandoverEnd:
    """Open this instance's part in the handover.

    Raises:
        CoserveError: The socket cannot be used, or the model cannot be handed over.
        OSError: There is no room for files.
    """
    if settings.role == "both":
        return NoHandover()
    if engine.device.info.num_state_pages:
        raise ModelError(
            f"--role {settings.role} is not supported for {engine.device.info.model}: what its "
            f"gated delta layers "
            "carry from row to row is not handed over; leave --role out"
        )
    assert settings.prefill_socket is not None
    path = Path(settings.prefill_socket)
    if settings.role == "prefill":
        listener = Listener(path)
        return PrefillEnd(
            engine, listener.accept, listens_on=(listener.waits_on,), close=listener.close
        )
    directory = make_pages_directory(settings.address)
    return DecodeEnd(
        engine, partial(connect, path), directory, min_tokens=settings.prefill_min_tokens
    )
