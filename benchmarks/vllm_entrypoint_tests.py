"""vLLM's own entrypoint tests against `coserve up`: how many pass, and why the others do not.

    python benchmarks/vllm_entrypoint_tests.py --tests CHECKOUT --python PYTHON [PATTERN …]

CHECKOUT is a copy of vLLM's repository (its folder tests/ is enough), PYTHON one in whose environment vLLM of about the
same age, pytest, pytest-asyncio, pytest-timeout and tblib are installed: the tests import vLLM's tokenizers and
schemas. Their server is coserve (vllm_entrypoint_server.py), their models are stand-ins (vllm_entrypoint_models.py).
Which files are run, which tests do not apply, and why a test fails that applies is in vllm_entrypoint_tests.toml; a
failure without a reason there, or a reason of a test that passes, ends it with status 1. PATTERN picks files; how the
tests of the others ended the last time is kept beside the stand-ins. It writes the page vllm-entrypoint-tests.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.vllm_entrypoint_models import make_hub

HERE = Path(__file__).parent
PAGE = HERE / "vllm-entrypoint-tests.md"
BELOW = "tests/entrypoints/"
# Of a test, with the start of its server.
_TIMEOUT_S = 180


@dataclass(frozen=True)
class Reason:
    """Why tests with such names do not pass."""

    text: str
    patterns: tuple[str, ...]

    def covers(self, test: str) -> bool:
        return any(fnmatchcase(test, pattern) for pattern in self.patterns)


@dataclass(frozen=True)
class Plan:
    """What is run of vLLM's tests, and what is known of them."""

    files: tuple[str, ...]
    does_not_apply: tuple[Reason, ...]
    fails: tuple[Reason, ...]

    @staticmethod
    def read(path: Path) -> "Plan":
        """From the file beside this script."""
        found = tomllib.loads(path.read_text())

        def reasons(name: str) -> tuple[Reason, ...]:
            return tuple(Reason(each["reason"], tuple(each["tests"])) for each in found.get(name, []))

        return Plan(tuple(found["files"]), reasons("does_not_apply"), reasons("fails"))


def run(plan: Plan, checkout: Path, python: str, hub: Path, files: list[str]) -> list[dict[str, str]]:
    """Of each test: its name, the outcome (passed, failed, skipped, not run), and why; of other files, as it was."""
    make_hub(hub / "hub")
    kept = hub / "outcomes.jsonl"
    before = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    others = [each for each in before if _file(each) in plan.files and _file(each) not in files]
    patterns = [pattern for each in plan.does_not_apply for pattern in each.patterns]
    with TemporaryDirectory(prefix="coserve-vllm-") as directory:
        outcomes = Path(directory) / "outcomes.jsonl"
        outcomes.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": f"{checkout}{os.pathsep}{HERE.parent}",
            "HF_HOME": str(hub),
            "HF_HUB_OFFLINE": "1",
            "COSERVE_COMMAND": json.dumps([sys.executable, "-m", "coserve"]),
            "COSERVE_OUTCOMES": str(outcomes),
            "COSERVE_DOES_NOT_APPLY": json.dumps(patterns),
        }
        plugins = ("-p", "benchmarks.vllm_entrypoint_server", "-p", "no:cacheprovider")
        command = [python, "-m", "pytest", "-q", "--continue-on-collection-errors", f"--timeout={_TIMEOUT_S}", *plugins]
        command += [BELOW + name for name in files]
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        found = [json.loads(line) for line in outcomes.read_text().splitlines()]
    found = [{**each, "test": each["test"].removeprefix(BELOW)} for each in found]
    everything = sorted([*others, *found], key=lambda each: plan.files.index(_file(each)))
    kept.write_text("".join(json.dumps(each) + "\n" for each in everything))
    return everything


def _file(outcome: dict[str, str]) -> str:
    return outcome["test"].partition("::")[0]


def judged(plan: Plan, outcomes: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[str]]:
    """Each with its reason; and what is wrong: failures without one, reasons of what passes."""
    wrong = []
    for each in outcomes:
        known = plan.does_not_apply if each["outcome"] == "not run" else plan.fails
        reason = next((reason.text for reason in known if reason.covers(each["test"])), "")
        if each["outcome"] == "passed" and reason:
            wrong.append(f"passes, against its reason: {each['test']}")
        if each["outcome"] in ("failed", "skipped") and not reason:
            wrong.append(f"{each['outcome']}, without a reason: {each['test']}\n{each['why'][-1500:]}")
        each["reason"] = reason
    return outcomes, wrong


def table(plan: Plan, outcomes: list[dict[str, str]], version: str, commit: str) -> str:
    """The page."""
    total = Counter(each["outcome"] for each in outcomes)
    num_left = total["failed"] + total["skipped"]
    lines = [
        "# vLLM's entrypoint tests",
        "",
        "Made by `python benchmarks/vllm_entrypoint_tests.py --tests CHECKOUT --python PYTHON` "
        "([vllm_entrypoint_tests.py](vllm_entrypoint_tests.py));",
        "the reasons are kept in [vllm_entrypoint_tests.toml](vllm_entrypoint_tests.toml). "
        f"vLLM {version}, its tests of commit {commit}, {date.today():%Y-%m-%d}.",
        "",
        f"Of {len(outcomes)} tests that start a server for completions, chats, models, LoRA, tokenization, responses "
        f"or structured output, {total['not run']} do not apply; of the {len(outcomes) - total['not run']} that do, "
        f"**{total['passed']} pass** and {num_left} do not.",
        "",
        "Models are stand-ins of two layers: with random weights, or taught to think and to say one of a few sentences "
        "(`Qwen3`). What a test expects of a model's knowledge cannot be had of them.",
        "",
        "| file | pass | do not | do not apply |",
        "|---|---|---|---|",
    ]
    by_file = {name: Counter[str]() for name in plan.files}
    for each in outcomes:
        by_file[_file(each)][each["outcome"]] += 1
    for name, count in by_file.items():
        if not count:
            lines.append(f"| {name} | not run yet | | |")
            continue
        lines.append(f"| {name} | {count['passed']} | {count['failed'] + count['skipped']} | {count['not run']} |")
    for title, kinds in (("Those that do not pass", ("failed", "skipped")), ("Those that do not apply", ("not run",))):
        lines += ["", f"## {title}", "", "| number | why | tests |", "|---|---|---|"]
        tests: dict[str, list[str]] = {}
        for each in outcomes:
            if each["outcome"] in kinds:
                tests.setdefault(each["reason"] or "not looked at yet, or not run again since", []).append(each["test"])
        for reason, names in sorted(tests.items(), key=lambda item: -len(item[1])):
            lines.append(f"| {len(names)} | {reason} | {_listed(names)} |")
    return "\n".join(lines) + "\n"


def _listed(tests: list[str]) -> str:
    """By file, cases of one test as a number."""
    by_file: dict[str, Counter[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        by_file.setdefault(Path(file).stem, Counter())[name.partition("[")[0] or "all"] += 1
    parts = []
    for file, names in by_file.items():
        listed = ", ".join(f"`{name}`" + (f" ({number})" if number > 1 else "") for name, number in names.items())
        # Many of one file say no more than its name.
        parts.append(f"{file}: {listed}" if len(names) <= 12 else f"{file}: {sum(names.values())}")
    return "; ".join(parts)


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "?"


def main() -> int:
    """Its status is the process's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--python", required=True)
    parser.add_argument("--commit", default="", help="of the checkout, if it is no git repository")
    parser.add_argument("--hub", type=Path, default=Path.home() / ".cache" / "coserve-vllm-hub", help="for stand-ins")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    arguments = parser.parse_args()
    plan = Plan.read(HERE / "vllm_entrypoint_tests.toml")
    chosen: list[Any] = [name for name in plan.files if not arguments.patterns or _matches(name, arguments.patterns)]
    checkout = arguments.tests.resolve()
    outcomes, wrong = judged(plan, run(plan, checkout, arguments.python, arguments.hub.resolve(), chosen))
    commit = arguments.commit or _said(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"])
    version = _said([arguments.python, "-c", "from vllm import __version__; print(__version__)"])
    PAGE.write_text(table(plan, outcomes, version.splitlines()[-1], commit))
    for each in wrong:
        print(each)
    counts = Counter(each["outcome"] for each in outcomes)
    print(json.dumps({**counts, "wrong": len(wrong)}))
    return 1 if wrong or not outcomes else 0


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, f"*{pattern}*") for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
