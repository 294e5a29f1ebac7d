"""The recipes of docs/architecture.md are complete: each is one new file, and its test passes in a
copy of all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def recipes() -> dict[str, dict[str, str]]:
    """Title -> path -> content of its files."""
    found = {}
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        title, text = section.split("\n", 1)
        text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
        found[title] = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL))
    return found


RECIPES = recipes()


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_one_new_file_and_its_test(title: str):
    file, test = sorted(RECIPES[title])
    assert file.startswith("coserve/")
    assert test.startswith("tests/")
    for path in RECIPES[title]:
        assert not (ROOT / path).exists(), (
            f"{path} is there already: the recipe needs another example"
        )


def test_the_recipes_tests_pass(tmp_path: Path):
    without = shutil.ignore_patterns("__pycache__", "test_*.py")
    for folder in ("coserve", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".pytest_cache").symlink_to(
        ROOT / ".pytest_cache"
    )  # what was compiled and measured
    files = {path: content for recipe in RECIPES.values() for path, content in recipe.items()}
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    tests = [path for path in files if path.startswith("tests/")]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))
    }
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:xdist",
            "-p",
            "no:pytest_cov",
            "--verbose",
            *tests,
        ],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for path in tests:
        assert re.search(rf"^{re.escape(path)} \.+ ", result.stdout, re.MULTILINE), result.stdout
    assert "skipped" not in result.stdout
