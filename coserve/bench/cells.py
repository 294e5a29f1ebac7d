"""Cells of a comparison: one policy on one trace at one rate, beside jobs, on a place; and the
rates that a place holds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from random import Random
from statistics import mean
from typing import Any

from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.open_loop import OpenLoop, Played
from coserve.bench.places import Place
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.errors import BudgetError
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.policies import policy_class
from coserve.scheduling.slo import SOLO_CONTEXT, Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.workloads.summary import percentile
from coserve.workloads.traces import TracedRequest, rescale

# Share of requests in time that counts as holding the SLOs.
ATTAINMENT = 0.99
# Shares of the saturation.
LOADS = {"light": 0.3, "middle": 0.6, "heavy": 0.9}
ALONE, JOBS_ALONE = "inference-only", "tuning-only"
# The saturation is searched with steps of this factor, then by halving.
_STEP, _NUM_STEPS, _NUM_HALVINGS = 1.5, 14, 3
_SEARCH_REQUESTS, _MIN_SEARCH_S, _MAX_SEARCH_S = 400, 5.0, 120.0
# Lengths are shortened until a long prompt takes at most this share of its SLO alone on the device.
_PROMPT_SHARE, _LONG = 0.5, 0.99

_SOLO = TracedRequest(at_s=0.0, num_prompt_tokens=SOLO_CONTEXT, num_output_tokens=17)
LORA = LoraConfig(r=16, alpha=32, target_modules="all-linear")

# Called with what is being done.
Watch = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Settings of a comparison."""

    policies: tuple[str, ...]
    """Policies by name, or with settings (`policy_of`)."""
    seconds: float
    """Seconds of the trace, for each policy at each rate."""
    drain_s: float = inf
    """Maximum seconds to wait for answers after that."""
    budget_s: float | None = None
    """Seconds for the whole comparison, in place of `seconds` and `drain_s`."""
    ttft_s: float = 5.0
    """SLO: seconds to the first token."""
    tpot_s: float | None = None
    """SLO: mean seconds per later token; None: a multiple of a decode step alone."""
    length_factor: float | None = None
    """Factor of all lengths; None: what the device needs (`fitting_factor`)."""
    num_jobs: int = 1
    """Number of jobs that run at once."""
    batch: int = 4
    """Examples per optimizer step of a job."""
    sequence: int = 512
    """Maximum tokens per example."""
    examples: tuple[Example, ...] = ()
    """Examples of each job; without any, random tokens, `sequence` of them."""
    lora: LoraConfig = LORA
    """Adapter that jobs train."""
    rates: tuple[float, ...] = ()
    """Requests per second; without any, shares of the saturation (`loads`)."""
    loads: tuple[str, ...] = tuple(LOADS)
    """Names of the shares of the saturation, from `LOADS`."""
    seed: int = 0
    """Seed of prompts and examples."""
    handed_over: bool = False
    """Whether prompts come from a prefill instance (`OpenLoop`)."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Result of a policy, or of separate processes, at a rate."""

    policy: str
    """Policy as it was given, or the arrangement of the processes."""
    load: str
    """Name of the load."""
    rate: float
    """Requests per second."""
    played: Played
    """Requests, tokens and steps."""
    slo: Slo
    """SLO of all requests."""
    is_separate: bool = False
    """Whether separate processes ran, which report no evictions."""

    @property
    def attainment(self) -> float:
        """Return the share of requests that held their SLOs; 0 for a policy that answers none."""
        return self.played.attainment(self.slo) or 0.0

    def row(self) -> dict[str, Any]:
        """Return the numbers as JSON; null for those that separate processes do not report."""
        played = self.played
        answered = [outcome for outcome in played.outcomes if outcome.error is None]
        error = played.prediction_error
        return {
            "policy": self.policy,
            "load": self.load,
            "rate": rounded(self.rate),
            "requests": len(played.outcomes),
            "unanswered": len(played.outcomes) - len(answered),
            "attainment": round(self.attainment, 4),
            "goodput_per_s": rounded(self.attainment * len(played.outcomes) / played.seconds),
            **_percentiles("ttft", [outcome.ttft_s for outcome in answered]),
            **_percentiles("tpot", [outcome.tpot_s for outcome in answered]),
            **_percentiles("gap", list(chain.from_iterable(each.gaps_s for each in answered))),
            "inference_tokens_per_s": rounded(played.inference_tokens_per_s),
            "tuning_tokens_per_s": rounded(played.tuning_tokens_per_s),
            "evictions": None if self.is_separate else played.num_evictions,
            "packs_dropped": None if self.is_separate else played.num_drops,
            "prediction_error": None if error is None else round(error, 4),
        }


def _percentiles(name: str, values_s: Sequence[float | None]) -> dict[str, float | None]:
    """Return the median and the p99 of the known times, in milliseconds."""
    known_s = [value for value in values_s if value is not None]
    return {
        f"{name}_p{share}_ms": milliseconds(percentile(known_s, share / 100)) if known_s else None
        for share in (50, 99)
    }


def policy_of(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the settings of a policy, from `NAME` or `NAME:KEY=VALUE:…`."""
    name, *pairs = text.split(":")
    return name, dict(pair.partition("=")[::2] for pair in pairs)


def fitting_factor(trace: Sequence[TracedRequest], latency: LatencyModel, ttft_s: float) -> float:
    """Return the factor of lengths (1, 1/2, 1/4, …) at which a long prompt leaves time for other
    requests.
    """
    longest = percentile([request.num_prompt_tokens for request in trace], _LONG)
    factor = 1.0
    while (
        longest * factor > 1 and latency.prompt_s(round(longest * factor)) > _PROMPT_SHARE * ttft_s
    ):
        factor /= 2
    return factor


def guessed_rate(trace: Sequence[TracedRequest], latency: LatencyModel) -> float:
    """Return a guess of the requests per second that fit, by mean lengths and a batch of 32."""
    prompt = round(mean(request.num_prompt_tokens for request in trace))
    output = mean(request.num_output_tokens for request in trace)
    decode_s = latency.decode_s(num_requests=32, context=prompt) / 32
    return 0.6 / (latency.prompt_s(prompt) + output * decode_s)


class Bench:
    """A place on which cells run one after the other."""

    def __init__(self, place: Place, config: CompareConfig) -> None:
        self.place, self.config = place, config
        self.learned: dict[str, LatencyModel] = {}

    def solo_s(self) -> float:
        """Return the seconds of a decode step of one request alone."""
        slo = Slo(ttft_s=3600.0, tpot_s=3600.0)
        # Twice, since the first run warms the device up.
        played = [self.run(ALONE, [_SOLO], slo, num_jobs=0, seconds=0.1)[0] for _ in range(2)]
        tpots = [each.outcomes[0].tpot_s for each in played]
        return min(tpot_s for tpot_s in tpots if tpot_s is not None)

    def holds(self, trace: Sequence[TracedRequest], slo: Slo, *, seconds: float) -> bool:
        """Return whether requests alone hold the SLOs."""
        # A run ends as soon as its result is certain.
        max_missed = (1 - ATTAINMENT) * len(trace)
        played, _ = self.run(ALONE, trace, slo, num_jobs=0, seconds=seconds, max_missed=max_missed)
        return (played.attainment(slo) or 0.0) >= ATTAINMENT

    def saturation(self, trace: Sequence[TracedRequest], slo: Slo) -> float:
        """Return the highest rate, to 5%, at which requests alone hold the SLOs.

        Raises:
            BudgetError: There is no such rate.
        """

        def holds(rate: float) -> bool:
            seconds = min(max(_SEARCH_REQUESTS / rate, _MIN_SEARCH_S), _MAX_SEARCH_S)
            return self.holds(rescale(trace, rate=rate, seconds=seconds), slo, seconds=seconds)

        rate = guessed_rate(trace, self.place.latency)
        held, lost = (rate, inf) if holds(rate) else (0.0, rate)
        for _ in range(_NUM_STEPS):
            if held and lost < inf:
                break
            rate = held * _STEP if held else lost / _STEP
            held, lost = (rate, lost) if holds(rate) else (held, rate)
        if not held:
            raise BudgetError(
                f"requests alone do not hold a TTFT of {slo.ttft_s:g} s and a TPOT of "
                f"{1e3 * slo.tpot_s:.3g} ms on {self.place.name} at any rate down to "
                f"{lost:.2g}/s: relax the SLOs, or shorten the requests"
            )
        for _ in range(_NUM_HALVINGS):
            # Halving on a logarithmic scale: the error is relative.
            rate = (held * lost) ** 0.5 if lost < inf else held
            held, lost = (rate, lost) if holds(rate) else (held, rate)
        return held

    def cells(
        self, trace: Sequence[TracedRequest], slo: Slo, rates: dict[str, float], watch: Watch
    ) -> Iterator[Cell]:
        """Yield every policy at every rate.

        Jobs alone train the same at every rate, and run once. `learned` then has the latency model
        of each policy's first engine.
        """
        jobs_alone: Played | None = None
        for load, rate in rates.items():
            for policy in self.config.policies:
                if policy != JOBS_ALONE:
                    watch(f"{policy}, {load}: {rate:.3g} requests/s")
                    played, engine = self.run(
                        policy, rescale(trace, rate=rate, seconds=self.config.seconds), slo
                    )
                    self.learned.setdefault(policy, engine.latency)
                else:
                    if jobs_alone is None:
                        watch(f"{policy}: no requests")
                        jobs_alone, engine = self.run(policy, [], slo)
                        self.learned[policy] = engine.latency
                    played = jobs_alone
                yield Cell(policy=policy, load=load, rate=rate, played=played, slo=slo)

    def run(
        self,
        policy: str,
        trace: Sequence[TracedRequest],
        slo: Slo,
        *,
        num_jobs: int | None = None,
        seconds: float | None = None,
        max_missed: float = inf,
    ) -> tuple[Played, TokenEngine]:
        """Play a trace under one policy, and return the result and the engine, which has ended."""
        name, settings = policy_of(policy)
        config = EngineConfig(
            policy=name, policy_settings=settings, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s
        )
        engine = self.place.open(config)
        self._submit_jobs(engine, name, self.config.num_jobs if num_jobs is None else num_jobs)
        longest = max([request.num_output_tokens for request in trace], default=0)
        loop = OpenLoop(
            engine,
            trace,
            slo=slo,
            seconds=self.config.seconds if seconds is None else seconds,
            idle=lambda pause_s: self.place.idle(engine, pause_s),
            seed=self.config.seed,
            handed_over=self.config.handed_over,
        )
        # An answer that takes longer than this has missed its SLO in any case.
        drain_s = min(self.config.drain_s, slo.ttft_s + 1.5 * longest * slo.tpot_s)
        played = loop.run(drain_s=drain_s, max_missed=max_missed)
        self.place.close(engine)
        return played, engine

    def _submit_jobs(self, engine: TokenEngine, policy: str, number: int) -> None:
        """Submit jobs with packs of the usual size.

        A policy that runs whole passes gets the smallest packs, of one example, since requests wait
        for their ends.
        """
        config = self.config
        random, vocab = Random(config.seed), range(engine.device.info.vocab_size)
        for index in range(number):
            examples = config.examples or tuple(
                Example(
                    tokens=tuple(random.choices(vocab, k=config.sequence)),
                    trained=(True,) * config.sequence,
                )
                for _ in range(64)
            )
            longest = max([len(example.tokens) for example in examples])
            tuning = TuningConfig(
                num_epochs=100_000,
                batch_size=config.batch,
                max_sequence_length=config.sequence,
                max_pack_tokens=max(2, longest) if policy_class(policy).runs_whole_passes else None,
                seed=index,
            )
            engine.submit_examples(examples, tuning, adapter=config.lora)


def rounded(value: float) -> float:
    """Return a number with four significant digits."""
    return float(f"{value:.4g}")


def milliseconds(value_s: float) -> float:
    """Return seconds in milliseconds, rounded to the microsecond."""
    return round(1e3 * value_s, 3)
