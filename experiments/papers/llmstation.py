"""Figures of LLMStation, section 6, on modelled RTX 3090s and H100s.

Requests have the lengths of ShareGPT's first turns, and the job trains a LoRA of rank 16 on Alpaca.
As in the paper, each baseline is tuned: of its settings the one counts that trains most while both
SLOs are held at p99; 0 where none does. vLLM beside torchtune is two processes on fixed parts of
the devices, each with its copy of the weights; for the 70B, of which a server's memory holds one
copy, it is a server for each, as FineInfer is. torchtune divides weights among devices by FSDP (its
recipe `lora_finetune_distributed`), so that every pass gathers them. Figure 12 is in `here`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean

from coserve.bench.open_loop import Played
from coserve.errors import BudgetError
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import H100, RTX3090, Hardware
from coserve.workloads.traces import TracedRequest
from experiments.papers.setting import (
    Claim,
    Data,
    Figure,
    Row,
    Setting,
    Task,
    between,
    p99_ms,
    ratio,
    weight_bytes,
)

_OURS, _COSERVE, _FINEINFER, _APART, _CHUNKED = (
    "LLMStation",
    "coserve",
    "FineInfer",
    "vLLM + torchtune",
    "chunked",
)
# Examples of a device, in torchtune's configurations; all systems make as many of an optimizer
# step.
_TORCHTUNE_BATCH = 2
# By system, the policy here and the settings that are tried.
_SYSTEMS = {
    _OURS: [
        f"llmstation:decode_share={share}:deferral={bound}"
        for share in (0.75, 1.0)
        for bound in (0.1, 0.5)
    ],
    _FINEINFER: [f"fineinfer:deferral={bound}" for bound in (0.05, 0.25, 0.5, 0.9)],
    _CHUNKED: [f"chunked-training:chunk_tokens={number}" for number in (64, 128, 256, 512, 1024)],
    _COSERVE: ["slack"],
}
_RIVALS = (_FINEINFER, _APART, _CHUNKED)
# LLMStation over each of them at 0.5 requests/s and less (8B, 13B), and at most (70B).
_PAPER_SMALL = {_FINEINFER: (2.38, 8.17), _APART: (2.53, 14.77), _CHUNKED: (1.57, 2.18)}
_PAPER_LARGE = {_FINEINFER: 1.77, _APART: 1.8, _CHUNKED: 1.38}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the paper."""

    name: str
    """Name of the model."""
    hardware: Hardware
    """Each device."""
    num_ranks: int
    """Number of devices that hold the model together."""
    tpot_s: float
    """SLO: mean seconds per later token."""
    rates: tuple[float, ...]
    """Requests per second, in figure 9 i."""
    tpots_s: tuple[float, ...]
    """SLOs, in figure 9 ii."""
    num_servers: int = 1
    """Number of servers, each of which holds the model."""

    def setting(self, data: Data, *, ttft_s: float = 0.5, tpot_s: float | None = None) -> Setting:
        slo = Slo(ttft_s=ttft_s, tpot_s=self.tpot_s if tpot_s is None else tpot_s)
        return Setting(
            model=self.name,
            hardware=self.hardware,
            num_ranks=self.num_ranks,
            slo=slo,
            batch=_TORCHTUNE_BATCH * self.num_ranks,
            examples=data.alpaca(),
        )


_MODELS = (
    Model(
        name="llama-3.1-8b",
        hardware=RTX3090,
        num_ranks=2,
        tpot_s=0.05,
        rates=(0.25, 0.5, 1, 2, 4, 8),
        tpots_s=(0.04, 0.05, 0.075, 0.1, 0.15),
    ),
    Model(
        name="llama-2-13b",
        hardware=RTX3090,
        num_ranks=4,
        tpot_s=0.08,
        rates=(0.25, 0.5, 1, 2, 4, 8),
        tpots_s=(0.05, 0.08, 0.1, 0.15, 0.2),
    ),
    Model(
        name="llama-3.1-70b",
        hardware=H100,
        num_ranks=4,
        tpot_s=0.08,
        rates=(0.5, 1, 2, 4, 8, 16),
        tpots_s=(0.05, 0.08, 0.1, 0.15, 0.2),
        num_servers=2,
    ),
)
_BY_NAME = {model.name: model for model in _MODELS}
_BURST_RATE, _CALM_RATE = 4.15, 0.88
_TTFTS_S = (0.25, 0.5, 1.0, 2.0)


def _best(
    model: Model,
    setting: Setting,
    trace: Callable[[float], Sequence[TracedRequest]],
    rate: float,
    data: Data,
) -> dict[str, float]:
    """Return the tuning tokens/s of each tuned system; `trace` gives one server's requests at a
    rate.
    """
    share = trace(rate / model.num_servers)
    result = {}
    for system, policies in _SYSTEMS.items():
        if system == _FINEINFER and model.num_servers > 1:
            continue
        runs = [setting.run(policy, share, data.seconds) for policy in policies]
        held = [played.tuning_tokens_per_s for played in runs if setting.holds(played)]
        result[system] = model.num_servers * max(held, default=0.0)
    if model.num_servers > 1:
        # One server for requests, the other for tuning, as long as one is enough.
        enough = setting.holds(setting.requests_alone(trace(rate), data.seconds))
        result[_FINEINFER] = setting.tuning_alone() if enough else 0.0
        result[_APART] = _torchtune(setting) if enough else 0.0
    else:
        # The smallest part on which requests hold their SLOs leaves most for tuning.
        enough_for = (
            tuning for played, tuning in _parts(setting, share, data) if setting.holds(played)
        )
        result[_APART] = next(enough_for, 0.0)
    return result


def _torchtune(setting: Setting) -> float:
    """Return tokens/s on all devices, each of which has its own examples; the longer of gathering
    and computing counts.

    Memory is no limit: what a device has no room for the others hold.
    """
    num_ranks, link = setting.num_ranks, setting.hardware.link
    assert link is not None
    roomy = replace(setting.hardware, memory_bytes=num_ranks * setting.hardware.memory_bytes)
    computed = replace(setting, hardware=roomy, num_ranks=1, batch=_TORCHTUNE_BATCH).tuning_alone()
    num_tokens = _TORCHTUNE_BATCH * mean(len(example.tokens) for example in setting.examples)
    gather_s = 2 * link.gather_s(weight_bytes(setting.model), num_ranks)
    return num_ranks * num_tokens / max(num_tokens / computed, gather_s)


def _parts(
    setting: Setting, trace: Sequence[TracedRequest], data: Data
) -> Iterator[tuple[Played, float]]:
    """Yield the result of requests on each fixed part of the device, the smallest first, and the
    tokens/s of jobs on the other.
    """
    for units in range(1, setting.hardware.num_units):
        requests, jobs = setting.on_parts(units)
        try:
            played = requests.requests_alone(trace, data.seconds)
        except BudgetError:  # no room for two copies
            return
        yield played, _torchtune_on(setting.model, jobs.hardware, data)


@cache
def _torchtune_on(model: str, hardware: Hardware, data: Data) -> float:
    return _torchtune(replace(_BY_NAME[model].setting(data), hardware=hardware))


def _rows(model: Model, key: str, value: float, found: dict[str, float]) -> list[Row]:
    return [
        {
            "model": model.name,
            key: value,
            "system": system,
            "tuning_tokens_per_s": round(tuning),
            "llmstation_over_it": ratio(found[_OURS], tuning),
        }
        for system, tuning in found.items()
    ]


def _at_rate(model: Model, rate: float, data: Data) -> list[Row]:
    return _rows(model, "rate", rate, _best(model, model.setting(data), data.steady, rate, data))


def _at_tpot(model: Model, tpot_s: float, data: Data) -> list[Row]:
    setting = model.setting(data, tpot_s=tpot_s)
    return _rows(model, "tpot_s", tpot_s, _best(model, setting, data.bursts, _BURST_RATE, data))


def _at_ttft(model: Model, ttft_s: float, data: Data) -> list[Row]:
    setting = model.setting(data, ttft_s=ttft_s)
    return _rows(model, "ttft_s", ttft_s, _best(model, setting, data.bursts, _BURST_RATE, data))


def _tasks_rates(data: Data) -> list[Task]:
    return [partial(_at_rate, model, rate, data) for model in _MODELS for rate in model.rates]


def _claims_rates(rows: list[Row]) -> list[Claim]:
    claims = []
    for rival in _RIVALS:
        low, high = _PAPER_SMALL[rival]
        own = [
            row["llmstation_over_it"]
            for row in rows
            if row["model"] != _MODELS[-1].name and row["system"] == rival and row["rate"] <= 0.5
        ]
        known = [each for each in own if each]
        claims.append(
            Claim(
                f"8B and 13B at 0.5 requests/s and less: LLMStation over {rival}",
                f"{low} to {high}",
                between(known) + (", and where it trains nothing" if len(known) < len(own) else ""),
                bool(known) and min(known) > 1,
            )
        )
        large = [
            row["llmstation_over_it"]
            for row in rows
            if row["model"] == _MODELS[-1].name and row["system"] == rival
        ]
        known = [each for each in large if each]
        claims.append(
            Claim(
                f"70B: LLMStation over {rival}, at most",
                f"{_PAPER_LARGE[rival]}",
                between(known),
                max(known) > 1,
            )
        )
    for model in _MODELS[:2]:
        of = {
            system: [
                row["tuning_tokens_per_s"]
                for row in rows
                if row["model"] == model.name and row["system"] == system
            ]
            for system in (*_RIVALS, _OURS, _COSERVE)
        }
        first = {
            system: next((i for i, each in enumerate(own) if each < 0.1 * own[0]), len(own))
            for system, own in of.items()
        }
        claims.append(
            Claim(
                f"{model.name}: FineInfer falls below a tenth of what it trains at the lowest rate "
                f"first",
                "it does",
                ", ".join(f"{system} from the {first[system] + 1}. rate on" for system in first),
                all(
                    first[_FINEINFER] < each
                    for system, each in first.items()
                    if system != _FINEINFER
                ),
            )
        )
    pairs = [
        (row["tuning_tokens_per_s"], other["tuning_tokens_per_s"])
        for row in rows
        if row["system"] == _COSERVE
        for other in rows
        if other["system"] == _OURS
        and (other["model"], other["rate"]) == (row["model"], row["rate"])
    ]
    both = [round(ours / theirs, 2) for ours, theirs in pairs if theirs]
    claims.append(Claim("coserve over LLMStation (not in the paper)", "", between(both), None))
    return claims


def _tasks_slos(data: Data) -> list[Task]:
    tasks: list[Task] = [
        partial(_at_tpot, model, tpot_s, data) for model in _MODELS for tpot_s in model.tpots_s
    ]
    return tasks + [partial(_at_ttft, _MODELS[0], ttft_s, data) for ttft_s in _TTFTS_S]


def _claims_slos(rows: list[Row]) -> list[Claim]:
    claims = []
    for model in _MODELS:
        own = {
            tpot_s: {
                row["system"]: row["tuning_tokens_per_s"]
                for row in rows
                if row["model"] == model.name and row.get("tpot_s") == tpot_s
            }
            for tpot_s in model.tpots_s
        }
        over = [ratio(found[_OURS], found[_CHUNKED]) for found in own.values()]
        known = [each for each in over if each]
        claims.append(
            Claim(
                f"{model.name}: with a looser TPOT SLO chunked training comes near to LLMStation",
                "very close at the loosest",
                "LLMStation over it " + ", ".join(f"{each}" for each in over),
                len(known) > 1 and abs(known[-1] - 1) < abs(known[0] - 1),
            )
        )
        trained = [found[_OURS] for found in own.values()]
        claims.append(
            Claim(
                f"{model.name}: LLMStation trains more, the looser the TPOT SLO",
                "it does",
                ", ".join(f"{each}" for each in trained),
                trained == sorted(trained) and trained[0] < trained[-1],
            )
        )
    strict = [
        row["tuning_tokens_per_s"] for row in rows if "ttft_s" in row and row["system"] == _OURS
    ]
    claims.append(
        Claim(
            "8B: a strict TTFT SLO limits LLMStation",
            "it does",
            ", ".join(map(str, strict)),
            strict[0] < max(strict),
        )
    )
    return claims


# -- figure 10 --------------------------------------------------------------------------------

_TRADED = {
    _OURS: [
        f"llmstation:decode_share={share}:deferral={bound}"
        for share in (0.25, 0.5, 0.75, 0.9)
        for bound in (0.1, 0.5, 0.9)
    ],
    _FINEINFER: [
        f"fineinfer:deferral={bound}" for bound in (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
    ],
    _CHUNKED: [
        f"chunked-training:chunk_tokens={number}" for number in (16, 32, 64, 128, 256, 512, 1024)
    ],
    _COSERVE: ["slack"],
}
# SLOs by which policies are paced, of which figure 10 holds none.
_PACES_S = (0.03, 0.05, 0.1, 0.2)


def _traded(system: str, data: Data) -> list[Row]:
    """Run every setting of a system, and return its tuning throughput and the waiting times of
    requests.
    """
    trace, rows = data.bursts(_CALM_RATE), []
    paced = system in (_OURS, _COSERVE)
    for tpot_s in _PACES_S if paced else _PACES_S[1:2]:
        setting = _MODELS[0].setting(data, tpot_s=tpot_s)
        if system == _APART:
            played = [
                (f"{n + 1} units", *found) for n, found in enumerate(_parts(setting, trace, data))
            ]
        else:
            runs = [
                (policy, setting.run(policy, trace, data.seconds)) for policy in _TRADED[system]
            ]
            played = [(policy, run, run.tuning_tokens_per_s) for policy, run in runs]
        for name, run, tuning in played:
            rows.append(
                {
                    "system": system,
                    "setting": f"{name}, {1e3 * tpot_s:g} ms" if paced else name,
                    "tuning_tokens_per_s": round(tuning),
                    "ttft_p99_ms": p99_ms(run, "ttft_s"),
                    "tpot_p99_ms": p99_ms(run, "tpot_s"),
                }
            )
    return rows


def _claims_traded(rows: list[Row]) -> list[Claim]:
    """Compare LLMStation's minimum latency with that of each setting of a rival, at the same tuning
    throughput.
    """
    paper = {_FINEINFER: ("33.13", "2.29"), _APART: ("52.64", "362.49"), _CHUNKED: ("1.4", "1.29")}
    claims = []
    for rival in _RIVALS:
        for index, what in enumerate(("ttft_p99_ms", "tpot_p99_ms")):
            ratios = []
            for row in rows:
                own = [
                    each[what]
                    for each in rows
                    if each["system"] == _OURS
                    and each["tuning_tokens_per_s"] >= 0.98 * row["tuning_tokens_per_s"]
                ]
                if row["system"] == rival and own and row[what]:
                    ratios.append(round(row[what] / min(own), 2))
            claims.append(
                Claim(
                    f"{what[:4].upper()} p99 of {rival} over LLMStation's at the same tuning",
                    f"up to {paper[rival][index]}",
                    between(ratios),
                    bool(ratios) and max(ratios) > 1,
                )
            )
    return claims


FIGURES = {
    "llmstation-9i": Figure("tuning by request rate", _tasks_rates, _claims_rates),
    "llmstation-9ii": Figure(
        "tuning by SLO, at 4.15 requests/s in bursts", _tasks_slos, _claims_slos
    ),
    "llmstation-10": Figure(
        "latency by tuning, at 0.88 requests/s in bursts",
        lambda data: [partial(_traded, system, data) for system in (*_TRADED, _APART)],
        _claims_traded,
    ),
}
