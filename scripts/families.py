"""The table of model families in docs/families.md, from their docstrings.

    .venv/bin/python scripts/families.py

A test fails when the page has another table.
"""

from pathlib import Path

from coserve.models.families import described_families

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
_BEGIN, _END = "<!-- made by scripts/families.py -->\n", "<!-- end -->"


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| `model_type` | what it is |", "|---|---|"]
    lines += [
        f"| [`{each.model_type}`](../coserve/models/families/{each.model_type}.py) | "
        f"{each.summary} |"
        for each in described_families()
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the current table."""
    before, rest = PAGE.read_text().split(_BEGIN)
    return before + _BEGIN + table() + _END + rest.split(_END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
