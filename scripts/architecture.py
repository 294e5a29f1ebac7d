"""The table of folders in docs/architecture.md, from the code: docstrings, and imports.

    .venv/bin/python scripts/architecture.py

A test fails when the page has another table.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
_BEGIN, _END = "<!-- made by scripts/architecture.py -->\n", "<!-- end -->"


def imports() -> dict[str, set[str]]:
    """Return, for each folder of the package, the other folders that it imports anywhere in its
    files.
    """
    package = ROOT / "coserve"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    found: dict[str, set[str]] = {folder: set() for folder in folders}
    for path in package.rglob("*.py"):
        folder = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if folder not in folders or not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            if names == ["coserve"] and isinstance(node, ast.ImportFrom):
                names = [f"coserve.{alias.name}" for alias in node.names]
            found[folder] |= {
                parts[1]
                for name in names
                if (parts := name.split("."))[0] == "coserve" and parts[1:]
            }
    return {folder: (others & folders) - {folder} for folder, others in found.items()}


def from_top_to_bottom(graph: dict[str, set[str]]) -> list[str]:
    """Return the folders so that each is above all that it imports, alphabetically where there is a
    choice.
    """
    left, order = dict(graph), list[str]()
    while left:
        free = sorted(
            folder for folder in left if not any(folder in others for others in left.values())
        )
        assert free, f"folders import each other in a circle: {sorted(left)}"
        order.append(free[0])
        del left[free[0]]
    return order


def table() -> str:
    """Return the table as Markdown."""
    graph = imports()
    order = from_top_to_bottom(graph)
    lines = ["| folder | what is in it | imports |", "|---|---|---|"]
    for folder in order:
        docstring = (
            ast.get_docstring(ast.parse((ROOT / "coserve" / folder / "__init__.py").read_text()))
            or ""
        )
        summary = " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")
        others = ", ".join(sorted(graph[folder], key=order.index))
        lines.append(f"| [`{folder}/`](../coserve/{folder}) | {summary} | {others} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the current table."""
    before, rest = PAGE.read_text().split(_BEGIN)
    return before + _BEGIN + table() + _END + rest.split(_END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
