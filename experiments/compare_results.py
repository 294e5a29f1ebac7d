"""Comparison of two results that `--save` has written.

    python -m experiments.compare_results BEFORE.json AFTER.json [--tolerance 0.05]

Numbers at the same place in both files are compared: rates and shares should be high, times, sizes
and errors low, as their names say; others are not judged. Prints every number that differs by more
than the tolerance, first those that fell; above them, differences of machine and command. The
status is 1 if a number fell.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from coserve.bench.results import Result, read_result
from coserve.errors import CoserveError

Better = Literal["higher", "lower"]
# Searched in this order in the last name of a number's path that has one.
_DIRECTIONS: tuple[tuple[str, Better], ...] = (
    (r"(_|/)per_s$|/s$|throughput|speed|attain|answered|held$|harvest|utilisation", "higher"),
    (r"(^|_)(s|ms|us)($|_per_)|(^|_)(bytes|mb|mib)$|loss|error|overload|missed|evictions", "lower"),
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One number in two results."""

    name: str
    """Path of the number in the result, such as `plans[policy=slack, jobs=1].min_us`."""

    before: float
    """Value in the first result."""

    after: float
    """Value in the second result."""

    better: Better | None
    """Direction in which the number improves; None if its name does not say."""

    @property
    def ratio(self) -> float:
        """Return the second value over the first; infinite where the first is 0."""
        if self.before == 0:
            return 1.0 if self.after == 0 else float("inf")
        return self.after / self.before

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the values differ by more than this share of the first."""
        return abs(self.after - self.before) > tolerance * abs(self.before)

    def fell(self, tolerance: float) -> bool:
        """Return whether the number became worse by more than the tolerance."""
        if self.better is None or not self.exceeds(tolerance):
            return False
        return (self.after < self.before) == (self.better == "higher")


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return every number that both results have, in the order of the first."""
    later = dict(_numbers("", after))
    return [
        Change(name=name, before=value, after=later[name], better=direction(name))
        for name, value in _numbers("", before)
        if name in later
    ]


def direction(name: str) -> Better | None:
    """Return the direction in which a number of this path improves, if a name in it says so."""
    names = re.sub(r"\[[^]]*\]", "", name).split(".")
    for part in reversed(names):
        for pattern, better in _DIRECTIONS:
            if re.search(pattern, part):
                return better
    return None


def differences(before: Result, after: Result) -> list[str]:
    """Return what makes two results hard to compare, a line for each."""
    lines = []
    if before.experiment != after.experiment:
        lines.append(f"experiment: {before.experiment}, then {after.experiment}")
    earlier, later = asdict(before.machine), asdict(after.machine)
    lines += [
        f"{name}: {value}, then {later[name]}"
        for name, value in earlier.items()
        if value != later[name]
    ]
    if before.command != after.command:
        lines.append(f"command: {before.command}, then {after.command}")
    return lines


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a result by their paths; a list of numbers counts by its median."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from _numbers_of_list(path, value)


def _numbers_of_list(path: str, values: Sequence[Any]) -> Iterator[tuple[str, float]]:
    numbers = [each for each in values if isinstance(each, int | float)]
    if numbers and len(numbers) == len(values):
        yield path, float(median(numbers))
        return
    seen = set[str]()
    for index, value in enumerate(values):
        label = _label(value) or str(index)
        # Rows that have nothing to tell them apart are compared by their places.
        place = f"{path}[{label}]" if label not in seen else f"{path}[{label}, {index}]"
        seen.add(label)
        yield from _numbers(place, value)


def _label(row: Any) -> str:
    """Return the settings that identify a row: words and whole numbers before its first result."""
    settings = []
    for name, value in row.items() if isinstance(row, Mapping) else ():
        if not isinstance(value, str | int) or direction(name) is not None:
            break
        settings.append(f"{name}={value}")
    return ", ".join(settings)


def _print(shown: Sequence[Change], title: str) -> None:
    if not shown:
        return
    print(f"\n{title}")
    for each in shown:
        print(f"  {each.name}: {each.before:g} -> {each.after:g} ({each.ratio:.3f} x)")


def main() -> int:
    """Compare two files; return the status of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="share by which numbers may differ [0.05]"
    )
    options = parser.parse_args()
    try:
        before, after = read_result(options.before), read_result(options.after)
    except CoserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, result in (("before", before), ("after", after)):
        code = result.commit or result.version
        print(f"{name}: {result.experiment} at {code}, {result.date}, load {result.load:g}")
    for line in differences(before, after):
        print(f"not the same {line}")
    both = changes(before.numbers, after.numbers)
    if not both:
        print("error: the results have no number in common", file=sys.stderr)
        return 2
    fell = [each for each in both if each.fell(options.tolerance)]
    others = [each for each in both if each.exceeds(options.tolerance) and each not in fell]
    _print(fell, "fell")
    _print([each for each in others if each.better is not None], "rose")
    _print([each for each in others if each.better is None], "differs, and is not judged")
    print(f"\n{len(fell)} of {len(both)} numbers fell by more than {options.tolerance:.0%}")
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())
