"""The runner on torch, for CPUs and GPUs by one code path."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from math import nan
from pathlib import Path

import torch
from torch import Tensor

from coserve.adapters.base import Adapter, AdapterConfig
from coserve.adapters.peft_directory import load_adapter, read_tensors, save_adapter, write_tensors
from coserve.devices.counting import job_counts
from coserve.devices.messages import TokenLogprob
from coserve.devices.profiling import load_profile
from coserve.devices.sampling import sample
from coserve.engine.checkpoint import OPTIMIZER_FILE
from coserve.engine.request import Request
from coserve.engine.runner import (
    LossRows,
    RequestRows,
    StepFailedError,
    StepResult,
    Tasklets,
    Update,
    WindowRows,
    Work,
)
from coserve.errors import AdapterError, DeviceMemoryError
from coserve.memory.activations import PooledMemory, group_bytes
from coserve.models.backbone import Backbone
from coserve.models.batch import Bypasses, Span, forward, logits
from coserve.scheduling.latency import Profile
from coserve.tuning.config import TuningConfig
from coserve.tuning.cursor import Cursor
from coserve.tuning.loss_sums import LossSums
from coserve.tuning.objective import chunk_rows
from coserve.tuning.optimizer import AdapterOptimizer
from coserve.tuning.order import PackMembers
from coserve.tuning.pack import pack_of
from coserve.tuning.programs import evaluation_programs, training_programs
from coserve.tuning.training_pass import TrainingPass, saved_shapes, workspace_shapes


class WallClock:
    """Real time, from a moment that means nothing."""

    def now(self) -> float:
        return time.monotonic()


class TorchTrainer:
    """A job's tensors; see `Trainer`."""

    def __init__(
        self,
        adapter: Adapter,
        config: TuningConfig,
        *,
        mean_context_len: float,
        memory: PooledMemory,
        versions: dict[str, Adapter],
    ) -> None:
        """versions: where it publishes."""
        self.adapter, self._versions = adapter, versions
        self._programs = training_programs(adapter, mean_context_len=mean_context_len)
        self._evaluation = evaluation_programs(adapter, mean_context_len=mean_context_len)
        self.counts = job_counts(adapter, self._programs)
        self.optimizer: AdapterOptimizer | None = AdapterOptimizer(adapter.masters, config.optimizer)
        self.training_pass: TrainingPass | None = None
        self._seed, self._memory = config.seed, memory
        self._gradients: dict[str, Tensor] | None = None

    @property
    def cursor(self) -> Cursor | None:
        return None if self.training_pass is None else self.training_pass.cursor

    def num_pages(self, num_rows: int) -> int:
        backbone = self.adapter.backbone
        groups = [workspace_shapes(self._programs, backbone, num_rows)]
        groups += [saved_shapes(self._programs, backbone, p, num_rows) for p in backbone.architecture.parts[:-1]]
        return sum(self._memory.num_pages(group_bytes(shapes)) for shapes in groups)

    def begin(self, pack: PackMembers, *, evaluate: bool) -> None:
        with _device_memory():
            self.training_pass = TrainingPass(
                self.adapter,
                self._evaluation if evaluate else self._programs,
                pack_of(pack.examples),
                dropout_seed=self._seed,
                first_row=pack.first_row,
                memory=self._memory,
                training=not evaluate,
            )

    def drop(self) -> None:
        if self.training_pass is not None:
            self.training_pass.release()
            self.training_pass = None

    def finish(self) -> LossSums:
        done, self.training_pass = self.training_pass, None
        assert done is not None and done.done
        if done.programs is not self._programs:
            return done.sums
        if self._gradients is None:
            self._gradients = done.gradients
        else:
            for name, gradient in done.gradients.items():
                self._gradients[name] += gradient
        return done.sums

    def update(self, num_trained: int, num_steps: int) -> float | None:
        """The optimizer step over the gradients of all packs since the last."""
        gradients, self._gradients = self._gradients, None
        assert gradients is not None and self.optimizer is not None
        norm = self.optimizer.step(gradients, num_trained=num_trained, num_steps=num_steps)
        self.adapter.sync_compute_copy()
        return norm

    def publish(self, key: str) -> None:
        with _device_memory():
            self._versions[key] = self.adapter.snapshot()

    def state(self) -> "TorchTrainerState":
        with _device_memory():
            return TorchTrainerState(self.adapter.snapshot(), self.optimizer.state() if self.optimizer else None)

    def close(self) -> None:
        self.drop()
        self._gradients = self.optimizer = None


class TorchTrainerState:
    """See `TrainerState`."""

    def __init__(self, adapter: Adapter, optimizer: dict[str, Tensor] | None) -> None:
        self._adapter, self._optimizer = adapter, optimizer

    def write(self, directory: Path) -> None:
        save_adapter(self._adapter, directory)
        if self._optimizer is not None:
            write_tensors(directory / OPTIMIZER_FILE, self._optimizer)


class TorchRunner:
    """See `Runner`."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.clock = WallClock()
        self._versions: dict[str, Adapter] = {}

    def run(self, work: Work) -> StepResult:
        norms: list[float | None] = []
        updating = False
        try:
            with torch.inference_mode(), _device_memory():
                marks = [self._time_s()]
                for piece in work.losses:
                    _pass_of(piece).run_loss(piece.num_rows)
                marks.append(self._time_s())
                for tasklets in work.tasklets:
                    self._run_tasklets(tasklets)
                marks.append(self._time_s())
                for update in work.updates:
                    updating = True
                    norms.append(self._update(update))
                    updating = False
                marks.append(self._time_s())
                tokens, prompts = self._forward(work) if work.requests or work.windows else ([], [])
                marks.append(self._time_s())
        except DeviceMemoryError as error:
            raise StepFailedError(str(error), norms=norms, broken_update=updating) from error
        loss_s, backward_s, update_s, forward_s = (end - start for start, end in pairwise(marks))
        return StepResult(
            tokens=tokens,
            prompts=prompts,
            norms=norms,
            forward_s=forward_s,
            loss_s=loss_s,
            backward_s=backward_s,
            update_s=update_s,
        )

    def trainer(
        self,
        adapter: AdapterConfig | str | Path,
        config: TuningConfig,
        *,
        mean_context_len: float,
        memory: PooledMemory,
    ) -> TorchTrainer:
        with _device_memory():
            if isinstance(adapter, AdapterConfig):
                start = Adapter(self.backbone, adapter, seed=config.seed)
            elif isinstance(adapter, Path):
                start = load_adapter(self.backbone, adapter)
            else:
                start = self._versions[adapter].snapshot()
            trainer = TorchTrainer(
                start, config, mean_context_len=mean_context_len, memory=memory, versions=self._versions
            )
            if isinstance(adapter, Path):
                assert trainer.optimizer is not None
                try:
                    trainer.optimizer.load_state(read_tensors(adapter / OPTIMIZER_FILE))
                except (KeyError, ValueError) as error:
                    raise AdapterError(f"{adapter / OPTIMIZER_FILE} is not this adapter's: {error}") from None
            return trainer

    def load_adapter(self, key: str, directory: str) -> int:
        with _device_memory():
            self._versions[key] = adapter = load_adapter(self.backbone, directory)
        return len(adapter.sites)

    def save_adapter(self, key: str, directory: str) -> None:
        save_adapter(self._versions[key], directory)

    def drop_version(self, key: str) -> None:
        del self._versions[key]

    def profile(self, progress: Callable[[int, int], None] | None = None) -> Profile:
        return load_profile(self.backbone, progress=progress)

    # -- the pieces of a step -------------------------------------------------------

    def _run_tasklets(self, tasklets: Tasklets) -> None:
        training_pass = _pass_of(tasklets)
        for _ in range(tasklets.num_tasklets):
            training_pass.next_tasklet(tasklets.num_rows).run()

    def _update(self, update: Update) -> float | None:
        assert isinstance(update.trainer, TorchTrainer)
        return update.trainer.update(update.num_trained, update.num_steps)

    def _forward(self, work: Work) -> tuple[list[TokenLogprob], list[list[TokenLogprob]]]:
        """All rows through the blocks; then a token for each sampled request, and what prompts were to be scored."""
        passes = [_pass_of(window) for window in work.windows]
        spans = [self._span(rows) for rows in work.requests]
        spans += [training.next_window(window.num_rows) for training, window in zip(passes, work.windows, strict=True)]
        hidden = forward(self.backbone, spans)
        ends = list(accumulate(span.tokens.shape[0] for span in spans))
        num_requests = len(work.requests)
        last_rows = [end - 1 for end, rows in zip(ends, work.requests, strict=False) if rows.sampled]
        tokens = self._sample(hidden, last_rows, [rows.request for rows in work.requests if rows.sampled])
        for index, training in enumerate(passes, num_requests):
            training.finish_window(hidden[ends[index] - spans[index].tokens.shape[0] : ends[index]])
        return tokens, self._score_prompts(hidden, ends, work.requests)

    def _span(self, rows: RequestRows) -> Span:
        request, sequence = rows.request, rows.request.sequence
        assert sequence is not None
        start = sequence.length
        return sequence.rows(torch.tensor(request.tokens[start : start + rows.num_rows]), self._bypasses(request))

    def _bypasses(self, request: Request) -> Bypasses | None:
        return self._versions[request.version.key].bypasses() if request.version is not None else None

    def _sample(self, hidden: Tensor, last_rows: Sequence[int], requests: Sequence[Request]) -> list[TokenLogprob]:
        if not requests:
            return []
        users = [(1, self._bypasses(request)) for request in requests]
        chosen = sample(logits(self.backbone, hidden[last_rows], users), [r.sampling_row() for r in requests])
        tokens = chosen.tokens.tolist()
        if not chosen.logprobs.numel():
            return [TokenLogprob(token=token, logprob=nan) for token in tokens]
        logprobs = chosen.logprobs.tolist()
        top_tokens, top_logprobs = chosen.top_tokens.tolist(), chosen.top_logprobs.tolist()
        found = []
        for index, request in enumerate(requests):
            k = request.params.logprobs or 0
            top = tuple(zip(top_tokens[index][:k], top_logprobs[index][:k], strict=True))
            found.append(TokenLogprob(token=tokens[index], logprob=logprobs[index], top=top))
        return found

    def _score_prompts(
        self, hidden: Tensor, ends: Sequence[int], requests: Sequence[RequestRows]
    ) -> list[list[TokenLogprob]]:
        """Log-probabilities of prompts' tokens behind the rows that ask for it."""
        scored = [rows.request.scored_rows(rows.num_rows) for rows in requests]
        if not any(scored):
            return []
        found: list[list[TokenLogprob]] = []
        most = chunk_rows(self.backbone.architecture.vocab_size, torch.float32)
        for end, (request, num_rows, _), wanted in zip(ends, requests, scored, strict=False):
            found.append([])
            assert request.sequence is not None
            first = end - num_rows - request.sequence.length  # of the sequence, as a row of the batch
            for start in range(wanted.start, wanted.stop, most):
                stop = min(start + most, wanted.stop)
                users = [(stop - start, self._bypasses(request))]
                scores = logits(self.backbone, hidden[first + start : first + stop], users)
                k = request.params.prompt_logprobs or 0
                found[-1] += _scored(scores, request.prompt[start + 1 : stop + 1], k)
        return found

    def _time_s(self) -> float:
        """Now, with everything done that was asked of the device."""
        if self.backbone.device.type == "cuda":
            torch.cuda.synchronize(self.backbone.device)
        return time.perf_counter()


def _scored(scores: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of a token in each row of scores [n, vocab_size], and the k likeliest."""
    logprobs = scores.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    values, places = logprobs.topk(k)
    top = [tuple(zip(*row, strict=True)) for row in zip(places.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token=token, logprob=logprob, top=likeliest)
        for token, logprob, likeliest in zip(tokens, own, top, strict=True)
    ]


def _pass_of(item: LossRows | Tasklets | WindowRows) -> TrainingPass:
    assert isinstance(item.trainer, TorchTrainer) and item.trainer.training_pass is not None
    return item.trainer.training_pass


@contextmanager
def _device_memory() -> Iterator[None]:
    """Tell running out of memory from everything else that can go wrong."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceMemoryError(" ".join(str(error).split()) or "out of memory") from error
    except RuntimeError as error:  # what PyTorch raises for CPUs
        if "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise DeviceMemoryError(" ".join(str(error).split())) from error
        raise
