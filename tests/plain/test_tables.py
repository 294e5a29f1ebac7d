"""What commands print is what they were given: names hold colons and brackets, and neither means
anything."""

import re
from pathlib import Path

import pytest
from rich.progress import Progress

import coserve.cli
from coserve.cli.drawing import starting
from coserve.cli.main import app
from coserve.cli.start_view import StartBars
from coserve.cli.tables import console, table
from coserve.client.http import Client

NAMES = ["ft:tiny:coserve:one:0f3a", "models/[bold]x[/bold]", "[/red]", "a:smile:b[0]"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(capsys, name):
    screen, listing = console(), table(f"={name}", title=name)
    listing.add_row(name)
    screen.print(f"Done. Ask it: {name}", soft_wrap=True)
    screen.print(name, style="dim")
    screen.print(listing)
    screen.print(starting(name, screen).renderable)
    assert capsys.readouterr().out.count(name) == 6


@pytest.mark.parametrize("name", NAMES)
def test_bars_of_the_start_say_names_as_they_are(capsys, name):
    bars = StartBars()
    bars.show(name, 1, 2)
    shown: Progress = bars._bars
    shown.console.print(shown.make_tasks_table(shown.tasks))
    assert name in capsys.readouterr().err


def test_all_commands_have_the_one_console():
    folder = Path(coserve.cli.__file__).parent
    making = {
        path.name
        for path in folder.glob("*.py")
        if re.search(r"\bConsole\(|from_markup", path.read_text())
    }
    assert making == {"tables.py"}


class _Client(Client):
    """A server's answers."""

    def get(self, path: str, **params: object) -> dict[str, object]:
        name = NAMES[0]
        if path == "/v1/models":
            return {"data": [{"id": name, "parent": "tiny"}]}
        if path.endswith("/checkpoints"):
            return {
                "data": [{"step_number": 1, "fine_tuned_model_checkpoint": f"{name}:ckpt-step-1"}]
            }
        if path == "/v1/status":
            return {"jobs": {"joined": []}}
        job = {
            "id": "ftjob-1",
            "status": "succeeded",
            "fine_tuned_model": name,
            "model": "tiny",
            "created_at": 1,
        }
        return {"data": [job]} if path == "/v1/fine_tuning/jobs" else job


@pytest.mark.parametrize(
    ("command", "count"),
    [(["models"], 1), (["jobs"], 1), (["jobs", "show", "ftjob-1"], 2)],
    ids=str,
)
def test_lists_show_names_that_can_be_copied(monkeypatch, capsys, command, count):
    monkeypatch.setattr("coserve.client.http.Client", _Client)
    monkeypatch.setattr("coserve.cli.commands.jobs.Client", _Client)
    app(command, standalone_mode=False)
    assert capsys.readouterr().out.count(NAMES[0]) == count
