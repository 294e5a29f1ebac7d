"""Batches as the real client makes them, and what comes of them."""

import json
import time
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(id: str, *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    settings = {"model": "small", "temperature": 0, "max_tokens": 5}
    if url == CHAT:
        settings["messages"] = [{"role": "user", "content": id}]
    return {"custom_id": id, "method": "POST", "url": url, "body": {**settings, **body}}


def completion(id: str, prompt: Any = "x", **body: Any) -> dict[str, Any]:
    return line(id, url=COMPLETIONS, prompt=prompt, **body)


def batch_file(client: Any, lines: list[Any]) -> Any:
    content = "\n".join(
        each if isinstance(each, str) else json.dumps(each) for each in lines
    ).encode()
    return client.files.create(file=("b.jsonl", content), purpose="batch")


def begin(
    client: Any, lines: list[Any], *, window: Any = "24h", endpoint: Any = CHAT, **more: Any
) -> Any:
    file = batch_file(client, lines)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, **more
    )


def wait_for(client: Any, batch: Any, limit_s: float = 90.0) -> Any:
    until_s = time.monotonic() + limit_s
    while (found := client.batches.retrieve(batch.id)).status not in (
        "completed",
        "failed",
        "expired",
        "cancelled",
    ):
        assert time.monotonic() < until_s, found
        time.sleep(0.05)
    return found


def results(client: Any, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    lines = [json.loads(each) for each in client.files.content(file).text.splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines), "each is there once"
    return {each["custom_id"]: each for each in lines}
