"""The README's example of the client that people know."""

import json
import re
import subprocess
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_start_makes_the_examples_that_it_uses(tmp_path):
    start = next(
        block
        for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
        if "coserve up" in block
    )
    here_document, commands = start.split("\nEND\n", 1)
    subprocess.run(["sh", "-c", f"{here_document}\nEND\n"], cwd=tmp_path, check=True, timeout=10)
    assert "coserve tune chats.jsonl" in commands
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    roles = [[message["role"] for message in json.loads(line)["messages"]] for line in lines]
    assert roles == [["user", "assistant"]] * 3


def test_the_client_s_example_runs(served, tmp_path, monkeypatch, capsys):
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert "http://127.0.0.1:8000/v1" in example
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello there"},
    ]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 4)
    monkeypatch.chdir(tmp_path)
    example = example.replace("http://127.0.0.1:8000", served.url).replace(
        'open("chats.jsonl", "rb")', "chats"
    )
    names: dict[str, object] = {}
    with (tmp_path / "chats.jsonl").open("rb") as chats:
        exec(compile(example, "README.md", "exec"), names | {"chats": chats}, names)
    job = names["job"]
    assert job.status == "succeeded", job.error  # type: ignore[attr-defined]
    assert capsys.readouterr().out
