"""Measurement of the profile of a model on this device, from the engine's own pieces
(`ProfiledPieces`).

A quick profile has few measurements and a margin: a server starts with it, and measures the whole
one beside requests.
"""

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch

from coserve.devices.counting import job_counts, model_counts
from coserve.devices.profiles.pieces import ProfiledPieces
from coserve.devices.profiles.side_speeds import measure_sharing
from coserve.devices.profiles.stopwatch import Timing, finish, rising
from coserve.devices.sides.dividing import sides_of
from coserve.models.backbone import Backbone
from coserve.scheduling.profile import Curve, OneCall, Profile
from coserve.scheduling.sharing import Sharing

_log = logging.getLogger(__name__)

_MANY_SPANS, _SHORT = 8, 16
# Measurements of a round beside those of the curves.
_NUM_SINGLE = 15
# A curve ends where one measurement takes too long.
_TOO_LONG_S = 1.0
# Where the forward pass is faster or slower at the end than it was at the start, by more than this,
# all is measured again: the machine was busy with something else.
_HELD_UP = 0.1
# By how much a quick profile says that pieces take longer than they took: one run of each tells
# little.
QUICK_MARGIN = 1.3

# A profile that is being measured; what needs the device meanwhile may run whenever it yields.
Measurement = Generator[None, None, Profile]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Thoroughness with which a device is measured."""

    forward_rows: tuple[int, ...]
    """Numbers of rows of forward passes."""
    backward_rows: tuple[int, ...]
    """Numbers of rows of tasklets."""
    head_rows: tuple[int, ...]
    """Numbers of rows of the head."""
    loss_rows: tuple[int, ...]
    """Numbers of rows of the loss."""
    score_rows: tuple[int, ...]
    """Numbers of rows of scored prompts."""
    window_rows: tuple[int, int]
    """Rows of a short and of a long window."""
    fused_rows: tuple[int, int]
    """Rows of windows beside a request, with which they fill tiles."""
    long_past: int
    """Tokens in the cache of spans that show what keys cost."""
    max_runs: int
    """Counted runs of a piece at most."""
    max_rounds: int
    """Rounds at most, while the machine is busy with something else."""
    is_whole: bool
    """Whether joined tasklets, masks and the sides of a divided device are measured, too."""

    @property
    def num_measurements(self) -> int:
        curves = (*2 * (self.forward_rows,), self.backward_rows, self.loss_rows, self.score_rows)
        heads = (3 if self.is_whole else 2) * (self.head_rows,)
        return sum(map(len, (*curves, *heads))) + _NUM_SINGLE


# Kernels compute rows in tiles, so that the first row of one more takes as long as all of it.
WHOLE = Effort(
    forward_rows=(1, 4, 8, 16, 17, 32, 33, 48, 49, 64, 65, 128, 256, 512),
    backward_rows=(32, 128, 512),
    head_rows=(1, 4, 16, 64),
    loss_rows=(8, 32, 128, 512),
    score_rows=(1, 16, 128),
    window_rows=(32, 256),
    fused_rows=(31, 127),
    long_past=512,
    max_runs=25,
    max_rounds=3,
    is_whole=True,
)
QUICK = Effort(
    forward_rows=(1, 16, 17, 64),
    backward_rows=(16, 64),
    head_rows=(1, 16),
    loss_rows=(8, 64),
    score_rows=(1, 16),
    window_rows=(16, 64),
    fused_rows=(15, 31),
    long_past=128,
    max_runs=1,
    max_rounds=1,
    is_whole=False,
)


def measure_profile(
    backbone: Backbone,
    progress: Callable[[int, int], None] | None = None,
    *,
    time_s: Callable[[], float] | None = None,
) -> Profile:
    """Measure all pieces thoroughly, which takes seconds to minutes.

    Args:
        backbone: The model.
        progress: Called with the number of finished measurements and about how many there are.
        time_s: The clock; None: this machine's, once the device is done.
    """
    with torch.inference_mode():
        return finish(_Measurement(backbone, WHOLE, progress, time_s).profile())


def quick_profile(
    backbone: Backbone,
    progress: Callable[[int, int], None] | None = None,
    *,
    time_s: Callable[[], float] | None = None,
) -> Profile:
    """Measure a few pieces once each, and add a margin; see `measure_profile`."""
    with torch.inference_mode():
        return finish(_Measurement(backbone, QUICK, progress, time_s).profile()).slower(
            QUICK_MARGIN
        )


def measurement(
    backbone: Backbone, progress: Callable[[int, int], None] | None = None
) -> Measurement:
    """Begin to measure as `measure_profile` does, piece by piece."""
    return _Measurement(backbone, WHOLE, progress).profile()


class _Measurement:
    """Measurement of one profile of one model."""

    def __init__(
        self,
        backbone: Backbone,
        effort: Effort,
        progress: Callable[[int, int], None] | None = None,
        time_s: Callable[[], float] | None = None,
    ) -> None:
        self.backbone, self.effort = backbone, effort
        self._progress, self._num_done = progress, 0
        # Models of few positions are measured as far as they go.
        self.most_rows = min(max(effort.forward_rows), backbone.architecture.max_positions - 1)
        self.pieces = ProfiledPieces(
            backbone,
            max_rows=self.most_rows,
            num_spans=_MANY_SPANS,
            max_span_rows=effort.long_past,
            max_runs=effort.max_runs,
            time_s=time_s,
            on_measured=self._count,
        )

    def profile(self) -> Measurement:
        """Measure in one round; in more if the machine was busy meanwhile: the fastest of each
        measurement counts.
        """
        pieces = self.pieces
        for rows in (1, self.most_rows // 2):
            yield from pieces.watch.warm_up(pieces.spans(1, rows=rows))
        for _ in range(self.effort.max_rounds):
            before_s = yield from pieces.decode()
            profile = yield from self._round()
            after_s = yield from pieces.decode()
            if min(before_s, after_s) > (1 - _HELD_UP) * max(before_s, after_s):
                break
            if self.effort.max_rounds > 1:
                _log.info("the machine was busy with something else: measuring again")
        if self.effort.is_whole:
            profile = yield from self._with_details(profile)
        return replace(
            profile,
            s_per_copied_byte=(yield from pieces.copied_byte()),
            saved_bytes_per_token=pieces.programs.kept_bytes_per_token(self.backbone.dtype),
        )

    def _with_details(self, profile: Profile) -> Measurement:
        """Measure what a quick profile goes without."""

        def masked(n: int) -> Timing:
            return (yield from self.pieces.head(n, is_masked=True)) - profile.head.at(n)

        mask = yield from self._curve(self.effort.head_rows, masked)
        joining = yield from self.pieces.joining(
            profile.backward.rows[-1], profile.backward_s_per_pair
        )
        yield
        sharing = yield from self._sharing()
        return replace(profile, mask=mask, joining=joining, sharing=sharing)

    def _sharing(self) -> Generator[None, None, Sharing | None]:
        """Measure the sides of a device that can be divided."""
        if (sides := sides_of(self.backbone)) is None:
            return None
        pieces = self.pieces
        try:
            return (
                yield from measure_sharing(
                    sides,
                    self.backbone.device,
                    lambda rows: pieces.spans(1, rows=rows),
                    pieces.ready_pass,
                )
            )
        finally:
            sides.close()

    def _count(self) -> None:
        self._num_done += 1
        if self._progress is not None:
            total = self.effort.num_measurements
            self._progress(min(self._num_done, total), total)

    def _round(self) -> Measurement:
        pieces, effort = self.pieces, self.effort
        counts = job_counts(pieces.adapter, pieces.programs)
        num_layers = self.backbone.architecture.num_layers
        long = min(effort.long_past, self.backbone.architecture.max_positions - 2)
        rows = min(effort.window_rows[1], self.most_rows // 2)
        one_span = yield from pieces.forward(1, rows=_MANY_SPANS)
        spans = yield from pieces.forward(_MANY_SPANS, past=_SHORT)
        s_per_span = max(0.0, (spans - one_span) / (_MANY_SPANS - 1))
        far = yield from pieces.forward(_MANY_SPANS, past=long)
        s_per_key = max(0.0, (far - spans) / (_MANY_SPANS * max(1, long - _SHORT)))
        past = min(3 * rows, self.backbone.architecture.max_positions - rows)
        pieces.pages.may_run_at_once = False
        block_by_block = yield from pieces.forward(1)
        near = yield from pieces.forward(1, rows=rows)
        far = yield from pieces.forward(1, rows=rows, past=past)
        s_per_pair = max(0.0, (far - near) / max(1, rows * past))
        pieces.pages.may_run_at_once = True
        with_bypasses = yield from pieces.forward(1, bypasses=pieces.adapter.bypasses())
        without = yield from pieces.forward(1)
        s_per_bypass = max(0.0, (with_bypasses - without) / counts.num_bypasses)
        bypasses_s = counts.num_bypasses * s_per_bypass
        window_s = (yield from pieces.window(rows)) - near - bypasses_s
        saved_s = max(0.0, block_by_block - without)
        most_rows, most_pairs = pieces.pages.stores.most_rows, pieces.pages.stores.most_prompt_pairs

        def trunk(n: int) -> Timing:
            """Time n rows, block by block."""
            pairs = n * n / 2
            seconds = (
                (yield from pieces.forward(1, rows=n))
                - pairs * s_per_pair
                - n * s_per_key
                - s_per_span
            )
            return seconds + (
                saved_s if n <= most_rows and (n == 1 or pairs <= most_pairs) else 0.0
            )

        forward = yield from self._curve(effort.forward_rows, trunk)

        def rows_s(n: int) -> float:
            """Return the seconds of n rows of one window with its bypasses, if they were a
            request's.
            """
            return forward.at(n) + n * n / 2 * s_per_pair + n * s_per_key + s_per_span + bypasses_s

        few = min(effort.window_rows[0], rows // 2)
        few_s = (yield from pieces.window(few)) - rows_s(few)
        s_per_window_row = max(0.0, (window_s - few_s) / (rows - few))
        s_per_window_bypass = max(0.0, few_s - few * s_per_window_row) / counts.num_bypasses

        def saved_by_window(n: int) -> Timing:
            """Time what n rows save beside a request that decodes."""
            apart_s = (
                rows_s(n) - forward.at(n) + forward.at(n + 1) + s_per_span + n * s_per_window_row
            )
            return apart_s - (yield from pieces.fused(n))

        window_saved_s = saved_s_per_window_row = 0.0
        if most_rows > 1:
            few_rows, many_rows = (
                min(n, most_rows - 1, self.most_rows - 1) for n in effort.fused_rows
            )
            few_s = yield from saved_by_window(few_rows)
            many_s = yield from saved_by_window(many_rows)
            saved_s_per_window_row = min(
                s_per_window_row, max(0.0, (many_s - few_s) / max(1, many_rows - few_rows))
            )
            window_saved_s = max(0.0, few_s - few_rows * saved_s_per_window_row)
        head = yield from self._curve(effort.head_rows, pieces.head)
        pair_backward = 2.5 * s_per_pair / num_layers

        def drawn(n: int) -> Timing:
            return (yield from pieces.head(n, temperature=1.0)) - head.at(n)

        def backward(n: int) -> Timing:
            return (yield from pieces.tasklet(n)) - n * n / 2 * pair_backward

        return Profile(
            model=model_counts(self.backbone),
            job=counts,
            forward=forward,
            head=head,
            sample=(yield from self._curve(effort.head_rows, drawn)),
            score=(yield from self._curve(effort.score_rows, pieces.score)),
            loss=(yield from self._curve(effort.loss_rows, pieces.loss)),
            backward=(
                yield from self._curve(
                    effort.backward_rows, backward, num_pieces=len(pieces.programs.parts)
                )
            ),
            s_per_pair=s_per_pair,
            backward_s_per_pair=pair_backward,
            s_per_key=s_per_key,
            s_per_span=s_per_span,
            s_per_bypass=s_per_bypass,
            s_per_window_row=s_per_window_row,
            s_per_window_bypass=s_per_window_bypass,
            s_per_parameter=(yield from pieces.update()) / counts.num_parameters,
            update_s=0.0,
            one_call=OneCall(
                rows=most_rows,
                prompt_pairs=most_pairs,
                saved_s=saved_s,
                window_saved_s=window_saved_s,
                saved_s_per_window_row=saved_s_per_window_row,
            ),
        )

    def _curve(
        self, rows: tuple[int, ...], seconds: Callable[[int], Timing], *, num_pieces: int = 1
    ) -> Generator[None, None, Curve]:
        """Measure a curve of seconds by rows.

        Args:
            rows: Numbers of rows.
            seconds: Measures one of them.
            num_pieces: Number of pieces that one measurement runs.
        """
        curve: dict[int, float] = {}
        for n in rows:
            if n > self.most_rows and len(curve) > 1:
                break
            curve[n] = max(1e-7, (yield from seconds(n)))
            if num_pieces * curve[n] > _TOO_LONG_S and len(curve) > 1:
                break
        curve = rising(curve)
        return Curve(rows=tuple(curve), seconds=tuple(curve.values()))
