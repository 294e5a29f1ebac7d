"""Pieces of a step, each timed by itself on a model: spans in pages through all blocks, the head
with sampling, the loss, windows, tasklets and the optimizer step of a reference adapter (LoRA of
rank 16 at every linear layer).
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.profiles.stopwatch import Stopwatch, Timing, shared_clock
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.sampling import SamplingRow, sample
from coserve.memory.tensors.host_pages import HostPages
from coserve.memory.tensors.paged_kv import PagedKv, kv_page_bytes
from coserve.memory.tensors.paged_states import num_state_pages
from coserve.models.backbone import Backbone
from coserve.models.batch import RowSpan, forward
from coserve.models.bypasses import Bypasses
from coserve.models.head import likeliest_on_rank_0, logits_on_rank_0
from coserve.tuning.captured import CapturedWindows
from coserve.tuning.config import OptimizerConfig
from coserve.tuning.joined import joined_tasklet
from coserve.tuning.objective import chunk_rows, loss_and_gradient
from coserve.tuning.optimizer import AdapterOptimizer
from coserve.tuning.pack import make_pack
from coserve.tuning.programs import TrainingPrograms, training_programs
from coserve.tuning.rank_gradients import RankGradients
from coserve.tuning.sums import zeros_like_all
from coserve.tuning.training_pass import TrainingPass

# Rows of each of the packs of joined tasklets; how often these are timed, unless it takes as long
# as this.
_JOINED_ROWS, _JOINED_TURNS, _MAX_JOINED_S = 64, 4, 4.0
_BLOCK_TOKENS = 16
_COPIED_PAGES = 32


class ProfiledPieces:
    """Timer of pieces of a step, which keeps the fastest time of each over all rounds."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        max_rows: int,
        num_spans: int,
        max_span_rows: int,
        max_runs: int,
        time_s: Callable[[], float] | None = None,
        on_measured: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the memory for the measurements.

        Args:
            backbone: The model.
            max_rows: Most rows of one span, with those before it in the cache.
            num_spans: Number of spans side by side.
            max_span_rows: Most rows of each of these.
            max_runs: Most counted runs of a piece.
            time_s: The clock; None: this machine's, once the device is done.
            on_measured: Called after each measurement.
        """
        self.backbone, self._on_measured = backbone, on_measured
        self._fastest: dict[Hashable, float] = {}
        num_uncounted = 2 if backbone.backend.captures else 1
        clock = shared_clock(time_s or self._time_s, backbone.group)
        self.watch = Stopwatch(clock, num_uncounted=num_uncounted, max_runs=max_runs)
        num_tokens = max(num_spans * (max_span_rows + 2 * _BLOCK_TOKENS), 2 * max_rows)
        num_states = num_state_pages(backbone.local, kv_page_bytes(backbone, _BLOCK_TOKENS))
        num_pages = num_tokens // _BLOCK_TOKENS + num_spans * (1 + num_states)
        self.pages = PagedKv(backbone, num_pages=num_pages, block_tokens=_BLOCK_TOKENS)
        self.pages.storage.zero_()
        self.adapter = Adapter(backbone, LoraConfig(r=16, alpha=32, target_modules="all-linear"))
        self.programs: TrainingPrograms = training_programs(
            self.adapter, link_flops_per_byte=backbone.link_flops_per_byte
        )
        self._captured = CapturedWindows.of(self.adapter)

    def forward(
        self, spans: int, *, rows: int = 1, past: int = 0, bypasses: Bypasses | None = None
    ) -> Timing:
        """Time spans of `rows` rows each, after `past` tokens in the cache."""
        what = ("forward", spans, rows, past, bypasses is not None, self.pages.may_run_at_once)
        return self._time(what, self.spans(spans, rows=rows, past=past, bypasses=bypasses))

    def spans(
        self, spans: int, *, rows: int = 1, past: int = 0, bypasses: Bypasses | None = None
    ) -> Callable[[], None]:
        """Return a forward pass of such spans, to be run any number of times."""
        per_span = self.pages.num_state_pages + -(-(past + rows) // _BLOCK_TOKENS)
        tables = [list(range(index * per_span, (index + 1) * per_span)) for index in range(spans)]
        tokens = [0] * rows

        def run() -> None:
            sequences = [(table, past, tokens) for table in tables]
            forward(self.backbone, [self.pages.rows(sequences, bypasses)])

        return run

    def ready_pass(self, rows: int) -> TrainingPass:
        """Return a pass that is to go backward."""
        training = self._pass(rows)
        training.finish_window(forward(self.backbone, [training.next_window(rows)]))
        training.run_loss(rows)
        return training

    def window(self, rows: int) -> Timing:
        """Time a window of the reference job alone."""
        training = self._pass(rows)

        def run() -> None:
            spans: list[RowSpan] = [training.next_window(rows)]
            forward(self.backbone, spans)

        seconds = yield from self._time(("window", rows), run)
        training.release()
        return seconds

    def fused(self, rows: int) -> Timing:
        """Time a window of as many rows beside a request that decodes."""
        training = self._pass(rows)

        def run() -> None:
            forward(self.backbone, [self.pages.rows([([0], 0, [0])]), training.next_window(rows)])

        seconds = yield from self._time(("fused", rows), run)
        training.release()
        return seconds

    def tasklet(self, rows: int) -> Timing:
        """Time one of all tasklets of a pass, so that weights come from memory as they do in a
        step.
        """

        def measure() -> Timing:
            training = self.ready_pass(rows)
            yield
            seconds = yield from self._all_tasklets([training], rows)
            return seconds / len(self.programs.parts)

        for _ in range(self.watch.num_uncounted):
            yield from measure()
        return self._keep(("tasklet", rows), (yield from self.watch.stable_s(measure)))

    def joining(self, rows: int, pair_s: float) -> Timing:
        """Time joined tasklets as a multiple of one pack's tasklets.

        The two run in turns, and the fastest of each counts, so that whatever else the machine does
        meets both.

        Args:
            rows: Rows of each tasklet.
            pair_s: Seconds of a row and a key in one block.
        """
        num_packs = max(2, rows // _JOINED_ROWS)
        fastest_s = {1: inf, num_packs: inf}
        spent_s = 0.0
        for turn in range(self.watch.num_uncounted + _JOINED_TURNS):
            for number in fastest_s:
                start_s = self.watch.now_s()
                passes = [self.ready_pass(rows // number) for _ in range(number)]
                spent_s += self.watch.now_s() - start_s
                yield
                seconds = yield from self._all_tasklets(passes, rows // number)
                spent_s += seconds
                if turn >= self.watch.num_uncounted:
                    fastest_s[number] = min(fastest_s[number], seconds)
            if min(fastest_s.values()) < inf and spent_s > _MAX_JOINED_S:
                break
        single_s, joined_s = (
            seconds - len(self.programs.parts) * rows * rows / number / 2 * pair_s
            for number, seconds in fastest_s.items()
        )
        return max(1.0, joined_s / single_s) if single_s > 0 else 1.0

    def head(self, rows: int, temperature: float = 0.0, *, is_masked: bool = False) -> Timing:
        """Time rows through the head, with a token chosen of each."""
        hidden, backbone = self._hidden(rows), self.backbone
        mask = b"\x55" * (-(-backbone.architecture.vocab_size // 32) * 4) if is_masked else b""
        chosen = [
            SamplingRow(params=SamplingParams(temperature=temperature), seed=0, mask=mask)
            for _ in range(rows)
        ]
        if backbone.group.size > 1 and not (temperature or is_masked):
            return self._time(
                ("head", rows, temperature, is_masked),
                lambda: likeliest_on_rank_0(backbone, hidden),
            )

        def choose() -> None:
            scores = logits_on_rank_0(backbone, hidden)
            if scores is not None:
                sample(scores, chosen, backbone.backend)

        return self._time(("head", rows, temperature, is_masked), choose)

    def score(self, rows: int) -> Timing:
        """Time log-probabilities of the next tokens of a prompt's rows."""
        hidden = self._hidden(rows)
        most = chunk_rows(self.backbone.architecture.vocab_size, torch.float32)
        pieces = [hidden[start : start + most] for start in range(0, rows, most)]

        def score() -> None:
            for some in pieces:
                scores = logits_on_rank_0(self.backbone, some)
                if scores is not None:
                    scores.float().log_softmax(-1)

        return self._time(("score", rows), score)

    def loss(self, rows: int) -> Timing:
        """Time trained rows through the loss, forward and backward."""
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

        return self._time(("loss", rows), run)

    def update(self) -> Timing:
        """Time an optimizer step of the reference adapter."""
        graphs, masters = self.adapter.graphs, self.adapter.masters
        ranks = RankGradients(self.backbone.group, graphs.states, graphs.summed)
        gradients = zeros_like_all(masters)
        optimizer = AdapterOptimizer(masters, OptimizerConfig(learning_rate=1e-12), ranks.norm)
        return self._time(
            "update", lambda: optimizer.step(ranks.complete(gradients), num_trained=1, num_steps=1)
        )

    def copied_byte(self) -> Timing:
        """Time a byte of pages to the host and back, each page copied by itself: they are seldom
        neighbours.
        """
        num_pages = min(_COPIED_PAGES, self.pages.num_pages // 2)
        pages, slots = range(0, 2 * num_pages, 2), range(num_pages)
        host = HostPages(self.pages, num_slots=num_pages)

        def run() -> None:
            host.copy_out(pages, slots)
            host.copy_in(pages, slots)

        seconds = yield from self._time("copy", run)
        return seconds / (2 * num_pages * self.pages.page_bytes)

    def decode(self) -> Timing:
        """Time a decode step just now."""
        return self.watch.fastest_s(self.spans(1))

    # -- timing ---------------------------------------------------------------------

    def _time(self, what: Hashable, run: Callable[[], object]) -> Timing:
        return self._keep(what, (yield from self.watch.fastest_s(run)))

    def _keep(self, what: Hashable, seconds: float) -> float:
        """Return the seconds of a measurement in the fastest round so far."""
        self._fastest[what] = min(seconds, self._fastest.get(what, seconds))
        self._on_measured()
        return self._fastest[what]

    def _time_s(self) -> float:
        if self.backbone.device.type == "cuda":
            torch.cuda.synchronize(self.backbone.device)
        return time.perf_counter()

    def _all_tasklets(self, passes: Sequence[TrainingPass], rows: int) -> Timing:
        """Time all tasklets of passes that are at the same part, of as many rows each, together."""
        if self.backbone.device.type == "cuda":  # which would wait for the host after each
            return self.watch.once_s(lambda: [run() for run in _tasklets(passes, rows)])
        seconds = 0.0
        for run in _tasklets(passes, rows):
            seconds += self.watch.once_s(run)
            yield
        return seconds

    def _pass(self, num_rows: int) -> TrainingPass:
        """Return a pack with hardly any trained rows: the loss is measured by itself."""
        pack = make_pack([([0] * num_rows, [False] * (num_rows - 1) + [True])])
        return TrainingPass(self.adapter, self.programs, pack, captured=self._captured)

    def _hidden(self, rows: int) -> Tensor:
        architecture = self.backbone.architecture
        return torch.zeros(
            rows, architecture.hidden_size, dtype=self.backbone.dtype, device=self.backbone.device
        )


def _tasklets(passes: Sequence[TrainingPass], rows: int) -> Iterator[Callable[[], object]]:
    """Yield the joined tasklets of all parts, each to be run before the next one is taken."""
    while not passes[0].done:
        yield lambda: joined_tasklet([(each, rows) for each in passes]).run()
