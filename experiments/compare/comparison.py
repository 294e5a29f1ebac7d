"""Comparison of every policy on one trace and one mix of jobs, with the same SLOs, at a light, a
middle and a heavy rate.

The SLO for the time per output token is 2.5 times a decode step of one request alone. The
saturation is the highest rate at which requests alone hold both SLOs in 99 of 100 cases, found on
the device's model and, if the device is here, tried on it. Beside each measured number is that of
the model for the same cell, so that its error is known: by the profile, the warm-up, and the times
of the policy's own steps at the first of the rates. Separate processes on the same machine get the
same trace at the same rates.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING, Any

from coserve.bench.cells import (
    ALONE,
    ATTAINMENT,
    JOBS_ALONE,
    LOADS,
    Bench,
    Cell,
    CompareConfig,
    Watch,
    fitting_factor,
    guessed_rate,
    milliseconds,
    policy_of,
    rounded,
)
from coserve.bench.places import ModelledPlace, TorchPlace
from coserve.errors import BudgetError
from coserve.models.backbone import Backbone
from coserve.scheduling.policies import DEFAULT_POLICY, policy_class
from coserve.scheduling.slo import DEFAULT_TPOT_STEPS, Slo
from coserve.workloads.traces import TracedRequest, rescale, scale_lengths
from experiments.worker_processes import worker_processes

if TYPE_CHECKING:
    from experiments.compare.separate import Ended, SeparateProcesses

# On a device that is here, a rate that it does not hold is lowered by this factor, at most as
# often.
_LOWERED, _NUM_LOWERED = 0.85, 3
# Less says nothing.
_MIN_CELL_S = 4.0
# Where time is short, answers are waited for this share of a cell's time.
_DRAIN_SHARE = 0.4
# Until two separate processes are ready; and what the last sequence that they train takes beyond a
# cell's time.
_START_S, _LAST_SEQUENCE_S = 40.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Result of a comparison on a place."""

    place: str
    """Name of the place."""
    slo: Slo
    """SLO of all requests."""
    solo_s: float
    """Seconds of a decode step of one request alone."""
    length_factor: float
    """Factor of all lengths."""
    saturation: float | None
    """Highest rate that requests alone hold; None: rates were given."""
    seconds: float
    """Seconds of the trace, in each cell."""
    cells: Sequence[Cell]
    """Cells."""
    modelled: Sequence[Cell] = ()
    """The same cells on the device's model, if that was requested."""
    ended: Sequence["Ended"] = ()
    """Separate processes that ended before all rates were run."""

    def result(self) -> dict[str, Any]:
        """Return the result as JSON."""
        rows = [cell.row() for cell in self.cells]
        for row, cell in zip(rows, self.modelled, strict=False):
            row["modelled"] = {name: cell.row()[name] for name in _MODELLED}
        return {
            "place": self.place,
            "slo_ttft_ms": milliseconds(self.slo.ttft_s),
            "slo_tpot_ms": milliseconds(self.slo.tpot_s),
            "solo_step_ms": milliseconds(self.solo_s),
            "length_factor": self.length_factor,
            "seconds": rounded(self.seconds),
            "saturation_rate": None if self.saturation is None else rounded(self.saturation),
            "against_rivals": list(self._against_rivals()),
            **self._against_separate(),
            **({"ended": [asdict(each) for each in self.ended]} if self.ended else {}),
            **({"model_error": self._model_error()} if self.modelled else {}),
            "rows": rows,
        }

    def _against_rivals(self) -> Iterator[dict[str, Any]]:
        """Yield, for each rate, the default policy's tuning throughput over that of the best rival
        that holds the SLOs; variants of the default are no rivals.
        """
        for rate in dict.fromkeys(cell.rate for cell in self.cells):
            by_policy = {
                cell.policy: cell
                for cell in self.cells
                if cell.rate == rate and not cell.is_separate
            }
            ours = by_policy.get(DEFAULT_POLICY)
            if ours is None:
                continue
            alone = by_policy[ALONE].attainment if ALONE in by_policy else None
            yield {
                "load": ours.load,
                "rate": rounded(rate),
                "attainment": round(ours.attainment, 4),
                "inference_only_attainment": None if alone is None else round(alone, 4),
                **_over_best(
                    ours, [cell for policy, cell in by_policy.items() if not _is_variant(policy)]
                ),
            }

    def _against_separate(self) -> dict[str, Any]:
        """Return the same against the best arrangement of separate processes that holds the SLOs,
        if they ran.
        """
        if not any(cell.is_separate for cell in self.cells):
            return {}
        rows = []
        for rate in dict.fromkeys(cell.rate for cell in self.cells):
            ours = next(
                (
                    each
                    for each in self.cells
                    if each.rate == rate and each.policy == DEFAULT_POLICY
                ),
                None,
            )
            if ours is not None:
                rivals = [cell for cell in self.cells if cell.rate == rate and cell.is_separate]
                rows.append({"load": ours.load, "rate": rounded(rate), **_over_best(ours, rivals)})
        return {"against_separate": rows}

    def _model_error(self) -> dict[str, float | None]:
        """Return the mean errors of the model, as shares of the measured numbers, over all cells
        that have them.
        """
        errors: dict[str, float | None] = {}
        policies = [cell for cell in self.cells if not cell.is_separate]
        for name in ("tuning_tokens_per_s", "ttft_p99_ms", "tpot_p99_ms"):
            pairs = [
                (m.row()[name], c.row()[name]) for m, c in zip(self.modelled, policies, strict=True)
            ]
            shares = [
                abs(theirs - ours) / ours for theirs, ours in pairs if theirs is not None and ours
            ]
            errors[name] = round(mean(shares), 4) if shares else None
        return errors


_MODELLED = (
    "attainment",
    "ttft_p99_ms",
    "tpot_p99_ms",
    "inference_tokens_per_s",
    "tuning_tokens_per_s",
)


def compare(
    place: ModelledPlace | TorchPlace,
    trace: Sequence[TracedRequest],
    config: CompareConfig,
    *,
    shapes: Backbone | None = None,
    separate: "SeparateProcesses | None" = None,
    workers: int = 1,
    watch: Watch = lambda words: None,
) -> Compared:
    """Run a comparison.

    Args:
        place: The device.
        trace: Arrivals and lengths.
        config: Settings.
        shapes: Model on the "meta" device, for the model of a device that is here.
        separate: Separate processes to compare with.
        workers: Number of processes that run the cells of a modelled device.
        watch: Function that is called with what is being done.

    Raises:
        BudgetError: Requests alone hold the SLOs at no rate.
    """
    watch("a decode step alone")
    solo_s = Bench(place, config).solo_s()
    slo = Slo(ttft_s=config.ttft_s, tpot_s=config.tpot_s or DEFAULT_TPOT_STEPS * solo_s)
    factor = config.length_factor or fitting_factor(trace, place.latency, slo.ttft_s)
    trace = scale_lengths(trace, factor)
    if config.budget_s is not None:
        seconds = _affordable_s(config, config.budget_s, separate)
        config = replace(config, seconds=seconds, drain_s=_DRAIN_SHARE * seconds)
    bench, twin = Bench(place, config), None
    if isinstance(place, TorchPlace):
        assert shapes is not None
        watch("warming up: the latency model sees steps of every kind")
        twin = Bench(place.modelled(shapes), config)
        warm_rate = (
            mean(config.rates)
            if config.rates
            else LOADS["middle"] * _modelled_saturation(twin, trace, slo, solo_s)
        )
        place.learn(
            bench.run(DEFAULT_POLICY, rescale(trace, rate=warm_rate, seconds=config.seconds), slo)[
                1
            ]
        )
        twin = Bench(place.modelled(shapes), config)
    saturation, rates = None, {f"{rate:g}/s": rate for rate in config.rates}
    if not rates:
        watch("the rate at which requests alone just hold the SLOs")
        if twin is None:
            saturation = bench.saturation(trace, slo)
        else:
            saturation = _tried(bench, trace, slo, _modelled_saturation(twin, trace, slo, solo_s))
        rates = {load: LOADS[load] * saturation for load in config.loads}
    if isinstance(place, ModelledPlace) and workers > 1:
        cells = list(_cells_apart(place, config, trace, slo, rates, workers, watch))
    else:
        cells = list(bench.cells(trace, slo, rates, watch))
    ended: list[Ended] = []
    if separate is not None:
        for each in separate.cells(trace, slo, rates, config, place.latency, watch):
            if isinstance(each, Cell):
                cells.append(each)
            else:
                ended.append(each)
    modelled: list[Cell] = []
    if isinstance(place, TorchPlace) and shapes is not None:
        twins = [
            Bench(
                place.modelled(shapes, bench.learned[policy]), replace(config, policies=(policy,))
            )
            for policy in config.policies
        ]
        columns = [list(each.cells(trace, slo, rates, lambda words: None)) for each in twins]
        modelled = [cell for of_rate in zip(*columns, strict=True) for cell in of_rate]
    return Compared(
        place=place.name,
        slo=slo,
        solo_s=solo_s,
        length_factor=factor,
        saturation=saturation,
        seconds=config.seconds,
        cells=cells,
        modelled=modelled,
        ended=ended,
    )


def _cells_apart(
    place: ModelledPlace,
    config: CompareConfig,
    trace: Sequence[TracedRequest],
    slo: Slo,
    rates: dict[str, float],
    workers: int,
    watch: Watch,
) -> Iterator[Cell]:
    """Yield the cells of `Bench.cells` from several processes: on a modelled device, cells are
    independent.
    """
    wanted = list(product(rates, config.policies))
    futures: dict[tuple[str, str], Future[Cell]] = {}
    with worker_processes(workers) as pool:
        for load, policy in wanted:
            if policy == JOBS_ALONE and load != wanted[0][0]:
                futures[load, policy] = futures[wanted[0][0], policy]
            else:
                one = replace(config, policies=(policy,))
                futures[load, policy] = pool.submit(
                    _cell, place, one, trace, slo, load, rates[load]
                )
        for load, policy in wanted:
            watch(f"{policy}, {load}: {rates[load]:.3g} requests/s")
            yield replace(futures[load, policy].result(), load=load, rate=rates[load])


def _cell(
    place: ModelledPlace,
    config: CompareConfig,
    trace: Sequence[TracedRequest],
    slo: Slo,
    load: str,
    rate: float,
) -> Cell:
    (cell,) = Bench(place, config).cells(trace, slo, {load: rate}, lambda words: None)
    return cell


def _is_variant(policy: str) -> bool:
    return issubclass(policy_class(policy_of(policy)[0]), policy_class(DEFAULT_POLICY))


def _over_best(ours: Cell, rivals: Sequence[Cell]) -> dict[str, Any]:
    """Return the tuning throughput over that of the best rival that holds the SLOs."""
    holding = [cell for cell in rivals if cell.attainment >= ATTAINMENT]
    best = max(holding, key=lambda cell: cell.played.tuning_tokens_per_s, default=None)
    mine, theirs = (
        ours.played.tuning_tokens_per_s,
        best.played.tuning_tokens_per_s if best is not None else 0.0,
    )
    return {
        "tuning_tokens_per_s": rounded(mine),
        "best_rival": best.policy if best is not None and theirs else None,
        "ratio": rounded(mine / theirs) if theirs else None,
    }


def _modelled_saturation(
    twin: Bench, trace: Sequence[TracedRequest], slo: Slo, solo_s: float
) -> float:
    """Return the saturation of a device's model, or a guess to try on the device if only the model
    holds no rate.

    Another process may have slowed the profile or the warm-up.

    Args:
        twin: The model of the device.
        trace: Arrivals and lengths.
        slo: SLO of all requests.
        solo_s: Seconds of a step alone on the device.

    Raises:
        BudgetError: The device itself cannot hold the SLO of a step alone.
    """
    try:
        return twin.saturation(trace, slo)
    except BudgetError:
        if solo_s > slo.tpot_s:
            raise
        return guessed_rate(trace, twin.place.latency)


def _tried(bench: Bench, trace: Sequence[TracedRequest], slo: Slo, rate: float) -> float:
    """Return a saturation whose heavy rate the device here holds."""
    seconds = bench.config.seconds
    for _ in range(_NUM_LOWERED):
        if bench.holds(
            rescale(trace, rate=LOADS["heavy"] * rate, seconds=seconds), slo, seconds=seconds
        ):
            break
        rate *= _LOWERED
    return rate


def _affordable_s(
    config: CompareConfig, budget_s: float, separate: "SeparateProcesses | None"
) -> float:
    """Return the seconds of the trace per cell with which all cells fit a budget, with the answers
    at their ends, the warm-up and the search.
    """
    others = [policy for policy in config.policies if policy != JOBS_ALONE]
    num_rates, arrangements = (
        len(config.rates or config.loads),
        separate.arrangements() if separate else [],
    )
    num_cells = (
        (len(others) + len(arrangements)) * num_rates + (len(others) < len(config.policies)) + 3
    )
    budget_s -= (_START_S + num_rates * _LAST_SEQUENCE_S) * len(arrangements)
    return max(_MIN_CELL_S, budget_s / num_cells / (1 + _DRAIN_SHARE))
