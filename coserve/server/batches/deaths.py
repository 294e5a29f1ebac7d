"""Attribution of process deaths, of the server or the engine, to lines of batches.

A death is charged to every line that was running. A line with two deaths is a suspect. Suspects run
apart from all other batch work, in groups; a group in which a process dies is divided and retried,
and a line that two processes die of while it runs alone is set aside. Every other line is retried
until it is answered, so a line never fails because of another one, whichever tenant that belongs
to. Two deaths are needed because a process may end for an unrelated reason (`kill -9`, lack of
memory) while a harmless line runs alone; such a line is retried next, and is answered.

A group is divided into 16 parts instead of two: that costs a few more rounds for harmless lines,
and saves deaths, each of which interrupts all requests. Among 512 lines, one is found with two
deaths that make all of them suspects, and four more (32, 2, 1, 1).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

# Deaths beside other lines after which a line is tried apart.
_NUM_DEATHS_TO_SUSPECT = 2
# Deaths of a suspect that ran alone after which it is set aside.
_NUM_DEATHS_ALONE = 2
# Parts into which a group of suspects is divided.
_NUM_PARTS = 16

# A batch's id, and the line's custom_id.
LineKey = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class LineDeaths:
    """Deaths of processes that are charged to one line."""

    num: int
    """Processes that died while the line was under way."""
    num_lines: int
    """Lines that were under way at the last of these deaths, this one included."""
    num_alone: int = 0
    """Processes that died while the line was a suspect and no other line was under way."""

    @property
    def is_suspect(self) -> bool:
        """Return whether the line runs apart from all lines that are not suspects."""
        return self.num >= _NUM_DEATHS_TO_SUSPECT

    @property
    def is_guilty(self) -> bool:
        """Return whether the line is set aside."""
        return self.num_alone >= _NUM_DEATHS_ALONE

    @property
    def max_group(self) -> int:
        """Number of suspects, this one included, that may be tried together."""
        return max(1, -(-self.num_lines // _NUM_PARTS))


def after_death(before: LineDeaths | None, *, num_lines: int) -> LineDeaths:
    """Return the deaths of a line after one more, at which `num_lines` lines were under way."""
    if before is None:
        return LineDeaths(num=1, num_lines=num_lines)
    num_alone = before.num_alone + (before.is_suspect and num_lines == 1)
    return LineDeaths(num=before.num + 1, num_lines=num_lines, num_alone=num_alone)


def next_group(
    waiting: Collection[LineKey], deaths: Mapping[LineKey, LineDeaths]
) -> Sequence[LineKey]:
    """Return the suspects to try next among those that wait: one that a process died of alone, else
    the smallest groups, since their lines are nearest to a verdict.
    """
    suspects = [line for line in waiting if line in deaths and deaths[line].is_suspect]
    if not suspects:
        return ()
    suspects.sort(key=lambda line: (-deaths[line].num_alone, deaths[line].num_lines))
    size = deaths[suspects[0]].max_group
    # Groups are not mixed: a death is to narrow down the group in which it happened.
    return [line for line in suspects[:size] if deaths[line].max_group == size]
