"""State of the server: the last minute for `/v1/status`, all steps for `/v1/status/steps`.

docs/server.md describes both.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any, NamedTuple

from coserve.engine.grammars import MAX_BYTES, MAX_TENANT_BYTES
from coserve.engine.records import EngineStats, RequestRecord
from coserve.protocol.messages import Ready, StartProgress, StepRecord, StepReport
from coserve.server.observability.history import TimeSpan, TokenHistory
from coserve.server.tenancy.ledger import RequestLedger

WINDOW_S = 60.0
_MAX_KEPT = 20_000


class _Step(NamedTuple):
    """A step, with its serial number."""

    serial: int
    """Position in the order of all entries, which clients use as a cursor."""
    step: StepRecord
    """The step."""


class _Request(NamedTuple):
    """A finished sequence."""

    serial: int
    """Position in the order of all entries."""
    end_s: float
    """Time at which it finished."""
    record: RequestRecord
    """Its times and lengths."""
    tenant: str
    """Its tenant."""
    adapter: str | None
    """The tenant's name for its adapter; None: the base model."""


class _Moment(NamedTuple):
    """Token counts and pages by owner at one time."""

    serial: int
    """Position in the order of all entries."""
    time_s: float
    """The time."""
    num_generated: int
    """Generated tokens up to then."""
    num_tuned: int
    """Tokens processed by fine-tuning up to then."""
    pages: dict[str, int]
    """Pages of the pool by owner."""


class StatusBoard:
    """An `EngineListener` that keeps the newest steps, requests and states of the memory."""

    def __init__(self, ledger: RequestLedger) -> None:
        self._ledger = ledger
        self._start_s = time.monotonic()
        self._serial = 0
        self._steps: deque[_Step] = deque(maxlen=_MAX_KEPT)
        self._requests: deque[_Request] = deque(maxlen=_MAX_KEPT)
        self._moments: deque[_Moment] = deque(maxlen=_MAX_KEPT)
        self._stats: EngineStats | None = None
        self._num_generated = 0
        self._num_tuned = 0
        self._num_tuned_before = 0  # by earlier engines
        self._history = TokenHistory()
        self._counted = (0, 0)  # generated and tuned tokens in the history

    # -- reports of the engine (EngineListener) ------------------------------------------

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        self._stats = None
        self._num_tuned_before = self._num_tuned

    def engine_reported(self, report: StepReport) -> None:
        self._num_generated += sum(len(chunk.tokens) for chunk in report.chunks)
        for step in report.steps:
            self._steps.append(_Step(self._next(), step))
        now_s = time.monotonic()
        for record in report.records:
            entry = self._ledger.find(record.request)
            if entry is not None:
                self._requests.append(
                    _Request(self._next(), now_s, record, entry.tenant, entry.adapter)
                )
        if report.stats is not None:
            self._take_stats(report.stats, now_s)

    def _take_stats(self, stats: EngineStats, now_s: float) -> None:
        self._stats = stats
        num_generated_before, num_tuned_before = self._counted
        self._num_tuned = self._num_tuned_before + stats.num_tokens_trained
        self._counted = self._num_generated, self._num_tuned
        self._history.add(
            now_s,
            num_generated=self._num_generated - num_generated_before,
            num_trained=self._num_tuned - num_tuned_before,
        )
        pages = {**stats.num_pages_by_owner, "free": stats.num_pages_free}
        self._moments.append(
            _Moment(self._next(), now_s, self._num_generated, self._num_tuned, pages)
        )

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    # -- queries ------------------------------------------------------------------------

    def status(
        self,
        ready: Ready | None,
        model: str,
        tenant: str | None,
        trainable_models: Collection[str] = (),
        starting: StartProgress | None = None,
    ) -> dict[str, Any]:
        """Return what `/v1/status` shows.

        Args:
            ready: Description of the engine; None while there is none.
            model: Name of the served model.
            tenant: Tenant whose requests count; None: all.
            trainable_models: Models that jobs can train besides the served one.
            starting: Progress of an engine that is starting.
        """
        now_s = time.monotonic()
        since_s = now_s - WINDOW_S
        # From the newest back to the start of the window: entries are in the order of time.
        steps = [
            each.step
            for each in takewhile(lambda each: each.step.end_s >= since_s, reversed(self._steps))
        ]
        recent = takewhile(lambda each: each.end_s >= since_s, reversed(self._requests))
        records = [each.record for each in recent if tenant in (None, each.tenant)]
        stats = self._stats
        errors = [
            abs(step.predicted_s - step.step_s) / step.step_s for step in steps if step.step_s
        ]
        generated_per_s, tuned_per_s = self._rates(now_s)
        return {
            "model": model,
            "trainable_models": list(trainable_models),
            "dtype": ready.dtype if ready else None,
            "device": ready.device if ready else None,
            "threads": ready.threads if ready else None,
            "tensor_parallel": ready.num_ranks if ready else None,
            # Processes of the machine are its operator's business.
            "ranks": _ranks(stats) if stats and tenant is None else [],
            "ready": ready is not None,
            "starting": start_json(starting),
            "kernels": {
                "backend": ready.kernels if ready else None,
                "warning": (ready.kernels_warning or None) if ready else None,
            },
            "profile": _profile_json(stats),
            "objectives": {
                "ttft_ms": ready.slo.ttft_s * 1e3 if ready else None,
                "tpot_ms": ready.slo.tpot_s * 1e3 if ready else None,
            },
            "window_s": min(WINDOW_S, now_s - self._start_s),
            "requests": {
                "running": stats.num_running if stats else 0,
                "waiting": stats.num_waiting if stats else 0,
                "finished": len(records),
                "tokens_per_s": generated_per_s,
                "attainment": sum(record.attained for record in records) / len(records)
                if records
                else None,
                "ttft_ms": _percentiles_ms(record.ttft_s for record in records),
                "tpot_ms": _percentiles_ms(
                    record.tpot_s for record in records if record.tpot_s is not None
                ),
            },
            "batch": {
                "running": stats.num_batch_running if stats else 0,
                "waiting": stats.num_batch_waiting if stats else 0,
            },
            "jobs": {
                "running": stats.num_jobs_running if stats else 0,
                "tokens_per_s": tuned_per_s,
                # Other tenants' jobs are nobody's business.
                "joined": stats.joined_jobs if stats and tenant is None else [],
            },
            "memory": {
                "pages": ready.num_pages if ready else None,
                "page_bytes": ready.page_bytes if ready else None,
                "free": stats.num_pages_free if stats else None,
                "by_owner": stats.num_pages_by_owner if stats else {},
                "host": {
                    "pages": stats.num_host_pages if stats else 0,
                    "used": stats.num_host_pages_used if stats else 0,
                    "num_swapped_out": stats.num_swapped_out if stats else 0,
                    "num_swapped_in": stats.num_swapped_in if stats else 0,
                    "give_back_s": stats.give_back_s if stats else 0.0,
                },
                "grammars": _grammars(stats, tenant),
            },
            "handover": asdict(stats.handover) if stats and stats.handover else None,
            "steps": {
                "count": len(steps),
                "step_ms": _percentiles_ms(step.step_s for step in steps),
                "prediction_error": {
                    "median": quantile(errors, 0.5),
                    "p95": quantile(errors, 0.95),
                },
            },
        }

    def steps(self, after: int, tenant: str | None) -> dict[str, Any]:
        """Return what `/v1/status/steps` shows: all entries after a cursor.

        Args:
            after: Serial number after which entries are returned.
            tenant: Tenant whose requests are returned; None: all.
        """
        return {
            "cursor": self._serial,
            "now_s": time.monotonic(),
            "steps": [
                (
                    *(
                        each.step.end_s,
                        each.step.step_s,
                        each.step.predicted_s,
                        each.step.decode_rows,
                    ),
                    *(each.step.prefill_rows, each.step.window_rows, each.step.backward_rows),
                )
                for each in _after(self._steps, after)
            ],
            "requests": [
                _request(each)
                for each in _after(self._requests, after)
                if tenant in (None, each.tenant)
            ],
            "memory": [(each.time_s, each.pages) for each in _after(self._moments, after)],
        }

    def rates(self, span: TimeSpan) -> list[tuple[float, float]]:
        """Return generated and trained tokens per second in each part of a span, the oldest
        first.
        """
        return self._history.rates(span, time.monotonic())

    def _rates(self, now_s: float) -> tuple[float | None, float | None]:
        """Return generated and trained tokens per second over the window."""
        since_s = max(now_s - WINDOW_S, self._start_s)
        before = next((each for each in reversed(self._moments) if each.time_s < since_s), None)
        first_generated, first_tuned = (
            (before.num_generated, before.num_tuned) if before else (0, 0)
        )
        seconds = now_s - since_s
        if not self._moments or seconds <= 0:
            return None, None
        return (self._num_generated - first_generated) / seconds, (
            self._num_tuned - first_tuned
        ) / seconds


def start_json(progress: StartProgress | None) -> dict[str, Any] | None:
    """Return the progress of an engine that is starting, as `/health` and `/v1/status` show it."""
    if progress is None:
        return None
    return {
        "stage": progress.stage,
        "done": progress.done,
        "total": progress.total,
        "text": str(progress),
    }


def _profile_json(stats: EngineStats | None) -> dict[str, Any]:
    """Return the state of the engine's profile, and the share that has been measured so far."""
    if stats is None:
        return {"state": None, "measured_share": None}
    share = stats.measured_share
    return {"state": "measured" if share is None else "provisional", "measured_share": share}


def _grammars(stats: EngineStats | None, tenant: str | None) -> dict[str, int]:
    """Return the bytes of compiled grammars: a tenant's own, or (None) those of all."""
    by_tenant = stats.grammar_bytes_by_tenant if stats else {}
    if tenant is not None:
        return {"bytes": by_tenant.get(tenant, 0), "max_bytes": MAX_TENANT_BYTES}
    return {"bytes": sum(by_tenant.values()), "max_bytes": MAX_BYTES}


def _ranks(stats: EngineStats) -> list[dict[str, Any]]:
    """Return the ranks of the model, in order; empty if there is only one process."""
    return [
        {
            "rank": rank,
            "pid": state.pid,
            "device": state.device,
            "memory_bytes": state.memory_bytes,
            "wait_s": state.waited_s,
        }
        for rank, state in enumerate(stats.ranks)
    ]


def _after(entries: "deque[Any]", after: int) -> list[Any]:
    """Return the entries with a later serial number, in order."""
    return list(takewhile(lambda each: each.serial > after, reversed(entries)))[::-1]


def _request(each: _Request) -> dict[str, Any]:
    record = each.record
    return {
        "request": record.request,
        "adapter": each.adapter,
        "arrival_s": record.arrival_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "attained": record.attained,
    }


def _percentiles_ms(seconds: Iterable[float]) -> dict[str, float | None]:
    values_ms = [each * 1e3 for each in seconds]
    return {"p50": quantile(values_ms, 0.5), "p99": quantile(values_ms, 0.99)}


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value at a share of the sorted values, by nearest rank; None if there are none."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
