"""The README's example of the client that people know."""

import json
import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_client_s_example_runs(served, tmp_path, monkeypatch, capsys):
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert "http://127.0.0.1:8000/v1" in example
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 4)
    monkeypatch.chdir(tmp_path)
    example = example.replace("http://127.0.0.1:8000", served.url).replace('open("chats.jsonl", "rb")', "chats")
    names: dict[str, object] = {}
    with (tmp_path / "chats.jsonl").open("rb") as chats:
        exec(compile(example, "README.md", "exec"), names | {"chats": chats}, names)
    job = names["job"]
    assert job.status == "succeeded", job.error  # type: ignore[attr-defined]
    assert capsys.readouterr().out
