"""A view of a job's progress until it ends, and of the latencies of requests meanwhile."""

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import Event
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from coserve.cli.drawing import DIM, against, duration, progress_bar, resampled, sparkline
from coserve.client.http import Client
from coserve.client.job_progress import PolledJob
from coserve.errors import ServerError

_POLL_S = 0.5
# Answers that say "later": a server that restarts its engine resumes the job.
_MAX_SILENCE_S = 120.0


@contextmanager
def ctrl_c() -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets; a second one raises KeyboardInterrupt, for a
    server that hangs.

    The first does not raise: Python drops an exception that is raised in a callback of the
    interpreter (`__del__`, the lock of an import), and the command would not stop.
    """
    stop = Event()

    def interrupted(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # by who runs it in the background
        yield stop
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def follow(client: Client, job: dict[str, Any], console: Console, stop: Event) -> PolledJob:
    """Show a job until it ends or `stop` is set, which leaves it running: a live view on a
    terminal, lines elsewhere (`worth_a_line`).

    Raises:
        ServerError: The server is gone, and does not come back.
    """
    progress = PolledJob(job=job)
    if not console.is_terminal:
        for event in worth_a_line(chain.from_iterable(_polls(client, progress, stop))):
            console.print(event_line(event), soft_wrap=True)
        return progress
    with Live(
        view(progress, console.width), console=console, refresh_per_second=4, transient=False
    ) as live:
        for events in _polls(client, progress, stop):
            for event in events:
                if event.get("type") != "metrics":
                    live.console.print(event_line(event))
            live.update(view(progress, console.width))
    return progress


def view(progress: PolledJob, width: int) -> RenderableType:
    """Return a few lines: the job, its loss, the requests."""
    job, requests = progress.job, progress.status.get("requests")
    slos = progress.status.get("objectives") or {}
    head = Text.assemble((job["status"], "bold"), "  ")
    if progress.num_steps:
        head.append_text(
            progress_bar(progress.step / progress.num_steps, max(10, min(40, width - 48)))
        )
        head.append(f"  step {progress.step:,} of {progress.num_steps:,}")
    elif progress.step:
        head.append(f"step {progress.step:,}")
    if progress.left_s is not None:
        head.append(f"  {duration(progress.left_s)} left", style=DIM)
    lines = [head]
    if progress.loss is not None:
        learning = Text.assemble("loss ", (f"{progress.loss:.4g}", "bold"), " ")
        room = max(10, min(40, width - 54))
        learning.append_text(
            sparkline(resampled(list(progress.losses.values()), room), room, low=0.0)
        )
        if progress.validation_loss is not None:
            learning.append(f"  validation {progress.validation_loss:.4g}")
        for name, share in progress.answers.items():
            learning.append(f"  {name.removeprefix('valid_').replace('_', ' ')} {share:.0%}")
        if progress.reward_margin is not None:
            learning.append(f"  reward margin {progress.reward_margin:.4g}")
        if progress.tokens_per_s is not None:
            learning.append(f"  {progress.tokens_per_s:,.0f} tokens/s", style=DIM)
        lines.append(learning)
    if requests:
        lines.append(_meanwhile(requests, slos))
    return Group(*lines)


def _meanwhile(requests: dict[str, Any], slos: dict[str, Any]) -> Text:
    """Return the latencies of requests in the last minute, against their SLOs."""
    firsts, means = ((requests.get(name) or {}).get("p99") for name in ("ttft_ms", "tpot_ms"))
    text = Text(f"requests: {requests.get('running') or 0} running, ")
    if firsts is None:
        return text.append("none answered in the last minute", style=DIM)
    text.append("p99 first token ").append_text(against(firsts, slos.get("ttft_ms")))
    return text.append(", then ").append_text(against(means, slos.get("tpot_ms")))


def _polls(client: Client, progress: PolledJob, stop: Event) -> Iterator[list[dict[str, Any]]]:
    """Yield the new events of each poll, until the job ends or `stop` is set; a server that
    restarts is waited for.
    """
    gone_since_s: float | None = None
    while not stop.is_set():
        try:
            yield progress.poll(client)
            gone_since_s = None
        except ServerError as error:
            gone_since_s = gone_since_s or time.monotonic()
            if error.status not in (None, 503) or time.monotonic() - gone_since_s > _MAX_SILENCE_S:
                raise
        if progress.is_terminal:
            return
        stop.wait(_POLL_S)


def worth_a_line(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a job's events with fewer steps: the first step of each second, and the last before any
    other event.

    The first and the last step of the job are always among them.
    """
    held: dict[str, Any] | None = None  # a step that is told if it turns out to be the last
    told_s: int | None = None
    for event in events:
        is_step = event["type"] == "metrics" and "train_loss" in event["data"]
        # One that warns (a gradient that was not finite) is told like any other event.
        if is_step and event["level"] == "info" and event["created_at"] == told_s:
            held = event
            continue
        if held is not None and not is_step:
            yield held
        held = None
        if is_step:
            told_s = event["created_at"]
        yield event
    if held is not None:
        yield held


def event_line(event: dict[str, Any]) -> Text:
    """Return the line of an event."""
    moment = time.strftime("%H:%M:%S", time.localtime(event["created_at"]))
    style = {"warn": "yellow", "error": "bold red"}.get(event.get("level", ""), "")
    return Text.assemble((moment, DIM), "  ", (event["message"], style))
