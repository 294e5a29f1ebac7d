"""The table in docs/clients.md, from the results of `make test-clients`.

    .venv/bin/python scripts/clients_table.py

Rows of clients that did not run this time stay as they are.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "clients.md"
_BEGIN, _END = "<!-- made by scripts/clients_table.py -->\n", "<!-- end -->"
_HEAD = "| client | version | what works |\n|---|---|---|\n"

sys.path.insert(0, str(ROOT / "tests"))
from clients.clients import CLIENTS, environments  # noqa: E402


def rows_of(page: str) -> dict[str, str]:
    """Return the table's rows, by the client's name."""
    table = page.split(_BEGIN)[1].split(_END)[0]
    return {
        found[1]: found[0] for found in re.finditer(r"^\| (.+?) \| .* \|\n", table, re.MULTILINE)
    }


def page() -> str:
    """Return docs/clients.md with the current results."""
    old = PAGE.read_text()
    rows, table = rows_of(old), ""
    for client in CLIENTS:
        path = environments() / "results" / f"{client.slug}.json"
        if path.exists():
            report = json.loads(path.read_text())
            rows[client.name] = (
                f"| {client.name} | {report['version']} | {', '.join(report['works'])} |\n"
            )
        table += rows.get(client.name, f"| {client.name} | – | not tried |\n")
    before, rest = old.split(_BEGIN)
    return before + _BEGIN + _HEAD + table + _END + rest.split(_END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
