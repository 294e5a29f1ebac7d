"""Parts of the server that the page shows."""

from dataclasses import dataclass

from coserve.engine_client.access import EngineAccess
from coserve.jobs.manager import JobManager
from coserve.server.adapters.served import ServedModels
from coserve.server.observability.status import StatusBoard
from coserve.server.page.examples import Previews
from coserve.server.stored.opened import Opened
from coserve.server.text.prompts import Prompts


@dataclass(frozen=True, kw_only=True)
class PageContext:
    """Parts of the server that the page shows."""

    engine: EngineAccess
    """The engine."""
    models: ServedModels
    """Models that requests can name."""
    prompts: Prompts
    """Tokenizer of the base model, with its chat template."""
    board: StatusBoard
    """Rates, memory and finished requests."""
    jobs: Opened[JobManager]
    """Job manager; the page shows no jobs until it is there."""
    previews: Previews
    """Reader of training files for previews."""
