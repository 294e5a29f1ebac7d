"""Keys name tenants; none sees what is another's."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from front_server import AS_FRONT
from served import Served, adapter_root, peft_model, serving

ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize("before", ["", AS_FRONT], ids=["device", "front"])
def test_keys_and_what_they_open(before: str):
    peft_model()
    options: tuple[str, ...] = (
        "--api-key",
        "ann=secret-1",
        "--api-key",
        "ben=secret-2",
        "--api-key",
        "bare-key",
    )
    options += ("--api-key", "ops=secret-3", "--operator", "ops")
    with serving(*options, "--allow-adapter-paths", str(adapter_root()), before=before) as served:
        for path in ("/v1/models", "/v1/status", "/metrics", "/v1/nothing"):
            answer = served.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert served.get("/health").status_code == served.get("/ready").status_code == 200
        command = [sys.executable, "-m", "coserve", "models", "--url", served.url]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": ROOT},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (
            done.returncode == 1 and "--api-key" in done.stderr and done.stderr.count("\n") == 1
        ), done.stderr
        with pytest.raises(openai.AuthenticationError) as raised:
            served.client("wrong").models.list()
        assert raised.value.code == "invalid_api_key"

        ann, ben, bare = (served.client(key) for key in ("secret-1", "secret-2", "bare-key"))
        body = {"lora_name": "mine", "lora_path": str(adapter_root() / "pirate")}
        ann.post("/load_lora_adapter", body=body, cast_to=str)
        assert [model.id for model in ann.models.list()] == ["small", "mine"]
        for other in (ben, bare):
            assert [model.id for model in other.models.list()] == ["small"]
            with pytest.raises(openai.NotFoundError):
                other.completions.create(model="mine", prompt="x")
            with pytest.raises(openai.NotFoundError):
                other.post("/unload_lora_adapter", body={"lora_name": "mine"}, cast_to=str)
        ben.post("/load_lora_adapter", body=body, cast_to=str)
        ann.post("/unload_lora_adapter", body={"lora_name": "mine"}, cast_to=str)
        assert ben.completions.create(model="mine", prompt="x", max_tokens=1).choices

        seen = served.wait_until(
            lambda: ben.get("/status/steps", cast_to=dict[str, Any])["requests"]
        )
        assert [request["adapter"] for request in seen] == ["mine"]
        assert ann.get("/status/steps", cast_to=dict[str, Any])["requests"] == []
        for key, others in (("secret-2", ("ann",)), ("bare-key", ("ann", "ben", "mine"))):
            metrics = served.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
            assert not any(other in metrics for other in others), "who is no operator sees its own"
        metrics = served.get("/metrics", headers={"Authorization": "Bearer secret-3"}).text
        assert 'coserve_requests_finished_total{adapter="mine",tenant="ben"} 1.0' in metrics
        assert "secret" not in metrics
        assert "secret" not in served.log.read_text()


def num_cached(served: Served, key: str, **more: Any) -> int:
    """Of a prompt that several tenants send."""
    body = {
        "model": "small",
        "prompt": "One copy of the weights serves and learns. " * 4,
        "max_tokens": 1,
        **more,
    }
    answer = served.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens_tell_a_tenant_nothing_of_the_prompts_of_others(tmp_path: Path):
    public = tmp_path / "public.txt"
    public.write_text("One copy of the weights ")
    keys = ("--api-key", "ann=secret-1", "--api-key", "ben=secret-2")
    with serving(*keys, "--public-prefix", str(public), "--tenant-weight", "ann=2") as served:
        assert num_cached(served, "secret-1") == 0
        known = num_cached(served, "secret-2")
        whole = num_cached(served, "secret-2")
        assert whole > known
        assert num_cached(served, "secret-1", cache_salt="x") <= known
        chat = {
            "messages": [
                {"role": "system", "content": public.read_text()},
                {"role": "user", "content": "Hi"},
            ]
        }
        for key in ("secret-1", "secret-2"):
            headers = {"Authorization": f"Bearer {key}"}
            asked = {"model": "small", "max_tokens": 1, **chat}
            assert (
                served.post("/v1/chat/completions", json=asked, headers=headers).status_code == 200
            )


def test_prefixes_are_shared_among_tenants_where_the_operator_says_so():
    with serving(
        "--api-key", "ann=secret-1", "--api-key", "ben=secret-2", "--share-prefixes"
    ) as served:
        assert num_cached(served, "secret-1") == 0
        assert num_cached(served, "secret-2") == num_cached(served, "secret-1") > 0


@pytest.mark.long
def test_a_tenant_that_fills_the_queue_keeps_no_other_out():
    """Clients of one tenant take every place that falls free; each request of another tenant is
    answered."""
    keys = ("--api-key", "ann=secret-1", "--api-key", "ben=secret-2")
    with (
        serving(*keys, "--max-queued-requests", "4", "--max-requests", "1") as served,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(key: str, max_tokens: int) -> int:
            body = {"model": "small", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
            return served.post(
                "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ).status_code

        def flood() -> int:
            num_refused = 0
            for _ in range(20):
                while ask("secret-1", 200) == 503:
                    num_refused += 1
                    time.sleep(0.01)
                if ended.is_set():
                    break
            return num_refused

        ended = threading.Event()
        clients = [threads.submit(flood) for _ in range(8)]
        headers = {"Authorization": "Bearer secret-1"}
        served.wait_until(
            lambda: served.get("/v1/status", headers=headers).json()["requests"]["waiting"] >= 3
        )
        assert [ask("secret-2", 1) for _ in range(5)] == [200] * 5
        ended.set()
        assert sum(client.result() for client in clients) > 0, "the queue was full"
