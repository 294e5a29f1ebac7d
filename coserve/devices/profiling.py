"""The profile of a model on this device: a few seconds of measurements at the first start, kept on disk.

What is measured are the engine's own pieces: spans in pages through all blocks, the head with sampling, the loss, the
tasklets and the optimizer step of a reference adapter (LoRA of rank 16 at every linear layer).
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.counting import job_counts, model_counts
from coserve.devices.dividing import sides_of
from coserve.devices.measuring import Stopwatch, rising
from coserve.devices.profiling_sides import measure_sharing
from coserve.devices.sampling import SamplingRow, sample
from coserve.devices.sampling_params import SamplingParams
from coserve.memory.host_pages import HostPages
from coserve.memory.paged_kv import PagedKv, kv_page_bytes
from coserve.memory.paged_states import num_state_pages
from coserve.models.backbone import Backbone
from coserve.models.batch import Span, forward, logits
from coserve.models.bypasses import Bypasses
from coserve.scheduling.profile import Curve, OneCall, Profile
from coserve.scheduling.sharing import Sharing
from coserve.tuning.captured import CapturedWindows
from coserve.tuning.config import OptimizerConfig
from coserve.tuning.joined import joined_tasklet
from coserve.tuning.objective import chunk_rows, loss_and_gradient
from coserve.tuning.optimizer import AdapterOptimizer
from coserve.tuning.pack import make_pack
from coserve.tuning.programs import TrainingPrograms, training_programs
from coserve.tuning.sums import zeros_like_all
from coserve.tuning.training_pass import TrainingPass

_log = logging.getLogger(__name__)

# Kernels compute rows in tiles, so that the first row of one more takes as long as all of it.
_FORWARD_ROWS = (1, 4, 8, 16, 17, 32, 33, 48, 49, 64, 65, 128, 256, 512)
_BACKWARD_ROWS = (32, 128, 512)
# Of each of the packs of joined tasklets; how often these are timed, unless it takes as long as this.
_JOINED_ROWS, _JOINED_TURNS, _JOINED_MOST_S = 64, 4, 4.0
_HEAD_ROWS = (1, 4, 16, 64)
_LOSS_ROWS = (8, 32, 128, 512)
_SCORE_ROWS = (1, 16, 128)
_WINDOW_ROWS, _FEW_WINDOW_ROWS = 256, 32
# Of windows beside a request, with which they fill tiles.
_FUSED_ROWS = (31, 127)
_MANY_SPANS, _SHORT, _LONG = 8, 16, 512
_BLOCK_TOKENS = 16
_COPIED_PAGES = 32
# Those of the curves, and the single ones beside them.
_NUM_MEASUREMENTS = (
    sum(map(len, (*2 * (_FORWARD_ROWS,), _BACKWARD_ROWS, *3 * (_HEAD_ROWS,), _LOSS_ROWS, _SCORE_ROWS))) + 15
)
# A curve ends where one measurement takes too long.
_TOO_LONG_S = 1.0
# Where the forward pass is faster or slower at the end than it was at the start, by more than this, all is measured
# again: the machine was busy with something else.
_HELD_UP = 0.1
_MOST_ROUNDS = 3


def measure_profile(
    backbone: Backbone,
    progress: Callable[[int, int], None] | None = None,
    *,
    time_s: Callable[[], float] | None = None,
) -> Profile:
    """Measure; see the module. time_s: the clock (default: this machine's, once the device is done)."""
    with torch.inference_mode():
        return _Measurement(backbone, progress, time_s).profile()


class _Measurement:
    def __init__(
        self,
        backbone: Backbone,
        progress: Callable[[int, int], None] | None = None,
        time_s: Callable[[], float] | None = None,
    ) -> None:
        self.backbone = backbone
        self._progress, self._num_done = progress, 0
        self._least_s: dict[Hashable, float] = {}  # of each measurement, over all rounds
        self._watch = Stopwatch(time_s or self._time_s, num_uncounted=2 if backbone.backend.captures else 1)
        architecture = backbone.architecture
        # Models of few positions are measured as far as they go.
        self.most_rows = min(max(_FORWARD_ROWS), architecture.max_positions - 1)
        num_tokens = max(_MANY_SPANS * (_LONG + 2 * _BLOCK_TOKENS), 2 * self.most_rows)
        num_states = num_state_pages(architecture, kv_page_bytes(backbone, _BLOCK_TOKENS))
        num_pages = num_tokens // _BLOCK_TOKENS + _MANY_SPANS * (1 + num_states)
        self.pages = PagedKv(backbone, num_pages=num_pages, block_tokens=_BLOCK_TOKENS)
        self.pages.storage.zero_()
        self.adapter = Adapter(backbone, LoraConfig(r=16, alpha=32, target_modules="all-linear"))
        self.programs: TrainingPrograms = training_programs(self.adapter)
        self._captured = CapturedWindows.of(self.adapter)

    def profile(self) -> Profile:
        """Measured once; again if the machine was busy meanwhile: of each measurement the fastest."""
        for rows in (1, self.most_rows // 2):
            self._watch.warm_up(self._spans(1, rows=rows))
        for _ in range(_MOST_ROUNDS):
            before_s = self._decode_s()
            profile = self._round()
            after_s = self._decode_s()
            if min(before_s, after_s) > (1 - _HELD_UP) * max(before_s, after_s):
                break
            _log.info("the machine was busy with something else: measuring again")
        mask = self._curve(_HEAD_ROWS, lambda n: self._head(n, is_masked=True) - profile.head.at(n))
        return replace(
            profile,
            mask=mask,
            joining=self._joining(profile),
            sharing=self._sharing(),
            s_per_copied_byte=self._copied_byte(),
            saved_bytes_per_token=self.programs.kept_bytes_per_token(self.backbone.dtype),
        )

    def _sharing(self) -> Sharing | None:
        """Of a device that can be divided."""
        if (sides := sides_of(self.backbone)) is None:
            return None
        try:
            return measure_sharing(
                sides, self.backbone.device, lambda rows: self._spans(1, rows=rows), self._ready_pass
            )
        finally:
            sides.close()

    def _round(self) -> Profile:
        counts = job_counts(self.adapter, self.programs)
        num_layers = self.backbone.architecture.num_layers
        long = min(_LONG, self.backbone.architecture.max_positions - 2)
        rows = min(_WINDOW_ROWS, self.most_rows // 2)
        one_span, spans = self._forward(1, rows=_MANY_SPANS), self._forward(_MANY_SPANS, past=_SHORT)
        s_per_span = max(0.0, (spans - one_span) / (_MANY_SPANS - 1))
        s_per_key = (self._forward(_MANY_SPANS, past=long) - spans) / (_MANY_SPANS * max(1, long - _SHORT))
        s_per_key = max(0.0, s_per_key)
        past = min(3 * rows, self.backbone.architecture.max_positions - rows)
        self.pages.may_run_at_once = False
        block_by_block, near = self._forward(1), self._forward(1, rows=rows)
        s_per_pair = max(0.0, (self._forward(1, rows=rows, past=past) - near) / max(1, rows * past))
        self.pages.may_run_at_once = True
        bypasses = self.adapter.bypasses()
        with_bypasses, without = self._forward(1, bypasses=bypasses), self._forward(1)
        s_per_bypass = max(0.0, (with_bypasses - without) / counts.num_bypasses)
        window_s = self._window(rows) - near - counts.num_bypasses * s_per_bypass
        saved_s = max(0.0, block_by_block - without)
        most_rows, most_pairs = self.pages.stores.most_rows, self.pages.stores.most_prompt_pairs

        def trunk(n: int) -> float:
            """Of n rows, block by block."""
            pairs = n * n / 2
            seconds = self._forward(1, rows=n) - pairs * s_per_pair - n * s_per_key - s_per_span
            return seconds + (saved_s if n <= most_rows and (n == 1 or pairs <= most_pairs) else 0.0)

        forward = self._curve(_FORWARD_ROWS, trunk)

        def rows_s(n: int) -> float:
            """Of n rows of one window with its bypasses, if they were a request's."""
            return (
                forward.at(n) + n * n / 2 * s_per_pair + n * s_per_key + s_per_span + counts.num_bypasses * s_per_bypass
            )

        few = min(_FEW_WINDOW_ROWS, rows // 2)
        few_s = self._window(few) - rows_s(few)
        s_per_window_row = max(0.0, (window_s - few_s) / (rows - few))
        s_per_window_bypass = max(0.0, few_s - few * s_per_window_row) / counts.num_bypasses

        def saved_by_window(n: int) -> float:
            """Of n rows beside a request that decodes."""
            return rows_s(n) - forward.at(n) + forward.at(n + 1) + s_per_span + n * s_per_window_row - self._fused(n)

        window_saved_s = saved_s_per_window_row = 0.0
        if most_rows > 1:
            few_rows, many_rows = (min(n, most_rows - 1, self.most_rows - 1) for n in _FUSED_ROWS)
            few_s, many_s = saved_by_window(few_rows), saved_by_window(many_rows)
            saved_s_per_window_row = min(s_per_window_row, max(0.0, (many_s - few_s) / max(1, many_rows - few_rows)))
            window_saved_s = max(0.0, few_s - few_rows * saved_s_per_window_row)
        head = self._curve(_HEAD_ROWS, self._head)
        pair_backward = 2.5 * s_per_pair / num_layers
        return Profile(
            model=model_counts(self.backbone),
            job=counts,
            forward=forward,
            head=head,
            sample=self._curve(_HEAD_ROWS, lambda n: self._head(n, temperature=1.0) - head.at(n)),
            score=self._curve(_SCORE_ROWS, self._score),
            loss=self._curve(_LOSS_ROWS, self._loss),
            backward=self._curve(
                _BACKWARD_ROWS,
                lambda n: self._tasklet(n) - n * n / 2 * pair_backward,
                num_pieces=len(self.programs.parts),
            ),
            s_per_pair=s_per_pair,
            backward_s_per_pair=pair_backward,
            s_per_key=s_per_key,
            s_per_span=s_per_span,
            s_per_bypass=s_per_bypass,
            s_per_window_row=s_per_window_row,
            s_per_window_bypass=s_per_window_bypass,
            s_per_parameter=self._update() / counts.num_parameters,
            update_s=0.0,
            one_call=OneCall(
                rows=most_rows,
                prompt_pairs=most_pairs,
                saved_s=saved_s,
                window_saved_s=window_saved_s,
                saved_s_per_window_row=saved_s_per_window_row,
            ),
        )

    def _curve(self, rows: tuple[int, ...], seconds: Callable[[int], float], *, num_pieces: int = 1) -> Curve:
        """num_pieces: how many pieces of what is measured one measurement runs."""
        found: dict[int, float] = {}
        for n in rows:
            if n > self.most_rows and len(found) > 1:
                break
            found[n] = max(1e-7, seconds(n))
            if num_pieces * found[n] > _TOO_LONG_S and len(found) > 1:
                break
        found = rising(found)
        return Curve(rows=tuple(found), seconds=tuple(found.values()))

    def _decode_s(self) -> float:
        """Seconds of a decode step just now."""
        return self._watch.fastest_s(self._spans(1))

    def _fastest_s(self, what: Hashable, run: Callable[[], object]) -> float:
        return self._least(what, self._watch.fastest_s(run))

    def _least(self, what: Hashable, seconds: float) -> float:
        """Seconds of a measurement in the fastest round so far."""
        self._least_s[what] = min(seconds, self._least_s.get(what, seconds))
        self._num_done += 1
        if self._progress is not None:
            self._progress(min(self._num_done, _NUM_MEASUREMENTS), _NUM_MEASUREMENTS)
        return self._least_s[what]

    def _time_s(self) -> float:
        if self.backbone.device.type == "cuda":
            torch.cuda.synchronize(self.backbone.device)
        return time.perf_counter()

    def _forward(self, spans: int, *, rows: int = 1, past: int = 0, bypasses: Bypasses | None = None) -> float:
        """Seconds of spans of `rows` rows each, after `past` tokens in the cache."""
        what = ("forward", spans, rows, past, bypasses is not None, self.pages.may_run_at_once)
        return self._fastest_s(what, self._spans(spans, rows=rows, past=past, bypasses=bypasses))

    def _spans(
        self, spans: int, *, rows: int = 1, past: int = 0, bypasses: Bypasses | None = None
    ) -> Callable[[], None]:
        per_span = self.pages.num_state_pages + -(-(past + rows) // _BLOCK_TOKENS)
        tables = [list(range(index * per_span, (index + 1) * per_span)) for index in range(spans)]
        tokens = [0] * rows

        def run() -> None:
            sequences = [(table, past, tokens) for table in tables]
            forward(self.backbone, [self.pages.rows(sequences, bypasses)])

        return run

    def _pass(self, num_rows: int) -> TrainingPass:
        """A pack with hardly any trained rows: the loss is measured by itself."""
        pack = make_pack([([0] * num_rows, [False] * (num_rows - 1) + [True])])
        return TrainingPass(self.adapter, self.programs, pack, captured=self._captured)

    def _ready_pass(self, rows: int) -> TrainingPass:
        """A pass that is to go backward."""
        training = self._pass(rows)
        training.finish_window(forward(self.backbone, [training.next_window(rows)]))
        training.run_loss(rows)
        return training

    def _window(self, rows: int) -> float:
        training = self._pass(rows)

        def run() -> None:
            spans: list[Span] = [training.next_window(rows)]
            forward(self.backbone, spans)

        seconds = self._fastest_s(("window", rows), run)
        training.release()
        return seconds

    def _fused(self, rows: int) -> float:
        """Seconds of a window of as many rows beside a request that decodes."""
        training = self._pass(rows)

        def run() -> None:
            forward(self.backbone, [self.pages.rows([([0], 0, [0])]), training.next_window(rows)])

        seconds = self._fastest_s(("fused", rows), run)
        training.release()
        return seconds

    def _tasklet(self, rows: int) -> float:
        """One of all tasklets of a pass, so that weights come from memory as they do in a step."""

        def measure() -> float:
            training = self._ready_pass(rows)
            seconds = self._watch.once_s(lambda: _run_joined([training], rows))
            return seconds / len(self.programs.parts)

        for _ in range(self._watch.num_uncounted):
            measure()
        return self._least(("tasklet", rows), self._watch.stable_s(measure))

    def _joining(self, profile: Profile) -> float:
        """What joined tasklets of as many rows as the curve has take, as a multiple of one pack's: in turns, the
        fastest of each, so that what else the machine does meets both.
        """
        rows = profile.backward.rows[-1]
        num_packs = max(2, rows // _JOINED_ROWS)
        least_s = {1: inf, num_packs: inf}
        start_s = self._watch.now_s()
        for turn in range(self._watch.num_uncounted + _JOINED_TURNS):
            for number in least_s:
                passes = [self._ready_pass(rows // number) for _ in range(number)]
                seconds = self._watch.once_s(partial(_run_joined, passes, rows // number))
                if turn >= self._watch.num_uncounted:
                    least_s[number] = min(least_s[number], seconds)
            if min(least_s.values()) < inf and self._watch.now_s() - start_s > _JOINED_MOST_S:
                break
        single_s, joined_s = (
            seconds - len(self.programs.parts) * rows * rows / number / 2 * profile.backward_s_per_pair
            for number, seconds in least_s.items()
        )
        return max(1.0, joined_s / single_s) if single_s > 0 else 1.0

    def _hidden(self, rows: int) -> Tensor:
        architecture = self.backbone.architecture
        return torch.zeros(rows, architecture.hidden_size, dtype=self.backbone.dtype, device=self.backbone.device)

    def _head(self, rows: int, temperature: float = 0.0, *, is_masked: bool = False) -> float:
        hidden, backbone = self._hidden(rows), self.backbone
        mask = b"\x55" * (-(-backbone.architecture.vocab_size // 32) * 4) if is_masked else b""
        chosen = [SamplingRow(params=SamplingParams(temperature=temperature), seed=0, mask=mask) for _ in range(rows)]
        return self._fastest_s(
            ("head", rows, temperature, is_masked), lambda: sample(logits(backbone, hidden), chosen, backbone.backend)
        )

    def _score(self, rows: int) -> float:
        """Log-probabilities of the next tokens of a prompt's rows."""
        hidden, most = self._hidden(rows), chunk_rows(self.backbone.architecture.vocab_size, torch.float32)
        pieces = [hidden[start : start + most] for start in range(0, rows, most)]
        return self._fastest_s(
            ("score", rows), lambda: [logits(self.backbone, some).float().log_softmax(-1) for some in pieces]
        )

    def _loss(self, rows: int) -> float:
        hidden = self._hidden(rows)
        targets = torch.zeros(rows, dtype=torch.int64, device=self.backbone.device)
        constants = {"targets": targets, "dropout_row_ids": targets}

        def run() -> None:
            loss_and_gradient(
                self.programs.loss,
                hidden,
                constants,
                backend=self.backbone.backend,
                weights={**self.backbone.weights["head"], **self.adapter.parameters("head")},
                accumulators={},
                max_rows=chunk_rows(self.backbone.architecture.vocab_size, self.backbone.dtype),
            )

        return self._fastest_s(("loss", rows), run)

    def _update(self) -> float:
        optimizer = AdapterOptimizer(self.adapter.masters, OptimizerConfig(learning_rate=1e-12))
        gradients = zeros_like_all(self.adapter.masters)
        return self._fastest_s("update", lambda: optimizer.step(gradients, num_trained=1, num_steps=1))

    def _copied_byte(self) -> float:
        """Seconds per byte of pages to the host and back, each copied by itself: they are seldom neighbours."""
        num_pages = min(_COPIED_PAGES, self.pages.num_pages // 2)
        pages, slots = range(0, 2 * num_pages, 2), range(num_pages)
        host = HostPages(self.pages, num_slots=num_pages)

        def run() -> None:
            host.copy_out(pages, slots)
            host.copy_in(pages, slots)

        return self._fastest_s("copy", run) / (2 * num_pages * self.pages.page_bytes)


def _run_joined(passes: Sequence[TrainingPass], rows: int) -> None:
    """All tasklets of passes that are at the same part, of as many rows each, together."""
    while not passes[0].done:
        joined_tasklet([(each, rows) for each in passes]).run()
