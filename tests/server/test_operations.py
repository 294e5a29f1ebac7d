"""What those who run a server see: status, steps, metrics, and the dashboard that shows them."""

import json
import re
from pathlib import Path
from typing import Any

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from served import Served

import coserve

DASHBOARD = Path(coserve.__file__).parents[1] / "docs" / "grafana-dashboard.json"


def test_status_counts_what_was_served(served: Served, client: OpenAI):
    cursor = served.get("/v1/status/steps").json()["cursor"]
    settings: Any = {
        "model": "small",
        "prompt": "Hello",
        "max_tokens": 8,
        "extra_body": {"ignore_eos": True},
    }
    names = {client.completions.create(**settings).id for _ in range(3)}

    def all_three() -> Any:
        found = served.get(f"/v1/status/steps?after={cursor}").json()
        return found if len(found["requests"]) >= 3 else None

    found = served.wait_until(all_three)
    assert {request["request"] for request in found["requests"]} == names
    for request in found["requests"]:
        assert request["num_output_tokens"] == 8
        assert request["adapter"] is None
        assert 0 < request["ttft_s"] < 60
        assert request["tpot_s"] > 0
    assert len(found["steps"]) >= 24
    ends = [step[0] for step in found["steps"]]
    assert ends == sorted(ends)
    assert sum(step[3] for step in found["steps"]) == 3 * 7  # decode rows
    assert all(step[1] > 0 and step[2] > 0 for step in found["steps"])
    assert found["memory"][-1][1]["free"] > 0
    assert served.get(f"/v1/status/steps?after={found['cursor']}").json()["requests"] == []

    status = served.get("/v1/status").json()
    assert (status["model"], status["dtype"], status["device"], status["ready"]) == (
        "small",
        "float32",
        "cpu",
        True,
    )
    assert status["threads"] == 1
    assert status["objectives"]["ttft_ms"] == 2000
    assert status["requests"]["finished"] >= 3
    assert 0 <= status["requests"]["attainment"] <= 1
    assert status["requests"]["tokens_per_s"] > 0
    assert 0 < status["requests"]["ttft_ms"]["p50"] <= status["requests"]["ttft_ms"]["p99"]
    assert (
        status["memory"]["free"] + sum(status["memory"]["by_owner"].values())
        == status["memory"]["pages"]
    )
    assert status["steps"]["count"] >= 24
    assert status["steps"]["prediction_error"]["median"] >= 0


def test_a_requests_own_slos_decide_what_was_attained(served: Served, client: OpenAI):
    cursor = served.get("/v1/status/steps").json()["cursor"]
    for slo in ({"ttft_ms": 1e8, "tpot_ms": 1e8}, {"ttft_ms": 1e-3}):
        client.completions.create(
            model="small", prompt="Hello", max_tokens=2, extra_body={"slo": slo}
        )
    after = f"/v1/status/steps?after={cursor}"
    served.wait_until(lambda: len(served.get(after).json()["requests"]) == 2)
    found = served.get(after).json()["requests"]
    assert [request["attained"] for request in found] == [True, False]


def samples(served: Served) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(served.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_metrics_add_up(served: Served, client: OpenAI):
    def count(name: str, **labels: str) -> float:
        return sum(
            s.value for s in samples(served).get(name, []) if labels.items() <= s.labels.items()
        )

    base = {"tenant": "default", "adapter": ""}
    before = {
        kind: count("coserve_tokens_total", kind=kind, **base) for kind in ("prompt", "generated")
    }
    finished = count("coserve_requests_finished_total")
    answer = client.completions.create(
        model="small", prompt="Hello you", max_tokens=6, extra_body={"ignore_eos": True}
    )
    served.wait_until(lambda: count("coserve_requests_finished_total") == finished + 1)
    assert count("coserve_tokens_total", kind="generated", **base) == before["generated"] + 6
    assert (
        count("coserve_tokens_total", kind="prompt", **base)
        == before["prompt"] + answer.usage.prompt_tokens
    )
    assert count("coserve_ttft_seconds_count", **base) >= 1
    assert count("coserve_token_gap_seconds_count") >= 5
    assert count("coserve_step_seconds_count") >= 6
    assert count("coserve_step_rows_total", kind="decode") >= 5
    assert count("coserve_engine_ready") == 1
    total = served.get("/v1/status").json()["memory"]["pages"]
    served.wait_until(lambda: count("coserve_pages") == total)


def test_the_dashboard_names_only_metrics_that_are_there(served: Served):
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    named = {name for expression in expressions for name in re.findall(r"coserve_\w+", expression)}
    text = served.get("/metrics").text
    typed = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    there = {name for name, kind in typed if kind != "histogram"}
    there |= {
        f"{name}_{part}"
        for name, kind in typed
        if kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    assert named <= there, named - there
    ours = {
        name for name, _ in typed if name.startswith("coserve_") and not name.endswith("_created")
    }
    shown = {
        name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in named
    }
    assert ours <= shown, f"the dashboard does not show {ours - shown}"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_vllms_dashboards_find_their_metrics(served: Served, client: OpenAI):
    client.completions.create(
        model="small", prompt="Hello you", max_tokens=6, extra_body={"ignore_eos": True}
    )
    served.wait_until(lambda: samples(served)["vllm:request_generation_tokens_count"][0].value)

    def total(name: str) -> float:
        return sum(sample.value for sample in samples(served)[name])

    found = samples(served)
    names = (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
    )
    for name in (
        *names,
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):
        buckets = [sample.value for sample in found[f"vllm:{name}_bucket"]]
        assert (
            buckets == sorted(buckets) and buckets[-1] == found[f"vllm:{name}_count"][0].value > 0
        )
    assert {sample.labels["model_name"] for sample in found["vllm:num_requests_running"]} == {
        "small"
    }
    assert total("vllm:generation_tokens_total") >= 6
    assert total("vllm:request_success_total") >= 1
    assert total("vllm:prefix_cache_queries_total") >= total("vllm:prefix_cache_hits_total")
    assert 0 <= total("vllm:kv_cache_usage_perc") < 1


def test_a_priority_is_a_whole_number(served: Served, client: OpenAI):
    for priority in (-5, 0, 7):
        extra: Any = {"priority": priority}
        found = client.completions.create(
            model="small", prompt="Hello", max_tokens=2, temperature=0, extra_body=extra
        )
        assert found.choices[0].text
    answer = served.post(
        "/v1/completions", json={"model": "small", "prompt": "x", "priority": "high"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
