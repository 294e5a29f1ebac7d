"""vLLM's own entrypoint tests against `coserve up`: how many pass, and why the others do not.

    python -m experiments.vllm_entrypoint_tests --tests CHECKOUT --python PYTHON [--resume] [PATTERN
    …]

CHECKOUT is a copy of vLLM's repository (its folder tests/ is enough), PYTHON one in whose
environment vLLM of about the same age, pytest, pytest-asyncio, pytest-timeout and tblib are
installed: the tests import vLLM's tokenizers and schemas. Their server is coserve
(vllm_entrypoint_server.py), their models are stand-ins (vllm_entrypoint_models.py). The files that
are run, the tests that do not apply, and the reasons of failures are in vllm_entrypoint_tests.toml;
a failure without a reason there, or a reason of a test that passes, ends it with status 1.

Files are run one by one, each in a process of its own. Outcomes are kept beside the stand-ins with
their commit, so that a run can be interrupted: `--resume` leaves out the files that have results of
this commit, PATTERN those that do not match. Writes the page benchmarks/vllm-entrypoint-tests.md of
all that is kept, with the commits.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.vllm_entrypoint_models import make_hub

HERE = Path(__file__).parent
PAGE = HERE.parent / "benchmarks" / "vllm-entrypoint-tests.md"
BELOW = "tests/entrypoints/"
# Of a test, with the start of its server.
_TIMEOUT_S = 180


@dataclass(frozen=True)
class Reason:
    """Reason why tests of some names do not pass."""

    text: str
    """The reason."""
    patterns: tuple[str, ...]
    """Patterns of the names."""

    def covers(self, test: str) -> bool:
        return any(fnmatchcase(test, pattern) for pattern in self.patterns)


@dataclass(frozen=True)
class Plan:
    """Selection of vLLM's tests, with known results."""

    files: tuple[str, ...]
    """Files to run."""
    does_not_apply: tuple[Reason, ...]
    """Tests that do not apply."""
    fails: tuple[Reason, ...]
    """Tests that fail, with reasons."""

    @staticmethod
    def read(path: Path) -> "Plan":
        """Read the file beside this script."""
        settings = tomllib.loads(path.read_text())

        def reasons(name: str) -> tuple[Reason, ...]:
            return tuple(
                Reason(each["reason"], tuple(each["tests"])) for each in settings.get(name, [])
            )

        return Plan(tuple(settings["files"]), reasons("does_not_apply"), reasons("fails"))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Versions that outcomes come from."""

    coserve: str
    """Last commit that changed coserve or the way in which tests are run, with `+` for uncommitted
    changes.
    """
    vllm: str
    """Version of vLLM."""
    tests: str
    """Commit of the tests."""


@dataclass(frozen=True, kw_only=True)
class FileRun:
    """Run of one file."""

    file: str
    """Path of the file."""
    origin: Origin
    """Versions."""
    on: str
    """Day of the run."""
    outcomes: list[dict[str, str]]
    """Name, outcome (passed, failed, skipped, not run) and reason of each test."""

    @staticmethod
    def of(line: str) -> "FileRun":
        """Return the run of a line of `to_json`."""
        fields = json.loads(line)
        return FileRun(**{**fields, "origin": Origin(**fields["origin"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Kept:
    """Last run of each file, kept on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._runs = {each.file: each for each in map(FileRun.of, lines)}

    def put(self, run: FileRun) -> None:
        """Replace the run of a file; the others are safe whenever this process ends."""
        self._runs[run.file] = run
        fresh = self._path.with_suffix(".new")
        fresh.write_text("".join(each.to_json() + "\n" for each in self._runs.values()))
        fresh.replace(self._path)

    def of(self, plan: Plan, origin: Origin) -> dict[str, FileRun]:
        """Return the runs by file, in the order of the plan, without those of other tests or of
        another vLLM.
        """
        runs = [self._runs[file] for file in plan.files if file in self._runs]
        return {
            run.file: run for run in runs if replace(run.origin, coserve=origin.coserve) == origin
        }


def run_file(
    file: str, plan: Plan, checkout: Path, python: str, models: Path
) -> list[dict[str, str]]:
    """Run a file, and return its outcomes (`FileRun.outcomes`).

    Args:
        file: The file.
        plan: Selection of tests.
        checkout: Checkout of vLLM.
        python: Python with vLLM.
        models: HF_HOME with the stand-ins.
    """
    patterns = [pattern for each in plan.does_not_apply for pattern in each.patterns]
    with TemporaryDirectory(prefix="coserve-vllm-") as directory:
        outcomes = Path(directory) / "outcomes.jsonl"
        outcomes.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": f"{checkout}{os.pathsep}{HERE.parent}",
            "HF_HOME": str(models),
            "HF_HUB_OFFLINE": "1",
            "COSERVE_COMMAND": json.dumps([sys.executable, "-m", "coserve"]),
            "COSERVE_OUTCOMES": str(outcomes),
            "COSERVE_DOES_NOT_APPLY": json.dumps(patterns),
        }
        plugins = ("-p", "experiments.vllm_entrypoint_server", "-p", "no:cacheprovider")
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "--continue-on-collection-errors",
            f"--timeout={_TIMEOUT_S}",
            *plugins,
        ]
        subprocess.run([*command, BELOW + file], cwd=checkout, env=environment, check=False)
        reports = [json.loads(line) for line in outcomes.read_text().splitlines()]
    return [{**each, "test": each["test"].removeprefix(BELOW)} for each in reports]


def judged(plan: Plan, runs: Iterable[FileRun]) -> tuple[list[dict[str, str]], list[str]]:
    """Return all outcomes with their reasons, and what is wrong: failures without a reason, and
    reasons of tests that pass.
    """
    wrong, outcomes = [], []
    for each in (outcome for run in runs for outcome in run.outcomes):
        applies = not _reason(plan.does_not_apply, each["test"])
        outcome = each["outcome"] if applies else "not run"
        reason = _reason(plan.fails if applies else plan.does_not_apply, each["test"])
        if outcome == "passed" and reason:
            wrong.append(f"passes, against its reason: {each['test']}")
        if outcome in ("failed", "skipped") and not reason:
            wrong.append(f"{outcome}, without a reason: {each['test']}\n{each['why'][-1500:]}")
        if outcome == "not run" and applies:
            wrong.append(f"was not run, and applies: {each['test']}")
        outcomes.append({**each, "outcome": outcome, "reason": reason})
    return outcomes, wrong


def _reason(reasons: tuple[Reason, ...], test: str) -> str:
    return next((reason.text for reason in reasons if reason.covers(test)), "")


def _file(outcome: dict[str, str]) -> str:
    return outcome["test"].partition("::")[0]


def table(
    plan: Plan, runs: dict[str, FileRun], outcomes: list[dict[str, str]], origin: Origin
) -> str:
    """Return the page."""
    total = Counter(each["outcome"] for each in outcomes)
    num_left = total["failed"] + total["skipped"]
    lines = [
        "# vLLM's entrypoint tests",
        "",
        "Made by `python -m experiments.vllm_entrypoint_tests --tests CHECKOUT --python PYTHON` "
        "([vllm_entrypoint_tests.py](vllm_entrypoint_tests.py));",
        "the reasons are kept in [vllm_entrypoint_tests.toml](vllm_entrypoint_tests.toml). "
        f"vLLM {origin.vllm}, its tests of commit {origin.tests}. {_made(plan, runs)}",
        "",
        f"Of {len(outcomes)} tests that start a server for completions, chats, models, LoRA, "
        f"tokenization, responses "
        f"or structured output, {total['not run']} do not apply; of the "
        f"{len(outcomes) - total['not run']} that do, "
        f"**{total['passed']} pass** and {num_left} do not.",
        "",
        "Models are stand-ins of two layers: with random weights, or taught to think, to call the "
        "functions that they "
        "are given, and to say one of a few sentences (`Qwen3`). What a test expects of a model's "
        "knowledge cannot be "
        "had of them.",
        "",
        "| file | pass | do not | do not apply | commit of coserve |",
        "|---|---|---|---|---|",
    ]
    by_file = {name: Counter[str]() for name in plan.files}
    for each in outcomes:
        by_file[_file(each)][each["outcome"]] += 1
    for name, count in by_file.items():
        if name not in runs:
            lines.append(f"| {name} | not run yet | | | |")
            continue
        left = count["failed"] + count["skipped"]
        commit = runs[name].origin.coserve
        lines.append(f"| {name} | {count['passed']} | {left} | {count['not run']} | {commit} |")
    for title, kinds in (
        ("Those that do not pass", ("failed", "skipped")),
        ("Those that do not apply", ("not run",)),
    ):
        lines += ["", f"## {title}", "", "| number | why | tests |", "|---|---|---|"]
        tests: dict[str, list[str]] = {}
        for each in outcomes:
            if each["outcome"] in kinds:
                tests.setdefault(
                    each["reason"] or "not looked at yet, or not run again since", []
                ).append(each["test"])
        for reason, names in sorted(tests.items(), key=lambda item: -len(item[1])):
            lines.append(f"| {len(names)} | {reason} | {_listed(names)} |")
    return "\n".join(lines) + "\n"


def _made(plan: Plan, runs: dict[str, FileRun]) -> str:
    """Return when and from what the page was made."""
    days = sorted({run.on for run in runs.values()})
    commits = {run.origin.coserve for run in runs.values()}
    of = (
        f"all at commit {min(commits)} of coserve"
        if len(commits) == 1
        else "at the commits that the table names"
    )
    left = (
        ""
        if len(runs) == len(plan.files)
        else f"; {len(plan.files) - len(runs)} are still to be run"
    )
    return (
        f"Files were run one by one, {of}, {' to '.join(dict.fromkeys((days[0], days[-1])))}{left}."
    )


def _listed(tests: list[str]) -> str:
    """Return tests by file, with a number for the cases of one test."""
    by_file: dict[str, Counter[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        by_file.setdefault(Path(file).stem, Counter())[name.partition("[")[0] or "all"] += 1
    parts = []
    for file, names in by_file.items():
        listed = ", ".join(
            f"`{name}`" + (f" ({number})" if number > 1 else "") for name, number in names.items()
        )
        # Many of one file say no more than its name.
        parts.append(f"{file}: {listed}" if len(names) <= 12 else f"{file}: {sum(names.values())}")
    return "; ".join(parts)


def _origin(checkout: Path, python: str, commit: str) -> Origin:
    """Return the versions; `commit` is that of a checkout that is not a git repository."""
    how = [
        "coserve",
        "experiments/vllm_entrypoint_server.py",
        "experiments/vllm_entrypoint_models.py",
    ]
    here = ["git", "-C", str(HERE.parent)]
    coserve = _said([*here, "log", "-1", "--format=%h", "--", *how])
    changed = subprocess.run(
        [*here, "status", "--porcelain", "--", *how], capture_output=True, check=False
    ).stdout
    return Origin(
        coserve=coserve + ("+" if changed else ""),
        vllm=_said([python, "-c", "from vllm import __version__; print(__version__)"]).splitlines()[
            -1
        ],
        tests=commit or _said(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]),
    )


def _models_of_this_commit(hub: Path) -> Path:
    """Return HF_HOME with the stand-ins of this commit; others stay beside it."""
    made_by = sha256((HERE / "vllm_entrypoint_models.py").read_bytes()).hexdigest()
    models = hub / f"stand-ins-{made_by[:8]}"
    make_hub(models / "hub")
    return models


def _said(command: list[str]) -> str:
    return (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "?"
    )


def main() -> int:
    """Run the tests, write the page, and return the status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--python", required=True)
    parser.add_argument("--commit", default="", help="of the checkout, if it is no git repository")
    parser.add_argument(
        "--hub",
        type=Path,
        default=Path.home() / ".cache" / "coserve-vllm-hub",
        help="for stand-ins",
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out files with results of this commit"
    )
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    options = parser.parse_args()
    plan = Plan.read(HERE / "vllm_entrypoint_tests.toml")
    checkout, hub = options.tests.resolve(), options.hub.resolve()
    origin = _origin(checkout, options.python, options.commit)
    models = _models_of_this_commit(hub)
    kept = Kept(hub / "outcomes.jsonl")
    is_clean = not origin.coserve.endswith("+")
    done = [run.file for run in kept.of(plan, origin).values() if run.origin == origin and is_clean]
    for file in plan.files:
        if _matches(file, options.patterns) and not (options.resume and file in done):
            outcomes = run_file(file, plan, checkout, options.python, models)
            kept.put(
                FileRun(file=file, origin=origin, on=f"{date.today():%Y-%m-%d}", outcomes=outcomes)
            )
    runs = kept.of(plan, origin)
    outcomes, wrong = judged(plan, runs.values())
    PAGE.write_text(table(plan, runs, outcomes, origin))
    for each in wrong:
        print(each)
    counts = Counter(each["outcome"] for each in outcomes)
    print(json.dumps({**counts, "wrong": len(wrong), "files_left": len(plan.files) - len(runs)}))
    return 1 if wrong or not outcomes else 0


def _matches(name: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatchcase(name, f"*{pattern}*") for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
