"""What predictions turned out to be wrong by: a correction for steps of each kind, and a margin.

LLMStation section 4.2 trusts records of what steps took over its model once there are some; here records move
corrections, which also hold for kinds of step that were seen long ago, or never.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from coserve.scheduling.profile import Curve, Profile

# Weight of the newest step in a correction.
_CORRECTION_WEIGHT = 0.15
# How much of a correction is left after a step in which nothing of its kind was seen.
_TRUST_PER_STEP = 0.99
# Steps whose errors the margin looks at.
_NUM_ERRORS = 256
_NUM_STEPS_PER_MARGIN = 16
_MARGIN_QUANTILE = 0.95
_LEAST_MARGIN, _MOST_MARGIN = 0.02, 0.5

# A profile is to be corrected once steps have taken this much more or less than it says, after as many steps.
_FAR_OFF, _SETTLED_STEPS = 1.15, 500

_SECTIONS = ("forward", "loss", "backward", "update")

# Section, the order of magnitude of its rows, and whether windows are among them.
_Kind = tuple[str, int, bool]


class Corrections:
    """Factors by section ("forward", "loss", "backward", "update"), rows and windows. No clock, no I/O.

    margin: what steps take more than predicted, as a share; all but the worst of recent steps.
    """

    def __init__(self, *, margin: float = 0.1) -> None:
        """margin: until errors are known."""
        self.margin = margin
        # For steps of a kind, for a section, and (under "") for all: what predictions are off by, and when it was seen.
        self._seen: dict[_Kind | str, tuple[float, int]] = {}
        self._known: dict[_Kind | str, float] = {}  # worked out from these, until the next step
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)
        self._num_steps = 0

    def of(self, section: str, rows: int, windows: bool) -> float:
        """The factor of a section with this many rows, with windows among them or without."""
        kind = (section, rows.bit_length(), windows)
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = self._aged(kind, self.of_section(section))
        return found

    def of_section(self, section: str) -> float:
        """The correction of a section, or ("") of all."""
        found = self._known.get(section)
        if found is None:
            wider = self.of_section("") if section else 1.0
            found = self._known[section] = self._aged(section, wider)
        return found

    def observe(self, section: str, rows: int, windows: bool, *, predicted_s: float, measured_s: float) -> None:
        """A section of a step was predicted with its correction; what it took."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        kind = (section, rows.bit_length(), windows)
        # What the correction would have had to be. (It was predicted with one that age had moved.)
        right = self.of(section, rows, windows)
        # One step that was held up by something else must not move it far.
        right *= min(2.0, max(0.5, measured_s / predicted_s))
        if kind not in self._seen:  # half of the way from what was believed
            self._seen[kind] = self.of_section(section), self._num_steps
            self._move(kind, right, 0.5)
        else:
            self._move(kind, right, _CORRECTION_WEIGHT)
        self._move(section, right, _CORRECTION_WEIGHT)
        self._move("", right, _CORRECTION_WEIGHT)
        self._known.clear()

    def observe_step(self, *, predicted_s: float, measured_s: float) -> None:
        """A whole step: what the margin is made of. Both are above 0."""
        self._errors.append(measured_s / predicted_s - 1)
        self._num_steps += 1
        self._known.clear()
        if self._num_steps % _NUM_STEPS_PER_MARGIN == 0:
            late = sorted(self._errors)[int(_MARGIN_QUANTILE * (len(self._errors) - 1))]
            self.margin = min(_MOST_MARGIN, max(_LEAST_MARGIN, late))

    def settled(self, profile: Profile) -> Profile | None:
        """A profile as steps have shown it to be, if that is far from what it says, and was seen for long."""
        is_near = all(1 / _FAR_OFF < self.of_section(section) < _FAR_OFF for section in _SECTIONS)
        return None if is_near or self._num_steps < _SETTLED_STEPS else self._corrected(profile)

    def refresh(self) -> None:
        """Hold all that was seen for as true as if it had been seen just now."""
        self._seen = {key: (correction, self._num_steps) for key, (correction, _) in self._seen.items()}
        self._known.clear()

    def recent_errors(self) -> Sequence[float]:
        """|measured - predicted| / measured of recent steps, sorted."""
        return sorted(abs(error) / (1 + error) for error in self._errors)

    def _corrected(self, profile: Profile) -> Profile:
        """A profile as steps have shown it to be so far."""
        by = {section: self.of_section(section) for section in _SECTIONS}

        def corrected(section: str, curve: Curve) -> Curve:
            seconds = [s * self.of(section, n, False) for n, s in zip(curve.rows, curve.seconds, strict=True)]
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
            decode_saved_s=profile.decode_saved_s * by["forward"],
            s_per_window_row=profile.s_per_window_row * by["forward"],
            backward_s_per_pair=profile.backward_s_per_pair * by["backward"],
            s_per_parameter=profile.s_per_parameter * by["update"],
            update_s=profile.update_s * by["update"],
        )

    def _move(self, key: _Kind | str, right: float, weight: float) -> None:
        """A correction would have had to be this."""
        seen = self._seen.get(key)
        old = 1.0 if seen is None else seen[0]
        self._seen[key] = old * (right / old) ** weight, self._num_steps

    def _aged(self, key: _Kind | str, wider: float) -> float:
        """A correction that gives way to the wider one the longer it was not seen: a kind of step that once took very
        long would never be tried again.
        """
        seen = self._seen.get(key)
        if seen is None:
            return wider
        correction, step = seen
        trust = _TRUST_PER_STEP ** (self._num_steps - step)
        found: float = wider * (correction / wider) ** trust
        return found
