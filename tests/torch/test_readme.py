"""What README.md and docs/library.md show is run, and what they name is there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


LIBRARY = (ROOT / "docs/library.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", LIBRARY, re.DOTALL)


@pytest.mark.long
def test_the_engine_s_example_runs(capsys):
    exec(compile(EXAMPLES[0], "library.md", "exec"), {})
    printed = re.fullmatch(r"(.*), then (.*): (\d+) tokens trained\n", capsys.readouterr().out)
    before, after, num_trained = printed.groups()
    assert eval(after) == "Cold, of course." != eval(before)
    assert int(num_trained) > 30


def test_the_parts_example_runs(capsys):
    exec(compile(EXAMPLES[1], "library.md", "exec"), {})
    token, loss, num_gradients = capsys.readouterr().out.split()
    assert 0 <= int(token) < 49152
    assert float(loss) == pytest.approx(10.8, abs=0.5), "random weights guess among 49,152 tokens"
    assert int(num_gradients) == 2 * 7 * 30


def test_the_make_targets_it_names_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_what_the_documents_import_is_there(path: Path):
    """But for the modules that a recipe of the page adds."""
    text = path.read_text()
    added = {
        name.removesuffix(".py").replace("/", ".")
        for name in re.findall(r"```python\n# (coserve/\S+)", text)
    }
    for module, names in re.findall(
        r"^ *from (coserve[.\w]*) import ([\w, ]+)$", text, re.MULTILINE
    ):
        for name in names.split(", "):
            if module in added or f"{module}.{name}" in added:
                continue
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
