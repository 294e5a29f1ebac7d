"""A simulation: an engine on a modelled device, driven through arrivals; an hour of simulated time
takes seconds, and is the same each time.
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
    """A request that arrives at a moment of simulated time."""

    at_s: float
    """Time of arrival."""
    num_prompt_tokens: int
    """Tokens of its prompt."""
    num_output_tokens: int
    """Tokens of its answer."""
    slo: Slo | None = None
    """Its SLO; None for the default."""
    adapter: str | None = None
    """Its adapter; None for the bare model."""
    tenant: str = ""
    """Its tenant."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of a simulation after a step."""

    now_s: float
    """Simulated time."""
    num_running: int
    """Sequences that run."""
    num_waiting: int
    """Sequences that wait."""
    num_tokens_trained: int
    """Tokens that jobs have been trained on so far."""


@lru_cache(maxsize=4096)
def _greedy(num_output_tokens: int) -> SamplingParams:
    """Return the parameters of a greedy request; many requests of a trace share them, and they take
    longer to make than a step.
    """
    return SamplingParams(max_tokens=num_output_tokens, temperature=0.0)


class Simulation:
    """An engine on a `ModelledDevice`, and the arrivals that it is to serve."""

    def __init__(self, engine: TokenEngine, arrivals: Iterable[Arrival], *, seed: int = 0) -> None:
        """Begin at the device's time.

        Args:
            seed: Seed of the prompts' tokens, which no two requests share.
        """
        assert isinstance(engine.device, ModelledDevice)
        self.engine, self._clock = engine, engine.device.clock
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self._next = 0
        self._random = Random(seed)
        self._vocab_size = engine.device.info.vocab_size

    def run(
        self, until_s: float, *, on_event: Callable[[Event], None] | None = None
    ) -> Iterator[Snapshot]:
        """Run until a moment of simulated time, or until nothing is left to do; yields a snapshot
        after every step.
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
            # Traces have millions of tokens, and `randrange` takes several times as long.
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
        """Advance to the next arrival: nothing could be run."""
        now_s = self._clock.now()
        upcoming_s = (
            self._arrivals[self._next].at_s if self._next < len(self._arrivals) else until_s
        )
        # A little at least, so that time passes; a policy may plan something within a second.
        self._clock.advance(min(max(upcoming_s - now_s, 1e-6), _IDLE_S))
