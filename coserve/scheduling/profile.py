"""What a device takes for the pieces of a step: measured once (`coserve.devices.profiles.profiling`), or
made from the paces of one that is not here (`coserve.simulate.roofline`).
"""

from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from coserve.scheduling.counts import JobCounts, ModelCounts
from coserve.scheduling.sharing import Sharing

# Rows up to which curves are tables.
TABLE_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds at some numbers of rows, rising; between them as a line, beyond them as the last line
    continues.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            len(self.rows) != len(self.seconds)
            or len(self.rows) < 2
            or list(self.rows) != sorted(set(self.rows))
        ):
            raise ValueError(f"a curve needs two rising numbers of rows or more, not {self.rows}")

    def at(self, rows: int) -> float:
        if rows <= 0:
            return 0.0
        if rows <= self.rows[0]:
            return self.seconds[0]
        high = min(bisect_right(self.rows, rows), len(self.rows) - 1)
        (r0, r1), (s0, s1) = self.rows[high - 1 : high + 1], self.seconds[high - 1 : high + 1]
        return s0 + (s1 - s0) * (rows - r0) / (r1 - r0)

    def slower(self, factor: float) -> "Curve":
        """Return the curve with all seconds multiplied."""
        return Curve(rows=self.rows, seconds=tuple([factor * each for each in self.seconds]))

    def table(self) -> tuple[float, ...]:
        """Seconds by number of rows, never falling, however noisy the measurements were."""
        return _table(self)


@lru_cache(maxsize=64)
def _table(curve: Curve) -> tuple[float, ...]:
    """Kept: every engine on a profile asks for those of its curves."""
    return tuple(accumulate(map(curve.at, range(TABLE_ROWS + 1)), max))


@dataclass(frozen=True, kw_only=True)
class OneCall:
    """What a forward pass takes less whose blocks run as one call (`coserve.kernels.trace`): one
    with requests, with up to `rows` in all, and `prompt_pairs` of a row and a key of prompts.

    saved_s: without windows. window_saved_s, saved_s_per_window_row: with windows of the reference
    job, beside `Profile.s_per_window_bypass`.
    """

    rows: int = 0
    prompt_pairs: int = 0
    saved_s: float = 0.0
    window_saved_s: float = 0.0
    saved_s_per_window_row: float = 0.0

    def scaled(self, factor: float) -> "OneCall":
        """With other seconds."""
        return replace(
            self,
            saved_s=factor * self.saved_s,
            window_saved_s=factor * self.window_saved_s,
            saved_s_per_window_row=factor * self.saved_s_per_window_row,
        )


_CURVES = ("forward", "head", "loss", "backward")
_OPTIONAL_CURVES = ("sample", "score", "mask", "sums", "backward_sums")
_SECONDS = (
    *("s_per_pair", "backward_s_per_pair", "s_per_key", "s_per_span", "s_per_bypass"),
    *("s_per_window_row", "s_per_window_bypass", "s_per_parameter", "update_s"),
)
# Of what was not measured.
FREE = Curve(rows=(1, 2), seconds=(0.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a device needs for the pieces of a step of one model.

    forward: rows of requests through all blocks. head: rows through the head, and the likeliest
    token of each. sample: what drawing a token of each row takes more than that, at temperature 1.
    mask: what rows take more of which only some tokens may come. score: rows through the head to
    the log-probability of the next token of each, as for prompts. loss: trained rows through the
    head, forward and backward. backward: a tasklet of the reference job (`job`), on rows without
    keys. s_per_pair, backward_s_per_pair: attention of a row to a key of its window in all blocks,
    and in one block backward. s_per_key: a key that a span's attention reads. s_per_span: a span
    more. s_per_bypass: a site of an adapter more; s_per_window_bypass: what it takes more in a
    window, whatever its rows. s_per_window_row: what a window's row of the reference job costs more
    than a request's (its bypasses, and saving). s_per_parameter, update_s: an optimizer step, by
    what it moves and at least. sharing: of a device that can be divided. s_per_copied_byte: of a
    page that goes to the host, or comes back; None: not known. saved_bytes_per_token: that a pack
    of the reference job keeps for its backward pass; 0: not known. joining: what a tasklet of
    several packs takes, as a multiple of one of a single pack of as many rows. sums, backward_sums:
    what `forward` and `backward` have of moving data between ranks.
    """

    model: ModelCounts
    job: JobCounts
    forward: Curve
    head: Curve
    loss: Curve
    backward: Curve
    s_per_pair: float
    backward_s_per_pair: float
    s_per_key: float
    s_per_span: float
    s_per_bypass: float
    s_per_window_row: float
    s_per_parameter: float
    update_s: float
    sample: Curve = FREE
    score: Curve = FREE
    mask: Curve = FREE
    sharing: Sharing | None = None
    s_per_copied_byte: float | None = None
    saved_bytes_per_token: int = 0
    s_per_window_bypass: float = 0.0
    one_call: OneCall = OneCall()
    joining: float = 1.1
    sums: Curve = FREE
    backward_sums: Curve = FREE

    def slower(self, factor: float) -> "Profile":
        """Return the profile of a device on which every piece takes longer by this factor.

        Savings keep their seconds, so that what they are taken from stays larger by the factor.
        """
        curves = {
            name: getattr(self, name).slower(factor) for name in (*_CURVES, *_OPTIONAL_CURVES)
        }
        seconds = {name: factor * getattr(self, name) for name in _SECONDS}
        copied = None if self.s_per_copied_byte is None else factor * self.s_per_copied_byte
        return replace(self, **curves, **seconds, s_per_copied_byte=copied)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Profile":
        """The inverse, also for profiles that lack what has a default; ValueError, TypeError or
        KeyError for anything else.
        """
        curves = {
            name: Curve(rows=tuple(fields[name]["rows"]), seconds=tuple(fields[name]["seconds"]))
            for name in (*_CURVES, *_OPTIONAL_CURVES)
            if name in fields or name in _CURVES
        }
        counts = {"model": ModelCounts(**fields["model"]), "job": JobCounts(**fields["job"])}
        sharing = None if fields.get("sharing") is None else Sharing.from_json(fields["sharing"])
        one_call = OneCall(**fields.get("one_call", {}))
        return cls(**{**fields, **curves, **counts, "sharing": sharing, "one_call": one_call})


def seconds_at(table: tuple[float, ...], rows: int) -> float:
    """Of a curve's table, at any number of rows."""
    if rows <= TABLE_ROWS:
        return table[rows]
    return table[-1] + (table[-1] - table[TABLE_ROWS // 2]) / (TABLE_ROWS // 2) * (
        rows - TABLE_ROWS
    )
