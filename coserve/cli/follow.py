"""Follows a fine-tuning job on a server until it is over: its progress, and what requests see meanwhile."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from coserve.cli.drawing import DIM, against, duration, progress_bar, sparkline
from coserve.errors import ServerError
from coserve.server.client import Client

OVER = ("succeeded", "failed", "cancelled")
_POLL_S = 0.5
# Where nobody looks, metrics come no more often than this.
_PLAIN_S = 5.0
_EVENTS_PER_CALL = 100
# Answers that say "later": a server that restarts its engine goes on with the job.
_PATIENCE_S = 120.0


@dataclass(kw_only=True)
class JobProgress:
    """What is known of a job, and of the server meanwhile; `take` adds to it."""

    job: dict[str, Any]
    status: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    step: int = 0
    num_steps: int | None = None
    validation_loss: float | None = None
    tokens_per_s: float | None = None
    _last_event: str | None = None

    @property
    def is_over(self) -> bool:
        return self.job["status"] in OVER

    @property
    def left_s(self) -> float | None:
        """Seconds to the estimated end, if there is one."""
        finish = self.job.get("estimated_finish")
        return None if finish is None or self.is_over else max(0.0, finish - time.time())

    def poll(self, client: Client) -> list[dict[str, Any]]:
        """Ask the server once. Returns the events that are new, oldest first."""
        self.job = client.get(f"/v1/fine_tuning/jobs/{self.job['id']}")
        new = list(events_after(client, self.job["id"], self._last_event))
        for event in new:
            self._last_event = event["id"]
            if event.get("type") == "metrics":
                self._measure(event.get("data") or {})
        self.status = client.get("/v1/status")
        return new

    def _measure(self, data: dict[str, Any]) -> None:
        self.step = data.get("step") or self.step
        self.num_steps = data.get("total_steps") or self.num_steps
        self.tokens_per_s = data.get("tokens_per_s") or self.tokens_per_s
        if data.get("train_loss") is not None:
            self.losses.append(data["train_loss"])
        if data.get("valid_loss") is not None:
            self.validation_loss = data["valid_loss"]

    def summary(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "job": self.job["id"],
            "status": self.job["status"],
            "fine_tuned_model": self.job.get("fine_tuned_model"),
            "trained_tokens": self.job.get("trained_tokens"),
            "steps": self.step,
            "train_loss": self.losses[-1] if self.losses else None,
            "valid_loss": self.validation_loss,
        }


def follow(client: Client, job: dict[str, Any], console: Console) -> JobProgress:
    """Show a job until it is over; KeyboardInterrupt leaves it as it is. On a terminal a view that moves, elsewhere
    a line for every event.

    Raises:
        ServerError: the server is gone, and does not come back.
    """
    progress = JobProgress(job=job)
    if not console.is_terminal:
        told_s = 0.0
        for events in _polls(client, progress):
            for event in events:
                is_metrics = event.get("type") == "metrics"
                if not is_metrics or time.monotonic() - told_s >= _PLAIN_S:
                    console.print(event_line(event), soft_wrap=True)
                    told_s = time.monotonic() if is_metrics else told_s
        return progress
    with Live(view(progress, console.width), console=console, refresh_per_second=4, transient=False) as live:
        for events in _polls(client, progress):
            for event in events:
                if event.get("type") != "metrics":
                    live.console.print(event_line(event))
            live.update(view(progress, console.width))
    return progress


def view(progress: JobProgress, width: int) -> RenderableType:
    """A few lines: the job, its loss, the requests."""
    job, requests = progress.job, progress.status.get("requests") or {}
    objectives = progress.status.get("objectives") or {}
    head = Text.assemble((job["status"], "bold"), "  ")
    if progress.num_steps:
        head.append_text(progress_bar(progress.step / progress.num_steps, max(10, min(40, width - 48))))
        head.append(f"  step {progress.step:,} of {progress.num_steps:,}")
    elif progress.step:
        head.append(f"step {progress.step:,}")
    if progress.left_s is not None:
        head.append(f"  {duration(progress.left_s)} left", style=DIM)
    lines = [head]
    if progress.losses:
        learning = Text.assemble("loss ", (f"{progress.losses[-1]:.4g}", "bold"), " ")
        learning.append_text(sparkline(progress.losses, max(10, min(40, width - 48))))
        if progress.validation_loss is not None:
            learning.append(f"  validation {progress.validation_loss:.4g}")
        if progress.tokens_per_s is not None:
            learning.append(f"  {progress.tokens_per_s:,.0f} tokens/s", style=DIM)
        lines.append(learning)
    if requests:
        meanwhile = Text.assemble("requests: ", f"{requests.get('running') or 0} running, p99 to first token ")
        meanwhile.append_text(against((requests.get("ttft_ms") or {}).get("p99"), objectives.get("ttft_ms")))
        meanwhile.append(", per token ")
        meanwhile.append_text(against((requests.get("tpot_ms") or {}).get("p99"), objectives.get("tpot_ms")))
        lines.append(meanwhile)
    return Group(*lines)


def _polls(client: Client, progress: JobProgress) -> Iterator[list[dict[str, Any]]]:
    """The new events of each poll, until the job is over; a server that is busy starting again is waited for."""
    gone_since_s: float | None = None
    while True:
        try:
            yield progress.poll(client)
            gone_since_s = None
        except ServerError as error:
            gone_since_s = gone_since_s or time.monotonic()
            if error.status not in (None, 503) or time.monotonic() - gone_since_s > _PATIENCE_S:
                raise
        if progress.is_over:
            return
        time.sleep(_POLL_S)


def events_after(client: Client, job_id: str, last: str | None) -> list[dict[str, Any]]:
    """Events newer than one, oldest first. The API lists the newest first, and pages to older ones."""
    found: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        page = client.get(f"/v1/fine_tuning/jobs/{job_id}/events", after=after, limit=_EVENTS_PER_CALL)
        for event in page["data"]:
            if event["id"] == last:
                return found[::-1]
            found.append(event)
        if not page.get("has_more") or not page["data"]:
            return found[::-1]
        after = page["data"][-1]["id"]


def event_line(event: dict[str, Any]) -> Text:
    """An event of a job."""
    moment = time.strftime("%H:%M:%S", time.localtime(event["created_at"]))
    style = {"warn": "yellow", "error": "bold red"}.get(event.get("level", ""), "")
    return Text.assemble((moment, DIM), "  ", (event["message"], style))
