"""Remarks about the records of a training file, equal ones together: left-out records, warnings,
faults.
"""

from dataclasses import dataclass, field

# Places that are named of each remark.
_MAX_NAMED = 3


class Remarks:
    """Remarks, each with the places that it is about, in the order in which they came."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, place: str, remark: str) -> None:
        """Note a remark about a place, such as "line 3"."""
        places = self._places.setdefault(remark, [])
        self._counts[remark] = self._counts.get(remark, 0) + 1
        if len(places) < _MAX_NAMED:
            places.append(place)

    def __len__(self) -> int:
        """Return how many different remarks there are."""
        return len(self._places)

    @property
    def num_places(self) -> int:
        """Return how many places they are about; one that has two remarks counts twice."""
        return sum(self._counts.values())

    def lines(self) -> list[str]:
        """Return one line for each remark, such as "lines 3, 7, 9 and 1,204 more: is not valid
        JSON".
        """
        return [
            f"{_named(self._places[remark], self._counts[remark])}: {remark}"
            for remark in self._places
        ]


@dataclass(frozen=True, kw_only=True)
class ReadingReport:
    """Remarks about a file's records that do not stop it from being used."""

    # Records that are left out, since nothing is left of them to train on.
    left_out: Remarks = field(default_factory=Remarks)
    # What the chat template does not write of records, so that it is not learned.
    warnings: Remarks = field(default_factory=Remarks)
    # Whether a record of which nothing is left is a fault.
    is_strict: bool = False


def _named(places: list[str], count: int) -> str:
    if count == 1:
        return places[0]
    kind = places[0].rpartition(" ")[0]
    numbers = [place.removeprefix(f"{kind} ") for place in places]
    if count > len(places):
        return f"{kind}s {', '.join(numbers)} and {count - len(places):,} more"
    return f"{kind}s {', '.join(numbers[:-1])} and {numbers[-1]}"
