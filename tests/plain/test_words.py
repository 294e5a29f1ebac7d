"""Plain technical English: words that made readers stumble stay away from code, messages and
documents."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Word -> what to write instead. Words in names count: an underscore ends a word.
INSTEAD = {
    r"behind": "after",
    r"so many": "this many, as many as, how many",
    r"so much": "this much, as much as",
    r"so (long|often)": "this long, how many times",
    r"go(es)? on": "continue, resume, keep running",
    r"at birth": "when created",
    r"whoever": "a plain noun",
    r"in passing": "say when",
    r"patien(t|ce)": "what it waits for, or a number with a unit",
    r"is native": "has native",
    r"(latency|TTFT|TPOT) objectives?": "SLO",
}
# Standard terms of the field where they are used as such: early stopping has a patience in
# transformers, too.
TERMS = {
    "patience": (
        *(
            "coserve/tuning/early_stopping.py",
            "coserve/engine/jobs/job.py",
            "coserve/jobs/lifecycle/outcome.py",
        ),
        *(
            "coserve/cli/commands/tune.py",
            "docs/jobs.md",
            "tests/server/test_early_stopping.py",
            "CHANGELOG.md",
        ),
        "benchmarks/hardening.md",
    )
}
# They name the words.
EXEMPT = ("tests/plain/test_words.py", "CONTRIBUTING.md")


def texts() -> list[Path]:
    code = [
        path for kind in ("py", "cpp", "h", "md") for path in (ROOT / "coserve").rglob(f"*.{kind}")
    ]
    beside = [
        path
        for name in ("tests", "scripts", "experiments", "examples")
        for path in (ROOT / name).rglob("*.py")
    ]
    documents = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "experiments").glob("*.md"),
        *ROOT.glob("*.md"),
    ]
    return [
        path
        for path in (*code, *beside, *documents)
        if path.relative_to(ROOT).as_posix() not in EXEMPT
    ]


def words_in(text: str) -> list[tuple[str, str]]:
    """What is found in a text, and what to write instead."""
    plain = text.replace("_", " ")
    found = [
        (re.search(rf"\b({word})\b", plain, re.IGNORECASE), better)
        for word, better in INSTEAD.items()
    ]
    return [(match[0], better) for match, better in found if match is not None]


def test_words_that_make_readers_stumble_are_not_used():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match!r}; write {better}"
        for path in texts()
        if words_in(text := path.read_text())  # almost no file has any
        for number, line in enumerate(text.splitlines(), 1)
        for match, better in words_in(line)
        if path.relative_to(ROOT).as_posix() not in TERMS.get(match.lower(), ())
    ]
    assert found == []


def test_they_would_be_found_in_sentences_and_in_names():
    for line in (
        "It goes on.",
        "def test_it_goes_on():",
        "left_behind",
        "So many pages",
        "_PATIENCE_S = 3",
        "is_native",
    ):
        assert words_in(line), line
    assert not words_in("It continues after this many; nobody is behindhand.")
