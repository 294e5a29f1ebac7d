"""A trace played against an engine in this process, open loop: on torch in real time, on a modelled
device in its own.

What comes of it is what `coserve.workloads.load` says of a server over HTTP (`RequestOutcome`), and
beside it what only the engine knows: what was trained, what was predicted, what was evicted.
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

# An engine with nothing to do looks for work this often: seldom until the next arrival, and often
# while requests wait.
_IDLE_S, _LEAST_IDLE_S = 1.0, 0.002


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The engine after a step. num_open: requests that have come and are not over. num_trained:
    tokens since the start.
    """

    at_s: float
    num_open: int
    num_trained: float


@dataclass(kw_only=True)
class Played:
    """What came of a trace.

    seconds: of the trace, in which tokens are counted: those of answers (num_output_tokens), and
    those trained. num_evictions: times that a request's pages were taken; num_drops: that a pack
    was given up. errors: of what each step was predicted to take, as shares of what it took.
    """

    seconds: float
    outcomes: list[RequestOutcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_trained: float = 0.0
    num_evictions: int = 0
    num_drops: int = 0

    @property
    def tuning_tokens_per_s(self) -> float:
        return self.num_trained / self.seconds

    @property
    def inference_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def prediction_error(self) -> float | None:
        """The mean."""
        return mean(self.errors) if self.errors else None

    def attainment(self, slo: Slo) -> float | None:
        """The share of requests that held both SLOs; None without requests."""
        held = [outcome.attained(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s) for outcome in self.outcomes]
        return mean(held) if held else None


class OpenLoop:
    """An engine, and the requests that come to it whatever has become of those before them."""

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
        """slo: of all requests. idle: lets time pass, by the clock of the device. seed: of prompts,
        no two alike. handed_over: whether the whole blocks of prompts come from another instance,
        as to one that decodes (`coserve.handover`); on modelled devices, which look into no file.
        """
        self._engine, self._trace, self._slo, self._idle = engine, trace, slo, idle
        self._handed_over = handed_over
        self._seed, self._vocab_size = seed, engine.device.info.vocab_size
        self._start_s = engine.device.clock.now()
        self._next = 0
        self._open: dict[str, int] = {}
        self._num_missed = 0
        self._times_s: dict[int, list[float]] = {}  # of the tokens of each answer
        self._trained = self._num_trained()
        self.played = Played(seconds=seconds)

    def run(self, *, drain_s: float, most_missed: float = inf) -> Played:
        """Play it; then wait at most this long for the answers that are not over yet, and cancel
        the others.

        What is cancelled is judged by its pace until then, without a first token by how long it has
        waited; what might still have its first token in time does not count at all.

        most_missed: when more requests than that have missed their SLOs, it ends at once.
        """
        engine, played = self._engine, self.played
        num_evictions, num_drops = engine.num_preemptions, engine.jobs.num_packs_dropped
        end_s = played.seconds + drain_s
        while (
            (now_s := self._now_s()) < played.seconds
            or self._is_due()
            or (self._open and now_s < end_s)
        ):
            if self._num_missed > most_missed:
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
        """Whether a request of the time that counts has not come yet: a step may last beyond the
        end of that time.
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
            except RequestError as error:  # it is longer than the memory
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
        """A request that is not over when the time is."""
        index, now_s = self._open[name], self._now_s()
        if self._times_s[index]:
            # As if its next token came now: who stands still is late by all of that time.
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
        """Nothing could be run: until the next arrival, or the end."""
        upcoming_s = (
            self._trace[self._next].at_s if self._next < len(self._trace) else self.played.seconds
        )
        self._idle(min(max(upcoming_s - self._now_s(), _LEAST_IDLE_S), _IDLE_S))
