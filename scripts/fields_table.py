"""The table of other servers' fields in docs/clients.md, from
coserve/server/bodies/client_fields.py.

.venv/bin/python scripts/fields_table.py
"""

import json
from pathlib import Path

from coserve.server.bodies.client_fields import FIELDS, ClientField

PAGE = Path(__file__).parents[1] / "docs" / "clients.md"
_BEGIN, _END = "<!-- made by scripts/fields_table.py -->\n", "<!-- end of fields -->"
_HEAD = "| fields | sent to | here |\n|---|---|---|\n"


def _here(field: ClientField) -> str:
    """Return what is done with a field, in the words of the table."""
    if field.action == "mapped":
        return f"means {field.note}" if field.note.startswith("`") else field.note
    if field.action == "ignored":
        return f"ignored: {field.note}"
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"refused{f' unless {neutral}' if neutral else ''}: {field.note}"


def table() -> str:
    """Return the table: one row for fields of one server that are treated alike."""
    rows: dict[tuple[str, str], list[str]] = {}
    for field in FIELDS.values():
        rows.setdefault((field.sent_to, _here(field)), []).append(f"`{field.name}`")
    return _HEAD + "".join(
        f"| {', '.join(names)} | {sent_to} | {here} |\n" for (sent_to, here), names in rows.items()
    )


def page() -> str:
    """Return docs/clients.md with the table as it is now."""
    before, rest = PAGE.read_text().split(_BEGIN)
    return before + _BEGIN + table() + _END + rest.split(_END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
