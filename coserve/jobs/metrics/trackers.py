"""Trackers that follow jobs' metrics outside the store: TensorBoard's event files, and Weights &
Biases if a job asks for it.

They run on a thread of their own and delay nothing; errors are logged and change no job. A job that
cannot be followed at Weights & Biases gets an event with the reason. After an engine's death, steps
are repeated: TensorBoard discards the first ones, Weights & Biases keeps them.
"""

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from coserve.engine.jobs.events import JobEvent
from coserve.errors import JobError
from coserve.home import make_private
from coserve.jobs.records import JobRecord, job_event
from coserve.jobs.settings import JobSettings
from coserve.jobs.sql.store import Store

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

_log = logging.getLogger(__name__)

_ENDS = ("succeeded", "failed", "cancelled")
# Subfolder of a job's folder with the event files of `tensorboard --logdir`.
TENSORBOARD = "tensorboard"
# Interval of flushes, each of which waits for the disk.
_FLUSH_S = 2.0
# Longest wait at the end of a server for a service that may be gone.
_CLOSE_S = 20.0
_MAX_MESSAGE = 500
_numbers = count()  # distinguish files that start within one second


class Tracker(Protocol):
    """A receiver of one job's metrics, in the order of steps."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values that were measured after a step."""

    def close(self, status: str) -> None:
        """End the tracking.

        Args:
            status: Status of the job; "queued" if it will continue.
        """


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_MESSAGE] or type(error).__name__


def _has_wandb_key(wandb: Any) -> bool:
    """Return whether the package has credentials; without them, it would prompt on the server's
    terminal.
    """
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # versions without this option
        return bool(wandb.api.api_key)


def has_wandb() -> bool:
    """Return whether the package wandb is installed."""
    return importlib.util.find_spec("wandb") is not None


class Trackers:
    """Trackers of all jobs. Calls return at once."""

    def __init__(self, store: Store, directory: Path) -> None:
        """Start the thread of the trackers.

        Args:
            store: Store of the jobs.
            directory: Directory of the jobs' folders.
        """
        self._store, self._directory = store, directory
        self._open: dict[str, list[Tracker]] = {}
        self._told = set[tuple[str, str]]()  # warnings that jobs have
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon, so that the end of the process does not wait for it.
        self._thread = Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()

    def take(self, events: Sequence[JobEvent]) -> None:
        """Pass on an engine's reports."""
        relevant = [event for event in events if event.kind in ("step", "evaluation", *_ENDS)]
        if relevant:
            self._calls.put(partial(self._take, relevant))

    def rest(self) -> None:
        """Close the trackers after an engine's death: its jobs will report again from where they
        resume.
        """
        self._calls.put(self._close_all)

    def close(self, limit_s: float = _CLOSE_S) -> None:
        """Write everything that has arrived, and stop. Blocks for at most `limit_s`, so that a
        service that does not answer does not keep the server alive.
        """
        self._calls.put(self._close_all)
        self._calls.put(None)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            _log.warning(
                "metrics of jobs were not all written after %g s: the rest is lost",
                limit_s,
            )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._guarded(call)

    def _guarded(self, do: Callable[..., None], *arguments: Any) -> None:
        try:
            do(*arguments)
        except Exception:
            _log.exception("metrics of jobs could not be written to a tracker")

    def _take(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            if event.kind in _ENDS:
                self._close(event.job, event.kind)
                continue
            if event.job not in self._open:
                self._open[event.job] = self._trackers(event)
            for tracker in self._open[event.job]:
                self._guarded(tracker.add, event.step, _values(event))

    def _trackers(self, event: JobEvent) -> list[Tracker]:
        with self._store.read() as transaction:
            job = transaction.any_job(event.job)
        if job is None:
            return []
        folder = self._directory / job.id
        trackers: list[Tracker] = [TensorboardTracker(folder / TENSORBOARD, first_step=event.step)]
        for integration in JobSettings.from_data(job.settings).integrations:
            try:
                trackers.append(WandbTracker(job, integration["wandb"], folder))
            except Exception as error:  # the service is away, or its key is missing or wrong
                self._warn(
                    job, f"the job cannot be followed at Weights & Biases: {_one_line(error)}"
                )
        return trackers

    def _warn(self, job: JobRecord, message: str) -> None:
        """Log a warning, and add it to the job's events once."""
        _log.warning("job %s: %s", job.id, message)
        if (job.id, message) not in self._told:
            with self._store.write() as transaction:
                transaction.add_event(job_event(job, message, level="warn"))
            self._told.add((job.id, message))

    def _close(self, job: str, status: str) -> None:
        for tracker in self._open.pop(job, []):
            self._guarded(tracker.close, status)

    def _close_all(self) -> None:
        for job in list(self._open):
            self._close(job, "queued")


class TensorboardTracker:
    """A writer of event files that runs in the caller's thread.

    The writer of tensorboardX has a thread that ends at the first error, after which its callers
    wait for ever. Here values that cannot be written are dropped, with one warning per
    interruption, and a new file follows.
    """

    def __init__(self, directory: Path, *, first_step: int) -> None:
        """Open a file, which makes TensorBoard forget `first_step` and later steps of earlier
        files.
        """
        self._directory, self._fails = directory, False
        self._file: RecordWriter | None = None
        self._flushed_s = 0.0
        self._write(first_step, ())

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        now_s = time.time()
        self._write(
            step,
            [
                Event(wall_time=now_s, step=step, summary=scalar(name, value))
                for name, value in values.items()
            ],
        )

    def close(self, status: str) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _write(self, step: int, events: "Sequence[Event]") -> None:
        """Write events; a new file starts with `step`."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter

        path = None
        try:
            if self._file is None:
                make_private(self._directory)
                path = (
                    self._directory
                    / f"events.out.tfevents.{int(time.time())}.{os.getpid()}.{next(_numbers)}"
                )
                self._file = RecordWriter(str(path))
                start = SessionLog(status=SessionLog.START)
                # TensorBoard discards later steps of earlier files at a START event.
                head = (
                    Event(step=step, file_version="brain.Event:2"),
                    Event(step=step, session_log=start),
                )
                events = (*head, *events)
            for event in events:
                self._file.write(event.SerializeToString())
            if path is not None or time.monotonic() - self._flushed_s >= _FLUSH_S:
                self._file.flush()
                self._flushed_s = time.monotonic()
        except OSError as error:
            if not self._fails:
                why = error.strerror or error
                _log.warning(
                    "%s: metrics of step %d and later ones are left out: %s",
                    self._directory,
                    step,
                    why,
                )
            self._fails = True
            self.close("")
            if path is not None:
                path.unlink(missing_ok=True)
        else:
            self._fails = False


class WandbTracker:
    """A run of Weights & Biases; the server's environment has its key, or WANDB_MODE=offline."""

    def __init__(self, job: JobRecord, settings: Mapping[str, Any], directory: Path) -> None:
        """Start the run.

        Raises:
            JobError: The server has no key.
            Exception: The service rejects the run.
        """
        import wandb

        if os.environ.get("WANDB_MODE", "online") in ("online", "run") and not _has_wandb_key(
            wandb
        ):
            raise JobError(
                "the server has no key; start it with WANDB_API_KEY, log in with `wandb login`, or "
                "set "
                "WANDB_MODE=offline"
            )
        self._run = wandb.init(
            project=settings["project"],
            name=settings.get("name") or job.name,
            entity=settings.get("entity"),
            tags=settings.get("tags"),
            id=job.id,
            resume="allow",
            dir=str(directory),
            config={"model": job.model, "seed": job.seed, **job.settings},
            reinit="create_new",
            # The output of this process does not belong to the run.
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


def _values(event: JobEvent) -> dict[str, float]:
    """Return an event's values by OpenAI's names of metrics, below train/ and valid/."""
    side = "train" if event.kind == "step" else "valid"
    values = {
        f"{side}/loss": event.loss,
        f"{side}/mean_token_accuracy": event.token_accuracy,
        "train/learning_rate": event.learning_rate if event.kind == "step" else None,
        "train/gradient_norm": event.norm if event.kind == "step" else None,
        **{f"{side}/{name}": value for name, value in event.metrics.items()},
    }
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and isfinite(value)
    }
