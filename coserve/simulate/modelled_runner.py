"""A runner that runs nothing: it takes the pages that the real one would, moves cursors, and says how long it took."""

from pathlib import Path
from random import Random

from coserve.adapters.base import Adapter, AdapterConfig
from coserve.devices.counting import job_counts
from coserve.devices.messages import TokenLogprob
from coserve.engine.checkpoint import TrainerState
from coserve.engine.runner import StepResult, Work
from coserve.errors import AdapterError
from coserve.memory.activations import PooledMemory, group_bytes
from coserve.models.backbone import Backbone
from coserve.scheduling.counts import JobCounts
from coserve.scheduling.latency import ForwardLoad, LatencyModel, Profile
from coserve.scheduling.plan import JobView
from coserve.tuning.config import TuningConfig
from coserve.tuning.cursor import Cursor
from coserve.tuning.loss_sums import LossSums
from coserve.tuning.order import PackMembers
from coserve.tuning.programs import evaluation_programs, training_programs
from coserve.tuning.training_pass import saved_shapes, workspace_shapes


class VirtualClock:
    """Time that moves when it is told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now_s += seconds


class ModelledTrainer:
    """A job's counts and pages; see `Trainer`. Its losses are nan."""

    def __init__(self, adapter: Adapter, memory: PooledMemory, *, mean_context_len: float) -> None:
        self.pack: PackMembers | None = None
        self.cursor: Cursor | None = None
        self._memory = memory
        self._runs: dict[object, range] = {}
        self._adapter = adapter
        self._training = training_programs(adapter, mean_context_len=mean_context_len)
        self._evaluation = evaluation_programs(adapter, mean_context_len=mean_context_len)
        self._programs = self._training
        self.counts: JobCounts = job_counts(adapter, self._training)
        # Bytes of one row in every group that a pass takes; sizes are proportional to rows, but for alignment.
        self._bytes: dict[tuple[bool, int], dict[object, int]] = {}

    def num_pages(self, num_rows: int) -> int:
        return sum(self._memory.num_pages(size) for size in self._groups(num_rows, evaluate=False).values())

    def begin(self, pack: PackMembers, *, evaluate: bool) -> None:
        programs = self._evaluation if evaluate else self._training
        try:
            for group, size in self._groups(pack.num_rows, evaluate=evaluate).items():
                self._runs[group] = self._memory.take_run(size)
        except BaseException:
            self.drop()
            raise
        self._programs, self.pack = programs, pack
        self.cursor = Cursor(num_rows=pack.num_rows, num_trained=pack.num_trained, num_parts=len(programs.parts))

    def forward(self, num_rows: int) -> None:
        """A window has been run."""
        assert self.cursor is not None
        self.cursor.next_forward(num_rows)
        self.cursor.advance_forward(num_rows)
        if self.cursor.forward_done:
            for group in [group for group in self._runs if group not in self._programs.parts and group != "workspace"]:
                self._memory.give_back_run(self._runs.pop(group))
            self._release_if_done()

    def loss(self, max_rows: int) -> int:
        """Rows have been through the loss; returns how many."""
        assert self.cursor is not None
        start, end = self.cursor.next_loss(max_rows)
        self.cursor.advance_loss(end - start)
        self._release_if_done()
        return end - start

    def backward(self, max_rows: int) -> int:
        """A tasklet has been run; returns its rows."""
        assert self.cursor is not None
        start, end = self.cursor.next_backward(max_rows)
        part = self._programs.parts[self.cursor.num_parts_done]
        if self.cursor.advance_backward(end - start):
            self._memory.give_back_run(self._runs.pop(part))
            self._release_if_done()
        return end - start

    def drop(self) -> None:
        self._release()
        self.cursor, self.pack = None, None

    def finish(self) -> LossSums:
        assert self.cursor is not None and self.cursor.done and self.pack is not None
        num_trained = self.pack.num_trained
        self.drop()
        return LossSums(loss=float("nan"), num_trained=num_trained)

    def view(self) -> JobView:
        """What the latency model asks about its rows."""
        assert self.pack is not None
        return JobView("", "forward", self.pack.num_rows, 0, 0, self.pack.mean_context_len, self.counts)

    def publish(self, key: str) -> None:
        pass

    def state(self) -> TrainerState:
        raise AdapterError("a modelled adapter has no parameters to save")

    def close(self) -> None:
        self.drop()

    def _release_if_done(self) -> None:
        """As soon as nothing is left to run, before anybody collects the result."""
        assert self.cursor is not None
        if self.cursor.done:
            self._release()

    def _release(self) -> None:
        for run in self._runs.values():
            self._memory.give_back_run(run)
        self._runs = {}

    def _groups(self, num_rows: int, *, evaluate: bool) -> dict[object, int]:
        """Bytes of what a pass takes: its workspace, and what it saves of each part."""
        if (evaluate, num_rows) not in self._bytes:
            backbone, programs = self._adapter.backbone, self._evaluation if evaluate else self._training
            groups: dict[object, int] = {"workspace": group_bytes(workspace_shapes(programs, backbone, num_rows))}
            for part in backbone.architecture.parts[:-1]:
                groups[part] = group_bytes(saved_shapes(programs, backbone, part, num_rows))
            self._bytes[evaluate, num_rows] = groups
        return self._bytes[evaluate, num_rows]


class ModelledRunner:
    """See `Runner`.

    Args:
        backbone: on the "meta" device: shapes are all it takes.
        profile: of the hardware.
        noise: standard deviation of the logarithm of the time that a section takes beside what the profile says.
    """

    def __init__(self, backbone: Backbone, profile: Profile, *, noise: float = 0.0, seed: int = 0) -> None:
        self.backbone, self.clock = backbone, VirtualClock()
        self._profile, self._truth = profile, LatencyModel(profile)
        self._noise, self._random = noise, Random(seed)
        self._num_networks: dict[str, int] = {}

    def run(self, work: Work) -> StepResult:
        loss_s = self._taken(sum(self._loss_s(*piece) for piece in work.losses))
        backward_s = self._taken(sum(self._tasklets_s(*tasklets) for tasklets in work.tasklets))
        updates = [JobView("", "update", 0, 0, 0, 0.0, update.trainer.counts) for update in work.updates]
        update_s = self._taken(sum(self._truth.update_s(view) for view in updates))
        load = ForwardLoad()
        for request, num_rows, _ in work.requests:
            load.add_request(request.view(), num_rows)
        for trainer, num_rows in work.windows:
            assert isinstance(trainer, ModelledTrainer)
            self._truth.add_window(load, trainer.view(), num_rows)
            trainer.forward(num_rows)
        forward_s = self._taken(self._truth.forward_s(load))
        vocab_size = self.backbone.architecture.vocab_size
        tokens = [
            TokenLogprob(token=(request.seed + request.num_output) % vocab_size, logprob=0.0)
            for request, _, sampled in work.requests
            if sampled
        ]
        scored = [request.scored_rows(num_rows) for request, num_rows, _ in work.requests]
        prompts = [[TokenLogprob(token=0, logprob=0.0)] * len(rows) for rows in scored] if any(scored) else []
        self.clock.advance(loss_s + backward_s + update_s + forward_s)
        norms = [0.0] * len(work.updates)
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
    ) -> ModelledTrainer:
        if not isinstance(adapter, AdapterConfig):
            raise AdapterError("a modelled adapter has no parameters to go on from")
        return ModelledTrainer(Adapter(self.backbone, adapter), memory, mean_context_len=mean_context_len)

    def load_adapter(self, key: str, directory: str) -> int:
        raise AdapterError("a modelled device loads no files")

    def save_adapter(self, key: str, directory: str) -> None:
        raise AdapterError("a modelled adapter has no parameters to save")

    def drop_version(self, key: str) -> None:
        pass

    def profile(self) -> Profile:
        return self._profile

    def _loss_s(self, trainer: object, num_rows: int) -> float:
        assert isinstance(trainer, ModelledTrainer)
        return self._truth.loss_s(trainer.loss(num_rows))

    def _tasklets_s(self, trainer: object, num_rows: int, num_tasklets: int) -> float:
        assert isinstance(trainer, ModelledTrainer)
        view = trainer.view()
        return sum(self._truth.tasklet_s(view, trainer.backward(num_rows)) for _ in range(num_tasklets))

    def _taken(self, seconds: float) -> float:
        return seconds * self._random.lognormvariate(0.0, self._noise) if self._noise else seconds
