"""Which jobs go backward as one batch of rows, as `/metrics` and `coserve jobs` say it."""

import json
from typing import Any

from coserve.cli.main import app
from coserve.engine.records import EngineStats
from coserve.protocol.messages import StepReport
from coserve.scheduling.slo import Slo
from coserve.server.observability.metrics import Metrics
from coserve.server.tenancy.ledger import RequestLedger

GROUPS = (("ftjob-a", "ftjob-c", "ftjob-d"), ("ftjob-b", "ftjob-e"))


def stats_of(*groups: tuple[str, ...]) -> EngineStats:
    counts: dict[str, Any] = dict.fromkeys(
        (
            "num_running",
            "num_waiting",
            "num_jobs",
            "num_jobs_running",
            "num_steps",
            "num_tokens_trained",
        ),
        0,
    )
    counts |= dict.fromkeys(
        ("num_preemptions", "num_packs_dropped", "num_pages", "num_pages_free"), 0
    )
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    return EngineStats(
        num_pages_by_owner={}, margin=0.0, num_slos_clamped=0, slo=slo, joined_jobs=groups, **counts
    )


def company(metrics: Metrics) -> dict[str, tuple[str, float]]:
    """Of each job that has any: its group, and how many others there are in it."""
    return {
        sample.labels["job"]: (sample.labels["group"], sample.value)
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "coserve_job_company"
    }


def test_metrics_say_with_whom_each_job_is_fused():
    metrics = Metrics(RequestLedger())
    metrics.engine_reported(StepReport(stats=stats_of(*GROUPS)))
    assert company(metrics) == {
        job: (group[0], len(group) - 1) for group in GROUPS for job in group
    }
    metrics.engine_reported(StepReport(stats=stats_of(GROUPS[1])))
    assert company(metrics).keys() == set(GROUPS[1]), "those that have none now are gone"
    metrics.engine_gone()
    assert not company(metrics)


class _Client:
    """A server with jobs that are fused."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __enter__(self) -> "_Client":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def get(self, path: str, **query: object) -> dict[str, Any]:
        return (
            {"jobs": {"joined": [list(group) for group in GROUPS]}}
            if path == "/v1/status"
            else {"data": []}
        )


def test_the_list_of_jobs_says_who_is_fused_with_whom(monkeypatch, capsys):
    monkeypatch.setattr("coserve.cli.commands.jobs.Client", _Client)
    app(["jobs"], standalone_mode=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(
        f"{', '.join(group)} run their backward passes as one batch." in printed for group in GROUPS
    )
    app(["jobs", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["joined"] == [list(group) for group in GROUPS]
