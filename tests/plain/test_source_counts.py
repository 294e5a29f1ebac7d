"""What `experiments/source_counts.py` and `experiments/stations.py` count."""

from pathlib import Path

import pytest

from experiments.source_counts import counts_of, read_source
from experiments.stations import climbs

FILE = '''"""A module."""

# Why it is so.
WIDE = "{wide}"  # noqa: E501


class Thing:
    """A thing."""

    first: int
    """Number of things."""
    second: int
    # Seconds.
    third: float
    fourth: float  # metres

    def act(self):
        """Return a number."""
        return [x for row in self.rows for x in row if any(y for y in row)]


def of_lines(lines):
    """Of lines that count."""
    return [line for line in lines if line]


def value():
    """The value."""
'''.format(wide="x" * 100)


def test_a_file_is_counted_as_its_reader_sees_it():
    found = counts_of(FILE)
    assert (found.files, found.lines, found.files_under_50_lines) == (1, 28, 1)
    assert (found.functions, found.classes, found.docstrings) == (3, 1, 4)
    assert (found.fragments, found.nouns) == (1, 1), (
        '"Of lines" is a fragment, and "The value" says nothing of a function'
    )
    assert (found.fields, found.documented_fields) == (4, 3), (
        "by a docstring, a comment above, one beside"
    )
    assert found.nested_comprehensions == 1
    assert found.lines_over_100_columns == 1
    assert found.comments == 3, "what a linter reads does not count"


def write(package: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)


def test_classes_of_one_name_are_found(tmp_path):
    write(
        tmp_path,
        {
            "a.py": "class Plan: ...\nclass _Own: ...\n",
            "b/c.py": "class Plan: ...\nclass _Own: ...\n",
        },
    )
    source = read_source(tmp_path)
    assert source.shared_class_names == {"Plan": ["a.py", "b/c.py"]}
    assert {name: counts.files for name, counts in source.by_folder.items()} == {".": 1, "b": 1}
    assert source.total.classes == 4


@pytest.mark.parametrize(
    "imports", ["from room.low import act", "import room.low", "from room import low"]
)
def test_a_call_from_below_is_a_climb(tmp_path, imports):
    package = tmp_path / "room"
    write(
        package,
        {"top.py": "import room.middle", "middle.py": imports, "low.py": "", "beside.py": ""},
    )
    calls = [
        ("top.py", "low.py"),
        ("low.py", "top.py"),
        ("low.py", "beside.py"),
        ("low.py", "middle.py"),
    ]
    assert climbs(package, calls) == [("low.py", "middle.py"), ("low.py", "top.py")]
