"""SECURITY.md is true: the tests that it names are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_it_names_are_there():
    named = re.findall(r"`(tests/[\w/.]+\.py|test_\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    code = ""
    for name in named:
        if name.startswith("tests/"):
            code = (ROOT / name).read_text()
        else:
            assert f"\ndef {name}(" in code, name
