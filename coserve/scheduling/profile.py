"""Measured times of a device for the pieces of a step (`coserve.devices.profiles.profiling`), or
modelled ones of a device that is not here (`coserve.simulate.roofline`).
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
    """Seconds at some numbers of rows, rising: linear between them, and beyond them along the last
    segment.
    """

    rows: tuple[int, ...]
    """Numbers of rows, rising."""
    seconds: tuple[float, ...]
    """Seconds at these rows."""

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
        """Return the seconds by number of rows, never falling, however noisy the measurements
        were.
        """
        return _table(self)


@lru_cache(maxsize=64)
def _table(curve: Curve) -> tuple[float, ...]:
    """Return a curve's table; cached, since every engine on a profile needs those of its curves."""
    return tuple(accumulate(map(curve.at, range(TABLE_ROWS + 1)), max))


@dataclass(frozen=True, kw_only=True)
class OneCall:
    """Savings of a forward pass whose blocks run as one call (`coserve.kernels.trace`), which one
    with requests does up to some numbers of rows and pairs.
    """

    rows: int = 0
    """Maximum number of rows in all."""
    prompt_pairs: int = 0
    """Maximum number of pairs of a row and a key of prompts."""
    saved_s: float = 0.0
    """Seconds saved without windows."""
    window_saved_s: float = 0.0
    """Seconds saved with windows of the reference job, beside `Profile.s_per_window_bypass`."""
    saved_s_per_window_row: float = 0.0
    """Seconds saved per row of these windows."""

    def scaled(self, factor: float) -> "OneCall":
        """Return the same with its seconds multiplied."""
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
    """Times of a device for the pieces of a step of one model, in seconds; curves go by number of
    rows.
    """

    model: ModelCounts
    """Costs of the model's rows."""
    job: JobCounts
    """Costs of the reference job's rows."""
    forward: Curve
    """Rows of requests through all blocks."""
    head: Curve
    """Rows through the head, with the likeliest token of each."""
    loss: Curve
    """Trained rows through the head, forward and backward."""
    backward: Curve
    """A tasklet of the reference job, on rows without keys."""
    s_per_pair: float
    """Attention of a row to a key of its window, in all blocks."""
    backward_s_per_pair: float
    """The same backward, in one block."""
    s_per_key: float
    """A key that a span's attention reads."""
    s_per_span: float
    """One more span."""
    s_per_bypass: float
    """One more site of an adapter."""
    s_per_window_row: float
    """Additional cost of a window's row of the reference job over a request's: its bypasses, and
    saving.
    """
    s_per_parameter: float
    """Optimizer step, per parameter."""
    update_s: float
    """Optimizer step, at least."""
    sample: Curve = FREE
    """Additional time of sampling a token of each row at temperature 1."""
    score: Curve = FREE
    """Rows through the head to the log-probability of the next token of each, as for prompts."""
    mask: Curve = FREE
    """Additional time of rows whose tokens a grammar restricts."""
    sharing: Sharing | None = None
    """Speeds of a device that can be divided; None if it cannot."""
    s_per_copied_byte: float | None = None
    """A byte of a page that is copied to the host or back; None if unknown."""
    saved_bytes_per_token: int = 0
    """Bytes that a pack of the reference job keeps for its backward pass, per token; 0 if unknown.
    """
    s_per_window_bypass: float = 0.0
    """Additional cost of a site of an adapter in a window, whatever its rows."""
    one_call: OneCall = OneCall()
    """Savings of a forward pass that runs as one call."""
    joining: float = 1.1
    """Ratio of a tasklet of several packs to one of a single pack of as many rows."""
    sums: Curve = FREE
    """Part of `forward` that moves data between ranks."""
    backward_sums: Curve = FREE
    """Part of `backward` that moves data between ranks."""

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
        """Return the profile that `to_json` wrote; fields with a default may be missing.

        Raises:
            ValueError, TypeError, KeyError: The fields are not those of a profile.
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
    """Return the seconds of a curve's table at any number of rows."""
    if rows <= TABLE_ROWS:
        return table[rows]
    return table[-1] + (table[-1] - table[TABLE_ROWS // 2]) / (TABLE_ROWS // 2) * (
        rows - TABLE_ROWS
    )
