"""Plain technical English: words that made readers stumble stay away from code, messages and documents."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Word -> what to write instead.
INSTEAD = {
    r"\bbehind\b": "after",
    r"\bso many\b": "this many, as many as, how many",
    r"\bgo(es)? on\b": "continue, resume, keep running",
    r"\bat birth\b": "when created",
    r"\bwhoever\b": "a plain noun",
}


def texts() -> list[Path]:
    code = [path for kind in ("py", "cpp", "h") for path in (ROOT / "coserve").rglob(f"*.{kind}")]
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), ROOT / "README.md"]
    return [*code, *documents, *(ROOT / "examples").glob("*.py"), *(ROOT / "coserve").rglob("*.md")]


def test_words_that_make_readers_stumble_are_not_used():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; write {better}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word, better in INSTEAD.items()
        if (match := re.search(word, line, re.IGNORECASE))
    ]
    assert found == []
