"""Tenants are held to their limits, in OpenAI's words; one at its limit is nothing to another."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import Served, keys_file, serving

from coserve.engine.request import Chunk
from coserve.errors import LimitError
from coserve.protocol.messages import StepReport
from coserve.scheduling.slo import Slo
from coserve.server.config import ServerConfig
from coserve.server.tenancy.admission import Admission
from coserve.server.tenancy.keys_file import Keys
from coserve.server.tenancy.ledger import RequestEntry, RequestLedger
from coserve.server.tenancy.limits import TenantLimits

LINES = b'{"text": "serve and learn"}\n' * 8


class Clock:
    """Moves when it is told to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def admission(**limits: int) -> tuple[Admission, Clock, RequestLedger]:
    clock, ledger = Clock(), RequestLedger()
    given: dict[str, Any] = {f"tenant_{name}": value for name, value in limits.items()}
    keys = Keys(ServerConfig(**given))
    return Admission(keys, ledger, clock), clock, ledger


def begin(gate: Admission, tenant: str = "ann", *, sequences: int = 1, prompt: int = 10) -> None:
    gate.begin(tenant, num_sequences=sequences, num_prompt_tokens=prompt)


def report(ledger: RequestLedger, tenant: str, num_tokens: int) -> StepReport:
    ledger.begin(
        tenant,
        RequestEntry(tenant=tenant, adapter=None, num_prompt_tokens=1, slo=Slo(ttft_s=1, tpot_s=1)),
    )
    return StepReport(chunks=[Chunk(request=tenant, index=0, tokens=(1,) * num_tokens)])


def test_without_limits_nothing_is_refused_and_nothing_said():
    gate, _, _ = admission()
    for _ in range(1000):
        begin(gate, sequences=100, prompt=10**6)
    assert gate.headers("ann") == {}


def test_a_tenant_has_at_most_its_sequences_under_way():
    gate, _, _ = admission(max_requests=4)
    begin(gate, sequences=3)
    begin(gate, "ben", sequences=4)
    assert gate.headers("ann")["x-ratelimit-limit-requests"] == "4"
    assert gate.headers("ann")["x-ratelimit-remaining-requests"] == "1"
    assert gate.headers("ann")["x-ratelimit-reset-requests"] == "0ms"
    with pytest.raises(LimitError, match="Limit: 4, under way: 3, requested: 2") as raised:
        begin(gate, sequences=2)
    assert (raised.value.what, raised.value.retry_after_s) == ("requests", 1.0)
    begin(gate)
    gate.end("ann", num_sequences=3)
    begin(gate, sequences=3)
    with pytest.raises(LimitError, match="ask for fewer") as raised:
        begin(gate, sequences=5)
    assert raised.value.retry_after_s is None, "waiting would not help"


def test_tokens_of_prompts_and_answers_flow_at_a_rate():
    gate, clock, ledger = admission(tokens_per_minute=600)
    begin(gate, prompt=500)
    assert gate.headers("ann") == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "50s",
    }
    with pytest.raises(LimitError, match="try again in 10s") as raised:
        begin(gate, prompt=200)
    assert raised.value.what == "tokens" and raised.value.retry_after_s == pytest.approx(10)
    begin(gate, prompt=100)
    gate.engine_reported(report(ledger, "ann", 300))  # an answer got longer than what was left
    gate.engine_reported(report(ledger, "ben", 300))
    with pytest.raises(LimitError, match="try again in 31s") as raised:
        begin(gate, prompt=10)
    assert gate.headers("ann")["x-ratelimit-remaining-tokens"] == "0"
    assert gate.headers("ann")["x-ratelimit-reset-tokens"] == "1m30s"
    clock.now_s += 31
    begin(gate, prompt=10)
    clock.now_s += 3600
    assert gate.headers("ann")["x-ratelimit-remaining-tokens"] == "600", (
        "no more than a minute is saved up"
    )


def test_in_the_long_run_the_rate_holds():
    gate, clock, ledger = admission(tokens_per_minute=600)
    used = 0
    for _ in range(6000):  # ten minutes, in tenths of a second
        clock.now_s += 0.1
        try:
            begin(gate, prompt=20)
        except LimitError:
            continue
        gate.engine_reported(report(ledger, "ann", 50))
        gate.end("ann", num_sequences=1)
        used += 70
    assert 6000 <= used <= 6600 + 70


def test_a_prompt_of_more_than_a_minute_waits_for_a_full_bucket():
    gate, clock, _ = admission(tokens_per_minute=60)
    begin(gate, prompt=600)
    for seconds in (60, 300):
        clock.now_s += seconds
        with pytest.raises(LimitError):
            begin(gate, prompt=600)
    clock.now_s += 241
    begin(gate, prompt=600)


def test_a_refused_request_costs_nothing():
    gate, _, _ = admission(max_requests=2, tokens_per_minute=600)
    with pytest.raises(LimitError):
        begin(gate, sequences=3, prompt=100)
    assert gate.headers("ann")["x-ratelimit-remaining-tokens"] == "600"
    begin(gate, sequences=2, prompt=100)


def tenant_config(name: str, value: int) -> ServerConfig:
    given: dict[str, Any] = {f"tenant_{name}": value}
    return ServerConfig(**given)


def test_limits_are_checked():
    for name in ("max_requests", "tokens_per_minute", "max_jobs", "max_file_bytes"):
        with pytest.raises(ValueError, match=name):
            TenantLimits(**{name: 0})
        with pytest.raises(ValueError, match=name):
            tenant_config(name, -1)


def refused(answer: httpx.Response, kind: str, code: str) -> str:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, None, code)
    return str(error["message"])


def ask(served: Served, key: str, **body: Any) -> httpx.Response:
    body = {"model": "small", "prompt": "x", "max_tokens": 2, "ignore_eos": True, **body}
    return served.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def test_a_server_holds_tenants_to_their_limits(tmp_path: Path):
    text = (
        "[tenants.ann]\nmax_requests = 2\nmax_jobs = 1\nmax_file_bytes = 300\n"
        "[tenants.ben]\ntokens_per_minute = 20\n"
        "[tenants.dan]\nmax_requests = 1000\n"
    )
    path = keys_file(tmp_path, text, ann="key-1", ben="key-2", dan="key-3")
    with serving("--api-keys-file", str(path), "--tenant-max-requests", "7") as served:
        _check_requests(served)
        _check_tokens(served)
        _check_files_and_jobs(served)


def _check_requests(served: Served) -> None:
    body = {
        "model": "small",
        "prompt": "x",
        "max_tokens": 500,
        "n": 2,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"Authorization": "Bearer key-1"}
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as stream:
        assert stream.headers["x-ratelimit-remaining-requests"] == "0"
        answer = ask(served, "key-1")
        assert "Limit: 2, under way: 2, requested: 1" in refused(
            answer, "requests", "rate_limit_exceeded"
        )
        assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("1", "true")
        chat = {"model": "small", "messages": [{"role": "user", "content": "x"}], "stream": True}
        answer = served.post("/v1/chat/completions", json=chat, headers=headers)
        refused(answer, "requests", "rate_limit_exceeded")
        for key, limit in (("key-2", "7"), ("key-3", "1000")):
            answer = ask(served, key, max_tokens=1)
            assert (
                answer.status_code == 200 and answer.headers["x-ratelimit-limit-requests"] == limit
            )
    served.wait_until(lambda: ask(served, "key-1").status_code == 200)  # its client has gone
    too_many = ask(served, "key-1", n=3)
    assert "ask for fewer" in refused(too_many, "requests", "rate_limit_exceeded")
    assert "retry-after" not in too_many.headers and too_many.headers["x-should-retry"] == "false"
    # What is refused for other reasons leaves nothing under way.
    for _ in range(3):
        assert ask(served, "key-1", stop="x", max_tokens=10**6).status_code == 400
    assert ask(served, "key-1", n=2).status_code == 200


def _check_tokens(served: Served) -> None:
    assert (
        ask(served, "key-2", max_tokens=60).status_code == 200
    )  # its prompt was paid for, its answer is owed
    answer = ask(served, "key-2")
    assert "tokens per minute. Limit: 20, left: 0" in refused(
        answer, "tokens", "rate_limit_exceeded"
    )
    assert 60 < int(answer.headers["retry-after"]) <= 180
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(openai.RateLimitError) as raised:
        served.client("key-2").completions.create(model="small", prompt="x")
    assert raised.value.code == "rate_limit_exceeded"


def _check_files_and_jobs(served: Served) -> None:
    ann, ben = served.client("key-1"), served.client("key-2")
    file = ann.files.create(file=("lines.jsonl", LINES), purpose="fine-tune")
    headers = {"Authorization": "Bearer key-1"}
    answer = served.post(
        "/v1/files", files={"file": LINES}, data={"purpose": "fine-tune"}, headers=headers
    )
    message = refused(answer, "files", "insufficient_quota")
    assert "224 bytes. Your files have 224, and may have 300" in message
    assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("60", "false")
    assert len(ann.files.list().data) == 1
    assert len(list((served.home / "files").iterdir())) == 1, "nothing is left of what was refused"
    ben.files.create(file=("lines.jsonl", LINES), purpose="fine-tune")

    body: Any = {"model": "small", "training_file": file.id}
    job = ann.fine_tuning.jobs.create(**body, hyperparameters={"n_epochs": 50})
    answer = served.post("/v1/fine_tuning/jobs", json=body, headers=headers)
    assert "1 jobs that have not ended, and may have 1" in refused(
        answer, "jobs", "insufficient_quota"
    )
    ann.fine_tuning.jobs.cancel(job.id)
    assert ann.fine_tuning.jobs.create(**body).id != job.id
