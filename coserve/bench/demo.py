"""Experiment of the demo, over HTTP only: requests alone, a fine-tuning job alone, then both at
once, with the same trace and the same job.

The results are plain data, from which the report is made.
"""

import asyncio
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from coserve.client.http import Client
from coserve.client.job_progress import PolledJob
from coserve.errors import JobError
from coserve.workloads.arrivals import LogNormalLengths, bursty
from coserve.workloads.load import LoadGenerator, chats
from coserve.workloads.summary import RequestOutcome, percentile, summarize
from coserve.workloads.traces import TracedRequest, adapt, read_trace

PhaseName = Literal["requests", "job", "both"]
PHASES: tuple[PhaseName, ...] = ("requests", "job", "both")

_POLL_S = 0.25
# Beside requests, the job is stopped after this many times the seconds of the phase.
_TIME_FACTOR = 1.5
# Expected speed of the job beside requests, as a share of its speed alone; maximum epochs.
_EXPECTED_SHARE = 0.65
_MAX_EPOCHS = 50
# Maximum answer of a recorded trace, in means.
_LONGEST_ANSWER = 4
# Maximum seconds to wait for answers after the trace.
_GUARD_S = 120.0


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the demo."""

    seconds: float = 35.0
    """Seconds of the trace, and of the job alone."""
    rate: float = 2.0
    """Mean requests per second."""
    mean_output_tokens: float = 24.0
    """Mean tokens per answer."""
    epochs: int | None = None
    """Epochs of the job beside requests; None: as many as should last for the trace, by the speed
    of the job alone.
    """
    batch_size: int = 8
    """Examples per optimizer step."""
    learning_rate: float = 1e-3
    """Learning rate of the job."""
    r: int = 16
    """Rank of the LoRA."""
    checkpoint_every_steps: int = 25
    """Optimizer steps between checkpoints."""
    num_questions: int = 8
    """Number of questions that are shown with their answers."""
    num_scored: int = 30
    """Number of questions that are asked before and after."""
    seed: int = 0
    """Seed of the lesson, the trace and the job."""
    trace_file: str | None = None
    """Recorded trace to play instead of one from the seed, at this rate and with its answers cut.
    """
    trace_where: Mapping[str, str] = field(default_factory=dict)
    """Rows of the recorded trace, by column (`read_trace`)."""


@dataclass(kw_only=True)
class Recording:
    """A phase while it runs: what senders see, and what the server reports of its steps and pages.
    Times are seconds from its start.
    """

    name: PhaseName
    """Name of the phase."""
    planned_s: float
    """Planned length."""
    start_s: float = field(default_factory=time.monotonic)
    """Start, by the monotonic clock."""
    load: LoadGenerator | None = None
    """Sender of the trace, if there is one."""
    progress: PolledJob | None = None
    """Progress of the job, if there is one."""
    status: dict[str, Any] = field(default_factory=dict)
    """Last status of the server."""
    steps: list[list[float]] = field(default_factory=list)
    """Steps: time, milliseconds, predicted milliseconds, then rows by kind."""
    memory: list[list[Any]] = field(default_factory=list)
    """Memory: time, pages by owner."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Requests as the engine measured them."""
    losses: list[list[float]] = field(default_factory=list)
    """Losses: time, step, loss."""
    job_start_s: float = 0.0
    """Start of the job."""
    job_end_s: float | None = None
    """End of the job, once it has ended."""
    seconds: float = 0.0
    """Length of the phase, once it has ended."""

    @property
    def outcomes(self) -> Sequence[RequestOutcome]:
        return self.load.outcomes if self.load else ()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.start_s

    @property
    def job_seconds(self) -> float:
        return (self.job_end_s or self.seconds) - self.job_start_s

    @property
    def tuned_per_s(self) -> float | None:
        """Return the job's tokens per second, while the trace plays if there is one; forward and
        backward each count half.
        """
        # Columns 5 and 6 are rows of windows (forward) and of tasklets (backward).
        rows = [(step[0], step[5] + step[6]) for step in self.steps if step[5] + step[6] > 0]
        start_s = rows[0][0] if rows else 0.0
        end_s = min(
            self.job_end_s or self.seconds or self.now_s,
            self.planned_s if self.load else float("inf"),
        )
        return (
            sum(count for at_s, count in rows if at_s <= end_s) / 2 / (end_s - start_s)
            if end_s > start_s
            else None
        )


@dataclass(kw_only=True)
class DemoState:
    """State of the demo, for views."""

    doing: str = ""
    """What the demo is doing, in words."""
    recordings: dict[PhaseName, Recording] = field(default_factory=dict)
    """Phases so far."""
    current: Recording | None = None
    """Phase that runs."""
    questions: list[dict[str, str]] = field(default_factory=list)
    """Questions with their answers before and after."""


def _openai_client(url: str) -> Any:
    """Return OpenAI's client, which shows that the server works with it; None if it is not
    installed.
    """
    if importlib.util.find_spec("openai") is None:
        return None
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class Demo:
    """A run of the demo on a server without other users.

    Args:
        url: URL of the server.
        lesson: Lines to train on, and conversations to ask (`coserve.workloads.lessons.Lesson`).
        training_file: File of the lines, which is uploaded.
        config: Settings.
        watch: Function that is called with the state a few times a second.
    """

    def __init__(
        self,
        url: str,
        lesson: Any,
        training_file: Path,
        config: DemoConfig,
        *,
        watch: Callable[[DemoState], None] = lambda state: None,
    ) -> None:
        self._url, self._lesson, self._file, self._config, self._watch = (
            url,
            lesson,
            training_file,
            config,
            watch,
        )
        self._client, self._openai = Client(url), _openai_client(url)
        self._cursor = 0
        self.state = DemoState()

    def run(self) -> dict[str, Any]:
        """Run all phases, and return the results.

        Raises:
            JobError: The job failed.
        """
        status = self._client.get("/v1/status")
        base = str(status["model"])
        before = self._ask(base, "asks the base model")
        uploaded = self._upload()
        for name in PHASES:
            self._phase(name, base, uploaded)
        both = self.state.recordings["both"]
        assert both.progress is not None
        tuned = self._served_model(both.progress)
        after = self._ask(tuned, "asks the new adapter") if tuned else []
        self._client.close()
        if self._openai is not None:
            self._openai.close()
        return self._results(status, before, after, tuned)

    # -- asking --------------------------------------------------------------------------

    def _ask(self, model: str, doing: str) -> list[str]:
        """Return the likeliest answers to the lesson's held-out questions."""
        answers = []
        asked = self._lesson.questions[: self._config.num_scored]
        for index, messages in enumerate(asked):
            self._tell(f"{doing} ({index + 1} of {len(asked)})")
            body = {"model": model, "messages": messages, "max_tokens": 48, "temperature": 0}
            answers.append(
                self._client.post("/v1/chat/completions", body)["choices"][0]["message"][
                    "content"
                ].strip()
            )
        return answers

    def _served_model(self, progress: PolledJob) -> str | None:
        """Return the finished model, or the last checkpoint of a job that was stopped."""
        if progress.job.get("fine_tuned_model"):
            return str(progress.job["fine_tuned_model"])
        checkpoints = self._client.get(
            f"/v1/fine_tuning/jobs/{progress.job['id']}/checkpoints", limit=100
        )["data"]
        newest = max(checkpoints, key=lambda checkpoint: checkpoint["step_number"], default=None)
        return newest and str(newest["fine_tuned_model_checkpoint"])

    # -- phases --------------------------------------------------------------------------

    def _phase(self, name: PhaseName, base: str, uploaded: str) -> None:
        config = self._config
        # What the server reports of earlier steps belongs to the phase before.
        self._skip_what_was()
        recording = self.state.recordings[name] = self.state.current = Recording(
            name=name, planned_s=config.seconds
        )
        if name != "requests":
            epochs = _MAX_EPOCHS if name == "job" else self._epochs()
            recording.progress = PolledJob(job=self._start_job(base, uploaded, epochs))
            recording.job_start_s = recording.now_s
        player = None
        if name != "job":
            questions = [messages[-1]["content"] for messages in self._lesson.questions]
            recording.load = LoadGenerator(self._url, self.trace(), chats(base, questions))
            player = Thread(
                target=lambda load: asyncio.run(load.run()), args=(recording.load,), daemon=True
            )
            player.start()
        most_s = config.seconds * (_TIME_FACTOR if name == "both" else 1.0)
        self._tell(
            {"requests": "requests alone", "job": "the job alone", "both": "both at once"}[name]
        )
        while self._may_continue(recording, player, most_s):
            time.sleep(_POLL_S)
            self._poll(recording)
            self._watch(self.state)
        self._poll(recording)
        recording.seconds = recording.now_s

    def trace(self) -> list[TracedRequest]:
        """Return the trace, the same for every phase that has one."""
        config = self._config
        if config.trace_file is not None:
            most = round(_LONGEST_ANSWER * config.mean_output_tokens)
            trace = read_trace(config.trace_file, where=config.trace_where)
            # Recordings begin slowly.
            start_s = trace[-1].at_s / 10
            return adapt(
                trace,
                start_s=start_s,
                rate=config.rate,
                seconds=config.seconds,
                max_output_tokens=most,
            )
        lengths = LogNormalLengths(mean_output_tokens=config.mean_output_tokens)
        return bursty(rate=config.rate, seconds=config.seconds, seed=config.seed, lengths=lengths)

    def _may_continue(self, recording: Recording, player: Thread | None, most_s: float) -> bool:
        progress = recording.progress
        if progress is not None and progress.job["status"] == "failed":
            raise JobError(
                f"the demo's job failed: {(progress.job.get('error') or {}).get('message')}"
            )
        if progress is not None and not progress.is_terminal and recording.now_s > most_s:
            progress.job = self._client.post(f"/v1/fine_tuning/jobs/{progress.job['id']}/cancel")
        plays = (
            player is not None
            and player.is_alive()
            and recording.now_s < recording.planned_s + _GUARD_S
        )
        return plays or (progress is not None and not progress.is_terminal)

    def _epochs(self) -> int:
        """Return the number of epochs of the job beside requests."""
        if self._config.epochs is not None:
            return self._config.epochs
        alone = self.state.recordings["job"]
        assert alone.progress is not None
        steps = (
            _EXPECTED_SHARE
            * self._config.seconds
            * alone.progress.step
            / max(1.0, alone.job_seconds)
        )
        return min(
            _MAX_EPOCHS, max(1, round(steps * self._config.batch_size / len(self._lesson.train)))
        )

    def _start_job(self, base: str, uploaded: str, epochs: int) -> dict[str, Any]:
        config = self._config
        hyperparameters = {"n_epochs": epochs, "batch_size": config.batch_size}
        body = {
            "model": base,
            "training_file": uploaded,
            "suffix": self._lesson.name,
            "seed": config.seed,
            "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
            "coserve": {
                "adapter": {
                    "type": "lora",
                    "r": config.r,
                    "alpha": 2 * config.r,
                    "target_modules": "all-linear",
                },
                "optimizer": {"learning_rate": config.learning_rate},
                "checkpoint_every_steps": config.checkpoint_every_steps,
            },
        }
        if self._openai is None:
            job: dict[str, Any] = self._client.post("/v1/fine_tuning/jobs", body)
        else:
            extension = {"coserve": body.pop("coserve")}
            job = self._openai.fine_tuning.jobs.create(**body, extra_body=extension).to_dict(
                mode="json"
            )
        return job

    def _upload(self) -> str:
        if self._openai is None:
            return str(self._client.upload(self._file)["id"])
        return str(self._openai.files.create(file=self._file, purpose="fine-tune").id)

    # -- recording -----------------------------------------------------------------------

    def _skip_what_was(self) -> None:
        self._cursor = self._client.get("/v1/status/steps", after=self._cursor)["cursor"]

    def _poll(self, recording: Recording) -> None:
        """Read what has happened on the server since the last time."""
        answer = self._client.get("/v1/status/steps", after=self._cursor)
        self._cursor = answer["cursor"]
        # The server's clock, from the phase's start on.
        zero_s = answer["now_s"] - recording.now_s
        for end_s, step_s, predicted_s, *rows in answer["steps"]:
            times = [end_s - zero_s, 1e3 * step_s, 1e3 * predicted_s]
            recording.steps.append([round(value, 4) for value in [*times, *rows]])
        recording.memory += [[round(at_s - zero_s, 3), pages] for at_s, pages in answer["memory"]]
        recording.records += answer["requests"]
        if recording.progress is None:
            recording.status = self._client.get("/v1/status")
            return
        if recording.job_end_s is None:
            known = set(recording.progress.losses)
            recording.progress.poll(self._client)
            # Losses of the steps that this poll has added.
            new = recording.progress.losses.items() - {
                (step, recording.progress.losses[step]) for step in known
            }
            recording.losses += [
                [round(recording.now_s, 2), step, loss] for step, loss in sorted(new)
            ]
            recording.status = recording.progress.status
            if recording.progress.is_terminal:
                recording.job_end_s = recording.now_s
        else:
            recording.status = self._client.get("/v1/status")

    def _tell(self, doing: str) -> None:
        self.state.doing = doing
        self._watch(self.state)

    # -- results -------------------------------------------------------------------------

    def _results(
        self, status: dict[str, Any], before: Sequence[str], after: Sequence[str], tuned: str | None
    ) -> dict[str, Any]:
        both = self.state.recordings["both"]
        assert both.progress is not None
        asked = [
            messages[-1]["content"]
            for messages in self._lesson.questions[: self._config.num_scored]
        ]
        answers = after or ["–"] * len(asked)
        shown = list(zip(asked, before, answers, strict=True))[: self._config.num_questions]
        return {
            "model": status["model"],
            "dtype": status["dtype"],
            "device": status["device"],
            "threads": status["threads"],
            "tensor_parallel": status["tensor_parallel"],
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "objectives": status["objectives"],
            "config": asdict(self._config) | {"epochs": self._epochs()},
            "job": {"id": both.progress.job["id"], "model": tuned, "lesson": self._lesson.name},
            "score": {
                "asked": len(asked),
                "before": self._score(before),
                "after": self._score(after),
            },
            "questions": [{"question": q, "before": b, "after": a} for q, b, a in shown],
            "phases": {
                name: self._phase_results(self.state.recordings[name], status) for name in PHASES
            },
        }

    def _score(self, answers: Sequence[str]) -> float | None:
        """Return the share of answers that are word for word those of the lesson."""
        right = [line["messages"][-1]["content"] for line in self._lesson.held_out[: len(answers)]]
        return (
            sum(a == r for a, r in zip(answers, right, strict=True)) / len(right) if right else None
        )

    def _phase_results(self, recording: Recording, status: dict[str, Any]) -> dict[str, Any]:
        """Return the results of a phase; the summary counts requests that arrive while the job
        beside them runs, in every phase.
        """
        until_s = self.state.recordings["both"].job_end_s or float("inf")
        outcomes = sorted(recording.outcomes, key=lambda outcome: outcome.index)
        slos = {f"{kind}_s": status["objectives"][f"{kind}_ms"] / 1e3 for kind in ("ttft", "tpot")}
        counted = [outcome for outcome in outcomes if outcome.arrival_s <= until_s]
        return {
            "seconds": round(recording.seconds, 2),
            "job_end_s": recording.job_end_s and round(recording.job_end_s, 2),
            "summary": summarize(counted, **slos) if recording.load else None,
            "engine": _as_the_engine_saw(recording.records) if recording.load else None,
            "tuning": _tuning(recording) if recording.progress else None,
            "outcomes": [_plain(outcome) for outcome in outcomes],
            "steps": recording.steps,
            "memory": recording.memory,
        }


def _as_the_engine_saw(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return attainment and latencies of a phase's requests as the engine measured them, without
    HTTP.
    """
    means = [1e3 * record["tpot_s"] for record in records if record["tpot_s"] is not None]
    return {
        "attainment": sum(record["attained"] for record in records) / len(records)
        if records
        else None,
        "ttft_p99_ms": round(percentile([1e3 * record["ttft_s"] for record in records], 0.99), 3)
        if records
        else None,
        "tpot_p99_ms": round(percentile(means, 0.99), 3) if means else None,
    }


def _tuning(recording: Recording) -> dict[str, Any]:
    progress, rate = recording.progress, recording.tuned_per_s
    assert progress is not None
    return {
        "tokens_per_s": None if rate is None else round(rate, 1),
        "steps": progress.step,
        "total_steps": progress.num_steps,
        "seconds": round(recording.job_seconds, 2),
        "finished": progress.job["status"] == "succeeded",
        "validation_loss": progress.validation_loss,
        "losses": recording.losses,
    }


def _plain(outcome: RequestOutcome) -> dict[str, Any]:
    """Return an outcome as JSON, in milliseconds."""
    return {
        "arrival_s": round(outcome.arrival_s, 3),
        "ttft_ms": None if outcome.ttft_s is None else round(1e3 * outcome.ttft_s, 2),
        "tpot_ms": None if outcome.tpot_s is None else round(1e3 * outcome.tpot_s, 3),
        "num_output_tokens": outcome.num_output_tokens,
        "error": outcome.error,
    }
