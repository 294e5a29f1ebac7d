"""Examples of the OpenAI client in README.md and docs, run against a real server."""

import json
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README, FIRST_MODEL, FROM_OPENAI = (
    (ROOT / name).read_text()
    for name in ("README.md", "docs/first-model.md", "docs/from-openai.md")
)


def test_the_start_makes_the_examples_that_it_uses(tmp_path):
    start = next(
        block
        for block in re.findall(r"```sh\n(.*?)```", FIRST_MODEL, re.DOTALL)
        if "coserve up" in block
    )
    here_document, commands = start.split("\nEND\n", 1)
    subprocess.run(["sh", "-c", f"{here_document}\nEND\n"], cwd=tmp_path, check=True, timeout=10)
    assert "coserve tune chats.jsonl" in commands
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    roles = [[message["role"] for message in json.loads(line)["messages"]] for line in lines]
    assert roles == [["user", "assistant"]] * 3


@pytest.mark.parametrize(
    ("page", "files"), [(README, ["chats"]), (FROM_OPENAI, ["train", "valid"])]
)
def test_examples_of_the_openai_client_run(page, files, served, tmp_path, monkeypatch, capsys):
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello there"},
    ]
    monkeypatch.chdir(tmp_path)
    for name in files:
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 4)
    base = served.client().models.list().data[0].id
    for written, here in (
        ("http://127.0.0.1:8000", served.url),
        ('model="tiny"', f"model={base!r}"),
    ):
        assert written in example
        example = example.replace(written, here)
    # Opened here, so that they are closed.
    with ExitStack() as stack:
        for name in files:
            path = tmp_path / f"{name}.jsonl"
            example = example.replace(f'open("{path.name}", "rb")', f"opened_{name}")
        opened = {
            f"opened_{name}": stack.enter_context((tmp_path / f"{name}.jsonl").open("rb"))
            for name in files
        }
        names: dict[str, Any] = {**opened}
        exec(compile(example, "example.py", "exec"), names)
    assert names["job"].status == "succeeded", names["job"].error
    assert capsys.readouterr().out
