"""Counts of a checkout's source: files, lines, comments, docstrings, fields, comprehensions and
names.

    python -m experiments.source_counts [CHECKOUT]

Prints a table, and one line of JSON. `Counts` has what is counted.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.results import add_save_option, print_result

_COLUMNS, _FEW_LINES = 100, 50
# A sentence that begins with one of these has no subject or no verb: prepositions, pronouns,
# conjunctions.
_FRAGMENTS = frozenset(
    word
    for line in (
        "about above after all also among and any as at before below beside between beyond",
        "both but by during each either else even every for from how if in inside into its like",
        "many more most no none nor not of off on one only or other others out outside over see",
        "since so some such than that their then there these those through to under until up what",
        "whatever when where whether which while who whom whose with within without",
    )
    for word in line.split()
)
# What a function does is said by a verb; these begin with a noun.
_ARTICLES = frozenset(["a", "an", "the", "it", "they", "this", "two", "three", "four"])
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(kw_only=True)
class Counts:
    """Counts of a folder's Python files."""

    files: int = 0
    """Number of files."""
    lines: int = 0
    """Number of lines."""
    files_under_50_lines: int = 0
    """Files with fewer than 50 lines, without the `__init__.py` that are one docstring or empty."""
    lines_over_100_columns: int = 0
    """Number of lines of more than 100 columns."""
    comments: int = 0
    """Comments, each line by itself, without `noqa` and `type: ignore`."""
    docstrings: int = 0
    """Docstrings of functions and classes."""
    fragments: int = 0
    """Docstrings that begin as no sentence does: with a preposition, a conjunction, or "what" and
    "whose"."""
    nouns: int = 0
    """Functions' docstrings that begin with a noun where a verb should say what the function
    does."""
    fields: int = 0
    """Annotated fields of classes."""
    documented_fields: int = 0
    """Fields with a docstring below, or a comment beside or above them."""
    nested_comprehensions: int = 0
    """Comprehensions with two loops or more, or with another one inside."""
    functions: int = 0
    """Number of functions."""
    classes: int = 0
    """Number of classes."""

    def add(self, other: "Counts") -> None:
        """Add the counts of another folder."""
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)


def counts_of(text: str, *, is_init: bool = False) -> Counts:
    """Count one file."""
    tree, lines, comments = ast.parse(text), text.splitlines(), _comments(text)
    nodes = list(ast.walk(tree))
    documented = [node for node in nodes if isinstance(node, _Documented)]
    docstrings = [(node, found) for node in documented if (found := ast.get_docstring(node))]
    fields = [field for node in nodes if isinstance(node, ast.ClassDef) for field in _fields(node)]
    is_bare = is_init and all(isinstance(node, ast.Expr) for node in tree.body)
    return Counts(
        files=1,
        lines=len(lines),
        files_under_50_lines=len(lines) < _FEW_LINES and not is_bare,
        lines_over_100_columns=sum(len(line) > _COLUMNS for line in lines),
        comments=len(comments),
        docstrings=len(docstrings),
        fragments=sum(_first_word(each) in _FRAGMENTS for _, each in docstrings),
        nouns=sum(
            _first_word(each) in _ARTICLES and not isinstance(node, ast.ClassDef)
            for node, each in docstrings
        ),
        fields=len(fields),
        documented_fields=sum(
            has_text or bool({line - 1, line} & comments) for line, has_text in fields
        ),
        nested_comprehensions=sum(_is_nested(node) for node in nodes),
        functions=sum(not isinstance(node, ast.ClassDef) for node in documented),
        classes=sum(isinstance(node, ast.ClassDef) for node in documented),
    )


def _first_word(text: str) -> str:
    return text.split(maxsplit=1)[0].strip(".,;:!?`'\"()").lower()


def _comments(text: str) -> set[int]:
    """Return the lines that have a comment for readers."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    silent = ("# noqa", "# type:", "# pragma", "#!")
    return {
        each.start[0]
        for each in tokens
        if each.type == tokenize.COMMENT and not each.string.startswith(silent)
    }


def _fields(node: ast.ClassDef) -> Iterator[tuple[int, bool]]:
    """Yield the line of each annotated field, and whether a docstring follows it."""
    for field, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            value = following.value if isinstance(following, ast.Expr) else None
            yield field.lineno, isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_nested(node: ast.AST) -> bool:
    if not isinstance(node, _COMPREHENSIONS):
        return False
    inner = (each for each in ast.walk(node) if each is not node)
    return len(node.generators) > 1 or any(isinstance(each, _COMPREHENSIONS) for each in inner)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Counts of a checkout's package."""

    by_folder: dict[str, Counts]
    """Counts of each folder."""
    total: Counts
    """Counts of the whole package."""
    shared_class_names: dict[str, list[str]]
    """Public class names that are defined in more than one file, and these files."""


def read_source(package: Path) -> Source:
    """Count every Python file of a package."""
    by_folder: dict[str, Counts] = {}
    places: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(package)
        by_folder.setdefault(str(name.parent), Counts()).add(
            counts_of(text, is_init=path.name == "__init__.py")
        )
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(name))
    total = Counts()
    for counts in by_folder.values():
        total.add(counts)
    shared = {name: files for name, files in sorted(places.items()) if len(files) > 1}
    return Source(by_folder=by_folder, total=total, shared_class_names=shared)


def summary(source: Source) -> dict[str, float]:
    """Return the numbers that are compared between two checkouts."""
    total = source.total
    return {
        "files": total.files,
        "lines": total.lines,
        "files under 50 lines": total.files_under_50_lines,
        "functions": total.functions,
        "classes": total.classes,
        "comments per 100 lines": round(100 * total.comments / total.lines, 2),
        "lines over 100 columns, %": round(100 * total.lines_over_100_columns / total.lines, 2),
        "docstrings": total.docstrings,
        "of them fragments, %": round(100 * total.fragments / total.docstrings, 1),
        "of functions, with a noun for a verb, %": round(100 * total.nouns / total.docstrings, 1),
        "fields": total.fields,
        "of them documented where they stand, %": round(
            100 * total.documented_fields / total.fields, 1
        ),
        "nested comprehensions": total.nested_comprehensions,
        "class names of two classes or more": len(source.shared_class_names),
    }


def print_counts(source: Source) -> None:
    """Print the totals, and files and lines by folder."""
    print("| source | |\n|---|---|")
    for name, number in summary(source).items():
        print(f"| {name} | {number:,} |")
    print("\n| folder | files | lines | under 50 lines |\n|---|---|---|---|")
    for folder, counts in sorted(_by_room(source).items()):
        print(f"| {folder} | {counts.files} | {counts.lines:,} | {counts.files_under_50_lines} |")
    print("\nclass names of more than one file: " + ", ".join(source.shared_class_names))


def _by_room(source: Source) -> dict[str, Counts]:
    """Return the counts of the package's own folders, each with those inside."""
    result: dict[str, Counts] = {}
    for folder, counts in source.by_folder.items():
        result.setdefault(folder.split("/")[0], Counts()).add(counts)
    return result


def as_json(source: Source) -> dict[str, object]:
    """Return all counts."""
    return {
        "total": summary(source),
        "folders": {folder: asdict(counts) for folder, counts in source.by_folder.items()},
        "shared_class_names": source.shared_class_names,
    }


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "code", type=Path, nargs="?", default=Path(__file__).parents[1], help="a checkout"
    )
    add_save_option(parser)
    options = parser.parse_args()
    source = read_source(options.code / "coserve")
    print_counts(source)
    print_result("source_counts", as_json(source), options.save)


if __name__ == "__main__":
    main()
