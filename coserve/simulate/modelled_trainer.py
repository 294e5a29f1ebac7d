"""A job on a modelled device."""

from coserve.adapters.base import AdapterConfig
from coserve.devices.messages.jobs import BeginPack, TrainerOpened
from coserve.scheduling.plan import JobInfo, JobProgress
from coserve.tuning.cursor import Cursor


class ModelledTrainer:
    """The counts of a job, and the position of its pack."""

    def __init__(self, config: AdapterConfig, opened: TrainerOpened) -> None:
        self.config, self.opened = config, opened
        self._info = JobInfo(counts=opened.counts)
        self.has_moments = False
        self._num_moment_pages = 0
        self._cursor: Cursor | None = None
        self._view: JobProgress | None = None

    @property
    def cursor(self) -> Cursor:
        """Return the position of its pack."""
        assert self._cursor is not None, "it has no pack"
        return self._cursor

    @property
    def view(self) -> JobProgress:
        """Return the job as the latency model reads it."""
        assert self._view is not None, "it has no pack"
        return self._view

    def begin(self, command: BeginPack) -> None:
        """Begin a pack."""
        lengths = [len(tokens) for tokens, _ in command.sequences]
        num_rows = sum(lengths)
        # The first token of a sequence is no row's target.
        num_trained = sum(
            [trained.count(True) - trained[:1].count(True) for _, trained in command.sequences]
        )
        num_parts = 0 if command.evaluate else self.opened.trained_parts
        self._cursor = Cursor(num_rows=num_rows, num_trained=num_trained, num_parts=num_parts)
        mean_context_len = sum([length * (length + 1) / 2 for length in lengths]) / num_rows
        self._view = JobProgress(
            id=command.job,
            info=self._info,
            phase="forward",
            num_rows=num_rows,
            mean_context_len=mean_context_len,
        )

    def place(self, num_pages: int) -> int:
        """Place its moments in as many pages (0: beside them). Returns the number of pages that are
        moved.
        """
        moved = max(num_pages, self._num_moment_pages) if num_pages != self._num_moment_pages else 0
        self._num_moment_pages = num_pages
        return moved if self.has_moments else 0

    def drop(self) -> None:
        """Drop its pack."""
        self._cursor = self._view = None
