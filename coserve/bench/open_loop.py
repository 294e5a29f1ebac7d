"""A trace played open loop against an engine in this process: on torch in real time, on a modelled
device in virtual time.

The result has what `coserve.workloads.load` reports of a server over HTTP (`RequestOutcome`), and
what only the engine knows: tokens trained, predictions, evictions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from random import Random
from statistics import mean

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.request import Chunk
from coserve.engine.request_queue import ImportedBlocks
from coserve.engine.token_engine import TokenEngine
from coserve.errors import RequestError
from coserve.scheduling.slo import Slo
from coserve.workloads.summary import RequestOutcome
from coserve.workloads.traces import TracedRequest

# Seconds between two looks for work of an idle engine: at most, and at least while requests wait.
_IDLE_S, _MIN_IDLE_S = 1.0, 0.002


@dataclass(frozen=True, kw_only=True)
class Sample:
    """State of the engine after a step."""

    at_s: float
    """Time of the sample."""
    num_open: int
    """Number of requests that have arrived and have not ended."""
    num_trained: float
    """Tokens trained since the start."""


@dataclass(kw_only=True)
class Played:
    """Result of playing a trace."""

    seconds: float
    """Seconds of the trace, in which tokens are counted."""
    outcomes: list[RequestOutcome] = field(default_factory=list)
    """Outcomes of the requests."""
    samples: list[Sample] = field(default_factory=list)
    """State after each step."""
    errors: list[float] = field(default_factory=list)
    """Prediction errors of steps, as shares of their times."""
    num_output_tokens: int = 0
    """Tokens of answers."""
    num_trained: float = 0.0
    """Tokens trained."""
    num_evictions: int = 0
    """Number of times that a request lost its pages."""
    num_drops: int = 0
    """Number of times that a pack was dropped."""

    @property
    def tuning_tokens_per_s(self) -> float:
        return self.num_trained / self.seconds

    @property
    def inference_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def prediction_error(self) -> float | None:
        """Return the mean prediction error."""
        return mean(self.errors) if self.errors else None

    def attainment(self, slo: Slo) -> float | None:
        """Return the share of requests that held both SLOs; None without requests."""
        held = [outcome.attained(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s) for outcome in self.outcomes]
        return mean(held) if held else None


class OpenLoop:
    """An engine with requests that arrive by a trace, whatever has become of earlier ones."""

    def __init__(
        self,
        engine: TokenEngine,
        trace: Sequence[TracedRequest],
        *,
        slo: Slo,
        seconds: float,
        idle: Callable[[float], None],
        seed: int = 0,
        handed_over: bool = False,
    ) -> None:
        """Prepare to play a trace.

        Args:
            engine: The engine.
            trace: Arrivals and lengths.
            slo: SLO of all requests.
            seconds: Seconds of the trace that count.
            idle: Function that lets time pass by the clock of the device.
            seed: Seed of the prompts, no two of which are alike.
            handed_over: Whether whole blocks of prompts come from a prefill instance, as on a
                decode instance (`coserve.handover`); for modelled devices, which read no file.
        """
        self._engine, self._trace, self._slo, self._idle = engine, trace, slo, idle
        self._handed_over = handed_over
        self._seed, self._vocab_size = seed, engine.device.info.vocab_size
        self._start_s = engine.device.clock.now()
        self._next = 0
        self._open: dict[str, int] = {}
        self._num_missed = 0
        self._times_s: dict[int, list[float]] = {}  # times of the tokens of each answer
        self._trained = self._num_trained()
        self.played = Played(seconds=seconds)

    def run(self, *, drain_s: float, max_missed: float = inf) -> Played:
        """Play the trace, wait for open answers, and cancel those that take longer.

        A cancelled answer is judged by its pace so far, or by its waiting time if it has no first
        token; one that might still get its first token in time does not count.

        Args:
            drain_s: Maximum seconds to wait for open answers.
            max_missed: Number of missed SLOs above which the run ends at once.
        """
        engine, played = self._engine, self.played
        num_evictions, num_drops = engine.num_preemptions, engine.jobs.num_packs_dropped
        end_s = played.seconds + drain_s
        while (
            # Until the trace and its answers are over; a long step may leave arrivals that are due.
            (now_s := self._now_s()) < played.seconds
            or self._is_due()
            or (self._open and now_s < end_s)
        ):
            if self._num_missed > max_missed:
                break
            self._arrive(now_s)
            if engine.has_work:
                self._step(now_s)
            if not engine.has_work or engine.last_plan.runs_nothing:
                self._wait()
        for name in list(self._open):
            self._cut_off(name)
            engine.cancel(name)
        played.num_evictions = engine.num_preemptions - num_evictions
        played.num_drops = engine.jobs.num_packs_dropped - num_drops
        played.outcomes.sort(key=lambda outcome: outcome.index)
        return played

    def _now_s(self) -> float:
        return self._engine.device.clock.now() - self._start_s

    def _num_trained(self) -> float:
        return sum(job.num_tokens_done for job in self._engine.jobs.values())

    def _is_due(self) -> bool:
        """Return whether a request of the counted time has not arrived yet: a step may last beyond
        the end of that time.
        """
        return self._next < len(self._trace) and self._trace[self._next].at_s < self.played.seconds

    def _arrive(self, now_s: float) -> None:
        while self._is_due() and self._trace[self._next].at_s <= now_s:
            index, request = self._next, self._trace[self._next]
            self._next += 1
            tokens = Random(f"{self._seed}/{index}").choices(
                range(self._vocab_size), k=request.num_prompt_tokens
            )
            params = SamplingParams(
                max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True
            )
            arrival_s = self._start_s + request.at_s
            self._times_s[index] = []
            try:
                name = self._engine.add_tokens(tokens, params, slo=self._slo, arrival_s=arrival_s)
            except RequestError as error:  # it does not fit into the memory
                self._finish(index, str(error))
                continue
            if self._handed_over:
                self._engine.hold(name)
                num_blocks = (len(tokens) - 1) // self._engine.device.info.block_tokens
                self._engine.arrive(
                    name, ImportedBlocks(path="", first_block=0, num_blocks=num_blocks)
                )
            self._open[name] = index

    def _step(self, started_s: float) -> None:
        engine, played = self._engine, self.played
        events, now_s = engine.step(), self._now_s()
        for event in events:
            if isinstance(event, Chunk) and event.request in self._open:
                self._take(event, now_s)
        took_s, before, self._trained = now_s - started_s, self._trained, self._num_trained()
        if took_s > 0 and started_s < played.seconds:
            # A step that ends after the trace's time counts by its share before it.
            played.num_trained += min(1.0, (played.seconds - started_s) / took_s) * (
                self._trained - before
            )
        if took_s > 0 and not engine.last_plan.runs_nothing:
            played.errors.append(abs(engine.last_plan.predicted_s - took_s) / took_s)
        played.samples.append(
            Sample(at_s=now_s, num_open=len(self._open), num_trained=played.num_trained)
        )

    def _take(self, chunk: Chunk, now_s: float) -> None:
        times_s = self._times_s[self._open[chunk.request]]
        times_s.extend([now_s] * len(chunk.tokens))
        if now_s <= self.played.seconds:
            self.played.num_output_tokens += len(chunk.tokens)
        if chunk.finish_reason is not None:
            self._end(chunk.request, error=chunk.error)

    def _end(self, name: str, error: str | None) -> None:
        self._finish(self._open.pop(name), error)

    def _cut_off(self, name: str) -> None:
        """Judge a request that is open at the end."""
        index, now_s = self._open[name], self._now_s()
        if self._times_s[index]:
            # As if its next token arrived now: a stalled request is late by all of that time.
            self._times_s[index].append(now_s)
            self._end(name, error=None)
        elif now_s - self._trace[index].at_s > self._slo.ttft_s:
            self._end(name, error="not answered in time")
        else:
            del self._open[name]

    def _finish(self, index: int, error: str | None) -> None:
        request, times_s = self._trace[index], self._times_s.pop(index)
        later = len(times_s) - 1
        outcome = RequestOutcome(
            index=index,
            arrival_s=request.at_s,
            end_s=times_s[-1] if times_s else self._now_s(),
            ttft_s=times_s[0] - request.at_s if times_s else None,
            tpot_s=(times_s[-1] - times_s[0]) / later if later > 0 else None,
            gaps_s=tuple(after - before for before, after in pairwise(times_s)),
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(times_s),
            error=error,
        )
        self.played.outcomes.append(outcome)
        self._num_missed += not outcome.attained(ttft_s=self._slo.ttft_s, tpot_s=self._slo.tpot_s)

    def _wait(self) -> None:
        """Wait until the next arrival or the end, as nothing can run."""
        upcoming_s = (
            self._trace[self._next].at_s if self._next < len(self._trace) else self.played.seconds
        )
        self._idle(min(max(upcoming_s - self._now_s(), _MIN_IDLE_S), _IDLE_S))
