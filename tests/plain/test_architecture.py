"""docs/architecture.md is true: its table is the code's, its picture has every folder, and what it
names is there."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "architecture.py"))
FOLDERS = {path.parent.name for path in (ROOT / "coserve").glob("*/__init__.py")}


def test_the_table_is_what_the_script_writes():
    assert SCRIPT["page"]() == PAGE, "run scripts/architecture.py"


def test_the_table_of_families_is_made_from_them():
    script = runpy.run_path(str(ROOT / "scripts" / "families.py"))
    assert script["page"]() == (ROOT / "docs" / "families.md").read_text(), (
        "run scripts/families.py"
    )


def picture() -> str:
    return PAGE.split("## The picture", 1)[1].split("```")[1]


def test_the_picture_has_every_folder_once():
    assert sorted(re.findall(r"\b(\w+)/ ", picture())) == sorted(FOLDERS)


def test_imports_point_downward_in_the_picture():
    level = {
        name: number
        for number, line in enumerate(picture().splitlines())
        for name in re.findall(r"\b(\w+)/ ", line)
    }
    for folder, others in SCRIPT["imports"]().items():
        for other in others:
            assert level[other] >= level[folder], (
                f"{folder} imports {other}, which the picture has above it"
            )


def test_the_paths_it_names_are_there():
    recipes = set(re.findall(r"^# (\S+\.py)$", PAGE, re.MULTILINE))
    for path in set(re.findall(r"`((?:coserve|tests|scripts)/[\w/.]+)`", PAGE)) - recipes:
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([\w./-]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
