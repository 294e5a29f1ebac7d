"""Many clients at once: nobody is lost, nobody waits for a slow reader, and memory stays as it
is."""

import asyncio
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from served import Served, expected, tokenizer

pytestmark = pytest.mark.long

NUM_CLIENTS = 64


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_many_streams_beside_a_job_are_each_their_own(served: Served):
    prompts = [f"Hello {number}" for number in range(NUM_CLIENTS)]
    texts = [
        tokenizer().decode(
            expected(list(tokenizer()(prompt)["input_ids"]), 12)[0], skip_special_tokens=True
        )
        for prompt in prompts
    ]

    async def stream(client: AsyncOpenAI, prompt: str) -> str:
        events = await client.completions.create(
            model="small", prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        return "".join([event.choices[0].text async for event in events])

    async def all_at_once(served: Served) -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    client = served.client()
    assert asyncio.run(all_at_once(served)) == texts  # and everything is warm
    file = client.files.create(
        file=("lines.jsonl", b'{"text": "serve and learn"}\n' * 8), purpose="fine-tune"
    )
    job = client.fine_tuning.jobs.create(
        model="small", training_file=file.id, hyperparameters={"n_epochs": 50, "batch_size": 1}
    )
    served.wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "running")
    assert asyncio.run(all_at_once(served)) == texts
    pids = (served.process.pid, served.engine_pid())
    before = [resident_bytes(pid) for pid in pids]
    for _ in range(3):
        assert asyncio.run(all_at_once(served)) == texts
    after = [resident_bytes(pid) for pid in pids]
    assert all(late < early + 30e6 for early, late in zip(before, after, strict=True)), (
        before,
        after,
    )
    served.wait_until(lambda: served.get("/v1/status").json()["requests"]["running"] == 0)
    served.wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")


def test_a_client_that_does_not_read_holds_up_nobody(served: Served):
    body = {
        "model": "small",
        "prompt": "x",
        "max_tokens": 500,
        "n": 32,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as sleeping:
        assert sleeping.status_code == 200  # and its body is not read
        answer = served.client().completions.create(model="small", prompt="Hello", max_tokens=4)
        assert answer.choices
        served.wait_until(lambda: served.get("/v1/status").json()["requests"]["running"] == 0)
        lines = [line for line in sleeping.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line for line in lines) == 32
