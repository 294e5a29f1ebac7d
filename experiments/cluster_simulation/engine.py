"""A fine model of a node: the engine itself, with its policy, pages and step loop, on a modelled
device.
"""

from collections.abc import Sequence
from math import inf
from random import Random

from coserve.adapters.methods.lora import LoraConfig
from coserve.cluster.view import ClusterTask, NodeProfile, NodeView, Placed
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.jobs.events import JobEvent
from coserve.engine.outbox import Event
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.protocol.messages import STATS_S
from coserve.scheduling.slo import Slo
from coserve.simulate.modelled_device import ModelledDevice
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from experiments.cluster_simulation.node import ModelledReport, Progress

# A training task is examples of this many tokens, and an optimizer step for each batch.
_EXAMPLE_TOKENS, _BATCH_SIZE = 512, 4
_LORA = LoraConfig(r=16, alpha=32, target_modules="all-linear")
# Seconds over which utilisation is averaged.
_RECENT_S = 10.0


class EngineNode:
    """A node with an engine on a modelled device
    (`experiments.cluster_simulation.node.ModelledNode`).

    A step is not divided: tasks that arrive before its end are in the next one. Reports are as
    frequent as those of an engine's process.
    """

    num_stages = 1

    def __init__(
        self, name: str, engine: TokenEngine, profile: NodeProfile, *, hardware: str = ""
    ) -> None:
        assert isinstance(engine.device, ModelledDevice)
        self.id, self.profile, self.engine = name, profile, engine
        self._clock, self._hardware = engine.device.clock, hardware
        self._random, self._vocab = Random(name), range(engine.device.info.vocab_size)
        self._seen = set[str]()
        self._busy = 0.0
        self._recent = (0.0, 0.0)
        self._reported_s = 0.0

    @property
    def next_s(self) -> float:
        return self._clock.now() if self.engine.has_work else inf

    @property
    def busy_s(self) -> float:
        return self._busy

    def add(self, task: ClusterTask, placed: Placed, now_s: float) -> list[ModelledReport]:
        self._clock.advance(max(0.0, now_s - self._clock.now()))
        if task.trains:
            self._add_job(task)
            return []
        self.engine.add_tokens(
            self._random.choices(self._vocab, k=task.num_tokens),
            SamplingParams(max_tokens=max(1, task.num_output_tokens), temperature=0.0),
            request_id=task.id,
            arrival_s=task.arrival_s,
            slo=Slo(ttft_s=task.ttft_s, tpot_s=task.tpot_s)
            if task.ttft_s and task.tpot_s
            else None,
            priority=task.priority,
            batch_due_s=task.batch_due_s,
        )
        return []

    def advance(self, now_s: float) -> list[ModelledReport]:
        result: list[ModelledReport] = []
        while self.engine.has_work and self._clock.now() <= now_s:
            begin_s = self._clock.now()
            events = self.engine.step()
            if self.engine.last_plan.runs_nothing:
                # Pages or slots are missing, or only events were left.
                self._clock.advance(0.001 if self.engine.has_work else 0.0)
            else:
                self._busy += self._clock.now() - begin_s
            result.append(self._said(events))
        if not self.engine.has_work and self._clock.now() < now_s:
            self._clock.advance(now_s - self._clock.now())
        return result

    def report(self, now_s: float) -> NodeView:
        stats = self.engine.stats()
        since_s, busy_s = self._recent
        seconds = max(1e-9, now_s - since_s)
        utilisation = min(1.0, (self._busy - busy_s) / seconds)
        if seconds > _RECENT_S:
            self._recent = now_s, self._busy
        return NodeView(
            id=self.id,
            hardware=self._hardware,
            profile=self.profile,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_batch_running=stats.num_batch_running,
            num_batch_waiting=stats.num_batch_waiting,
            jobs=tuple(self.engine.jobs),
            slack=stats.slack,
            utilisation=utilisation,
            num_pages=stats.num_pages,
            num_free_pages=stats.num_pages_for_requests,
        )

    def _add_job(self, task: ClusterTask) -> None:
        number = max(1, round(task.num_tokens * task.batch_size / _EXAMPLE_TOKENS))
        tokens = tuple(self._random.choices(self._vocab, k=_EXAMPLE_TOKENS))
        example = Example(tokens=tokens, trained=(True,) * _EXAMPLE_TOKENS)
        config = TuningConfig(batch_size=_BATCH_SIZE, max_sequence_length=_EXAMPLE_TOKENS)
        self.engine.submit_examples([example] * number, config, adapter=_LORA, job_id=task.id)

    def _said(self, events: Sequence[Event]) -> ModelledReport:
        """Return the report at the end of a step."""
        now_s = self._clock.now()
        progress = [each for event in events if (each := self._progress(event)) is not None]
        of_job = any(isinstance(event, JobEvent) for event in events)
        if not of_job and self.engine.has_work and now_s - self._reported_s < STATS_S:
            return ModelledReport(now_s, progress)
        self._reported_s = now_s
        return ModelledReport(now_s, progress, self.report(now_s))

    def _progress(self, event: Event) -> Progress | None:
        now_s = self._clock.now()
        if isinstance(event, JobEvent):
            return (
                Progress(event.job, end_s=now_s)
                if event.kind in ("succeeded", "failed", "cancelled")
                else None
            )
        assert isinstance(event, Chunk)
        is_first = event.request not in self._seen
        if is_first and not event.tokens and event.finish_reason is None:
            return None
        self._seen.add(event.request)
        is_last = event.finish_reason is not None
        if is_last:
            self._seen.discard(event.request)
        if not (is_first or is_last):
            return None
        return Progress(
            event.request,
            first_token_s=now_s if is_first else None,
            end_s=now_s if is_last else None,
        )
