"""Drives an engine on a modelled device through arrivals: an hour of simulated time in seconds, the
same each time.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import msgspec

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.outbox import Event
from coserve.engine.token_engine import TokenEngine
from coserve.scheduling.slo import Slo
from coserve.simulate.modelled_device import ModelledDevice

# A device with nothing to do looks for work this often.
_IDLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that comes at a moment of simulated time, with its numbers of tokens."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo: Slo | None = None
    adapter: str | None = None
    tenant: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A simulation after a step."""

    now_s: float
    num_running: int
    num_waiting: int
    num_tokens_trained: int


@lru_cache(maxsize=4096)
def _greedy(num_output_tokens: int) -> SamplingParams:
    """Many requests of a trace have the same, which take longer to make than a step."""
    return SamplingParams(max_tokens=num_output_tokens, temperature=0.0)


class Simulation:
    """An engine core on a `ModelledDevice`, and the arrivals that it is to serve."""

    def __init__(self, engine: TokenEngine, arrivals: Iterable[Arrival], *, seed: int = 0) -> None:
        """seed: of the prompts' tokens, which no two requests share."""
        assert isinstance(engine.device, ModelledDevice)
        self.engine, self._clock = engine, engine.device.clock
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self._next = 0
        self._random = Random(seed)
        self._vocab_size = engine.device.info.vocab_size

    def run(
        self, until_s: float, *, on_event: Callable[[Event], None] | None = None
    ) -> Iterator[Snapshot]:
        """Run to a moment of simulated time, or until nothing is left to do; a snapshot after every
        step.
        """
        engine = self.engine
        while self._clock.now() < until_s:
            self._arrive()
            if not engine.has_work:
                if self._next == len(self._arrivals):
                    return
                self._clock.advance(max(0.0, self._arrivals[self._next].at_s - self._clock.now()))
                continue
            for event in engine.step():
                if on_event is not None:
                    on_event(event)
            if engine.last_plan.runs_nothing:
                self._wait(until_s)
            yield Snapshot(
                now_s=self._clock.now(),
                num_running=len(engine.requests.running),
                num_waiting=len(engine.requests.waiting),
                num_tokens_trained=engine.jobs.num_tokens_trained,
            )

    def _arrive(self) -> None:
        now_s = self._clock.now()
        while self._next < len(self._arrivals) and self._arrivals[self._next].at_s <= now_s:
            arrival = self._arrivals[self._next]
            self._next += 1
            draw, num_ids = self._random.random, self._vocab_size
            self.engine.add_tokens(
                [int(draw() * num_ids) for _ in range(arrival.num_prompt_tokens)],
                _greedy(arrival.num_output_tokens),
                slo=arrival.slo,
                adapter=arrival.adapter,
                arrival_s=arrival.at_s,
                tenant=arrival.tenant,
            )

    def _wait(self, until_s: float) -> None:
        """Nothing could be run: time moves on to the next arrival."""
        now_s = self._clock.now()
        upcoming_s = (
            self._arrivals[self._next].at_s if self._next < len(self._arrivals) else until_s
        )
        self._clock.advance(min(max(upcoming_s - now_s, 1e-6), _IDLE_S))
