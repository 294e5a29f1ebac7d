"""Learned errors of predictions: a correction for steps of each kind, a margin, and the time of
steps outside their sections.

LLMStation section 4.2 trusts records of what steps took over its model once there are some; here
records move corrections, which also hold for kinds of step that were seen long ago, or never.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from coserve.scheduling.aged_factors import AgedFactors, bounded, size_class
from coserve.scheduling.profile import Curve, Profile

# Weight of the first step of its kind: half of the way from the expected value.
_FIRST_WEIGHT = 0.5
# Steps whose errors the margin looks at.
_NUM_ERRORS = 256
_NUM_STEPS_PER_MARGIN = 16
_MARGIN_QUANTILE = 0.95
_MIN_MARGIN, _MAX_MARGIN = 0.02, 0.5

# Weight of the newest step in an overhead.
_OVERHEAD_WEIGHT = 0.1
# By how much an overhead may exceed the expected one, as a factor and in seconds, and that of a
# first step: one that was held up must not count far.
_MAX_RATIO, _MAX_MORE_S, _MAX_FIRST_OVERHEAD_S = 2.0, 1e-4, 5e-3

# A profile is to be corrected once steps have taken this much more or less than it says, after as
# many steps.
_FAR_OFF, _SETTLED_STEPS = 1.15, 500

_SECTIONS = ("forward", "loss", "backward", "update")

# Section, the order of magnitude of its rows, and whether windows are among them.
_Kind = tuple[str, int, bool]


class Corrections:
    """Factors by section ("forward", "loss", "backward", "update"), size class of rows, and
    windows. No clock, no I/O.
    """

    def __init__(self, *, margin: float = 0.1) -> None:
        """Begin without corrections.

        Args:
            margin: Share by which steps take more than predicted, all but the worst of recent ones;
                the initial value, until errors are known.
        """
        self.margin = margin
        # For steps of a kind, for a section, and (under "") for all: what predictions are off by.
        self._factors = AgedFactors()
        self._known: dict[_Kind | str, float] = {}  # worked out from these, until they change
        self._known_at = 0
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    def of(self, section: str, rows: int, windows: bool) -> float:
        """Return the factor of a section with this many rows, with or without windows among
        them.
        """
        # As `size_class`, without a call: every search comes by here.
        kind = (section, (rows - 1).bit_length(), windows)
        factor = self._known.get(kind)
        if factor is None:
            factor = self._known[kind] = self._factors.of(kind, self.of_section(section))
        return factor

    def of_section(self, section: str) -> float:
        """Return the correction of a section; of all sections for ""."""
        factor = self._known.get(section)
        if factor is None:
            wider = self.of_section("") if section else 1.0
            factor = self._known[section] = self._factors.of(section, wider)
        return factor

    def observe(
        self, section: str, rows: int, windows: bool, *, predicted_s: float, measured_s: float
    ) -> None:
        """Learn from a section of a step that was predicted with its correction."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        # What the correction would have had to be. (It was predicted with one that age had moved.)
        right, kind = self.of(section, rows, windows), (section, size_class(rows), windows)
        if measured_s == predicted_s and self._factors.hold((kind, section, ""), right):
            return
        right *= bounded(measured_s / predicted_s)
        self._factors.move(
            kind, right, believed=self.of_section(section), first_weight=_FIRST_WEIGHT
        )
        self._factors.move(section, right)
        self._factors.move("", right)
        self._forget_changed()

    def observe_step(self, *, predicted_s: float, measured_s: float) -> None:
        """Update the margin by a whole step. Both times are above 0."""
        self._errors.append(measured_s / predicted_s - 1)
        self._factors.count_step()
        self._forget_changed()
        if self._factors.num_steps % _NUM_STEPS_PER_MARGIN == 0:
            late = sorted(self._errors)[int(_MARGIN_QUANTILE * (len(self._errors) - 1))]
            self.margin = min(_MAX_MARGIN, max(_MIN_MARGIN, late))

    def settled(self, profile: Profile) -> Profile | None:
        """Return the profile corrected by measured steps; None if it is near enough, or steps were
        too few.
        """
        is_near = all(1 / _FAR_OFF < self.of_section(section) < _FAR_OFF for section in _SECTIONS)
        return (
            None
            if is_near or self._factors.num_steps < _SETTLED_STEPS
            else self._corrected(profile)
        )

    def refresh(self) -> None:
        """Take everything learned as seen just now."""
        self._factors.refresh()
        self._forget_changed()

    def recent_errors(self) -> Sequence[float]:
        """Return |measured - predicted| / measured of recent steps, sorted."""
        return sorted(abs(error) / (1 + error) for error in self._errors)

    def _forget_changed(self) -> None:
        """Clear cached factors if any has changed. Where steps take what was predicted, as on a
        modelled device without noise, none has.
        """
        if self._factors.num_changes != self._known_at:
            self._known.clear()
            self._known_at = self._factors.num_changes

    def _corrected(self, profile: Profile) -> Profile:
        """Return the profile corrected by the steps so far."""
        by = {section: self.of_section(section) for section in _SECTIONS}

        def corrected(section: str, curve: Curve) -> Curve:
            seconds = [
                s * self.of(section, n, False)
                for n, s in zip(curve.rows, curve.seconds, strict=True)
            ]
            return Curve(rows=curve.rows, seconds=tuple(seconds))

        def scaled(curve: Curve) -> Curve:
            return Curve(rows=curve.rows, seconds=tuple([s * by["forward"] for s in curve.seconds]))

        return replace(
            profile,
            forward=corrected("forward", profile.forward),
            head=scaled(profile.head),
            sample=scaled(profile.sample),
            score=scaled(profile.score),
            loss=corrected("loss", profile.loss),
            backward=corrected("backward", profile.backward),
            s_per_pair=profile.s_per_pair * by["forward"],
            s_per_key=profile.s_per_key * by["forward"],
            s_per_span=profile.s_per_span * by["forward"],
            s_per_bypass=profile.s_per_bypass * by["forward"],
            s_per_window_bypass=profile.s_per_window_bypass * by["forward"],
            one_call=profile.one_call.scaled(by["forward"]),
            s_per_window_row=profile.s_per_window_row * by["forward"],
            backward_s_per_pair=profile.backward_s_per_pair * by["backward"],
            s_per_parameter=profile.s_per_parameter * by["update"],
            update_s=profile.update_s * by["update"],
        )


class StepOverhead:
    """Learned time of steps outside their sections: the host's part, before a device begins and
    after it is done; for steps in which packs begin, and for others. No clock, no I/O.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}

    def seconds(self, *, begins: bool) -> float:
        """Return the overhead of a step in which packs begin, or of another; before one was seen,
        the other steps'.
        """
        return self._seconds.get(begins, self._seconds.get(False, 0.0))

    def observe(self, seconds: float, *, begins: bool) -> None:
        """Learn from the overhead of a step."""
        believed, seconds = self.seconds(begins=begins), max(0.0, seconds)
        is_first = begins not in self._seconds
        most_s = _MAX_FIRST_OVERHEAD_S if is_first else _MAX_RATIO * believed + _MAX_MORE_S
        weight = _FIRST_WEIGHT if is_first else _OVERHEAD_WEIGHT
        self._seconds[begins] = believed + weight * (min(seconds, most_s) - believed)
