"""A coarse model of a node with an engine: some events for each request, whatever its length, in
place of steps.

Between two events everything moves at even speeds, by the engine's latency model. Prompts are
computed one after the other. Requests that decode get their tokens together: as fast as steps
follow each other if nothing else runs; beside a prompt or jobs nearly at the pace of the SLO, since
the policy (`slack`) fills the time until then. The part of a step beyond its decoding rows goes to
the prompt, or else to jobs, which share it evenly. A device without requests trains alone. A prompt
that arrives while jobs run waits for a part of their step. The model leaves out preemption,
prefixes and noise.
"""

from collections import deque
from heapq import heappop, heappush
from math import inf
from random import Random

from coserve.cluster.view import ClusterTask, NodeProfile, NodeView, Placed
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.plan import whole_pack
from coserve.scheduling.policies.slack import Slack
from experiments.cluster_simulation.node import ModelledReport, Progress

# Tokens of a pack, and of the sequences in it.
_PACK_ROWS, _SEQUENCE = 1024, 512
# Of a TPOT, what tokens take beside prompts and jobs: `slack` keeps a reserve. As the engine has it
# in virtual time.
_PACE = 0.93
# Of the steps of jobs, those that have a window in the forward pass; the others go backward. As the
# engine has it.
_WINDOW_STEPS = 0.5
# Beside decoding, a prompt gets at least this share of the time.
_MIN_PROMPT_SHARE = 0.3
# Seconds over which slack and utilisation are averaged.
_RECENT_S = 10.0


class FluidNode:
    """A node with a coarse model of an engine (`experiments.cluster_simulation.node.ModelledNode`).

    Args:
        ttft_s: SLO of requests without one of their own.
        tpot_s: SLO of requests without one of their own.
    """

    num_stages = 1

    def __init__(
        self,
        name: str,
        profile: NodeProfile,
        latency: LatencyModel,
        *,
        hardware: str = "",
        num_pages: int = 0,
        ttft_s: float = 2.0,
        tpot_s: float = 0.025,
    ) -> None:
        self.id, self.profile = name, profile
        self._latency, self._hardware, self._tpot_s = latency, hardware, tpot_s
        self._num_pages, self._used = num_pages, 0
        counts = latency.profile.job
        pack = whole_pack(counts, _PACK_ROWS, _SEQUENCE / 2)
        self.trained_token_s = latency.pack_s(pack) / _PACK_ROWS
        self._prompts: deque[ClusterTask] = deque()
        self._prompt_s = 0.0  # of the first of them, that are left; 0: it has not begun
        self._tokens = 0.0  # that each request which decodes has had, counted from the node's start
        self._decoding: list[tuple[float, str, ClusterTask]] = []  # by the count at which each ends
        self._keys = 0.0  # in the caches of these, in the mean over their time
        self._trained_s = 0.0  # that each job has had, likewise
        self._jobs: list[tuple[float, str]] = []
        self._now_s = self._busy = 0.0
        self._requests_s = self._recent_s = self._recent_busy = self._since_s = 0.0
        self._slack, self._utilisation = 1.0, 0.0
        self.num_tokens_trained = 0.0
        self._step_s = Slack().arrival_wait_s(ttft_s, tpot_s)
        self._random = Random(name)
        self._set_speeds()

    @property
    def next_s(self) -> float:
        return self._next_s

    @property
    def busy_s(self) -> float:
        return self._busy

    def add(self, task: ClusterTask, placed: Placed, now_s: float) -> list[ModelledReport]:
        self._move(now_s)
        if task.trains:
            seconds = task.num_tokens * task.batch_size * self.trained_token_s
            heappush(self._jobs, (self._trained_s + seconds, task.id))
        else:
            self._prompts.append(task)
            was_free = not self._prompt_s
            self._start_prompt()
            if was_free and self._prompt_s and self._jobs:
                self._prompt_s += self._random.uniform(
                    0.0, self._tpot_s if self._decoding else self._step_s
                )
        self._set_speeds()
        return [ModelledReport(now_s, view=self.report(now_s))]

    def advance(self, now_s: float) -> list[ModelledReport]:
        progress: list[Progress] = []
        while (at_s := self._next_s) <= now_s:
            self._move(at_s)
            self._end(at_s, progress)
            self._start_prompt()
            self._set_speeds()
        self._move(now_s)
        self._set_speeds()
        return [ModelledReport(now_s, progress, self.report(now_s))]

    def report(self, now_s: float) -> NodeView:
        self._average(now_s)
        return NodeView(
            id=self.id,
            hardware=self._hardware,
            profile=self.profile,
            num_running=len(self._decoding) + (self._prompt_s > 0),
            num_waiting=max(0, len(self._prompts) - 1),
            jobs=tuple([job for _, job in self._jobs]),
            slack=self._slack,
            utilisation=self._utilisation,
            num_pages=self._num_pages,
            num_free_pages=max(0, self._num_pages - self._used),
        )

    # -- speeds ---------------------------------------------------------------------------

    def _set_speeds(self) -> None:
        """Compute the speeds until the next event, and when that is."""
        number, pace_s = len(self._decoding), _PACE * self._tpot_s
        self._token_speed = self._prompt_speed = self._train_speed = 0.0
        prompt = self._prompt_s > 0
        if not number:
            self._prompt_speed, self._train_speed = (
                float(prompt),
                float(not prompt and bool(self._jobs)),
            )
            self._share = float(prompt)
        elif not prompt and not self._jobs:
            self._token_speed, self._share = 1 / self._decode_s(), 1.0
        else:
            # The weights are read for a prompt anyway, and for a window of a job.
            decode_s = self._decode_s()
            own_s = decode_s - (
                1.0 if prompt else _WINDOW_STEPS
            ) * self._latency.profile.forward.at(1)
            step_s = max(pace_s, decode_s, own_s / (1 - _MIN_PROMPT_SHARE) if prompt else 0.0)
            left = 1 - own_s / step_s
            self._token_speed, self._share = 1 / step_s, 1.0 if prompt else 1 - left
            self._prompt_speed, self._train_speed = (left, 0.0) if prompt else (0.0, left)
        ends_s = inf
        if self._prompt_speed:
            ends_s = self._prompt_s / self._prompt_speed
        if self._token_speed:
            ends_s = min(ends_s, (self._decoding[0][0] - self._tokens) / self._token_speed)
        if self._train_speed and self._jobs:
            ends_s = min(
                ends_s, (self._jobs[0][0] - self._trained_s) * len(self._jobs) / self._train_speed
            )
        self._next_s = self._now_s + max(0.0, ends_s)

    def _decode_s(self) -> float:
        number = len(self._decoding)
        return self._latency.forward_s(
            ForwardLoad(rows=number, sampled=number, spans=number, keys=int(self._keys) + number)
        )

    def _move(self, now_s: float) -> None:
        """Move everything to a time, at the present speeds."""
        seconds = now_s - self._now_s
        if seconds <= 0:
            return
        self._now_s = now_s
        self._prompt_s = (
            max(1e-12, self._prompt_s - seconds * self._prompt_speed) if self._prompt_s else 0.0
        )
        self._tokens += seconds * self._token_speed
        if self._train_speed:
            trained_s = seconds * self._train_speed
            self._trained_s += trained_s / len(self._jobs)
            self.num_tokens_trained += trained_s / self.trained_token_s
        self._requests_s += seconds * self._share
        if self._prompt_s or self._decoding or self._jobs:
            self._busy += seconds

    # -- beginnings and ends -----------------------------------------------------------------

    def _start_prompt(self) -> None:
        """Start the first waiting prompt, if none runs and there are pages for all of it."""
        if self._prompt_s or not self._prompts:
            return
        pages = self._pages_of(self._prompts[0])
        if self._num_pages and self._used and self._used + pages > self._num_pages:
            return
        self._used += pages
        self._prompt_s = self._latency.prompt_s(self._prompts[0].num_tokens)

    def _end(self, now_s: float, progress: list[Progress]) -> None:
        """End everything that ends now."""
        tiny = 1e-9
        if self._prompt_s and self._prompt_s <= tiny:
            task = self._prompts.popleft()
            self._prompt_s = 0.0
            if task.num_output_tokens > 1:
                heappush(self._decoding, (self._tokens + task.num_output_tokens - 1, task.id, task))
                self._keys += task.num_tokens + task.num_output_tokens / 2
                progress.append(Progress(task.id, first_token_s=now_s))
            else:
                self._used -= self._pages_of(task)
                progress.append(Progress(task.id, first_token_s=now_s, end_s=now_s))
        while self._decoding and self._decoding[0][0] <= self._tokens + 1e-6:
            _, _, task = heappop(self._decoding)
            self._keys -= task.num_tokens + task.num_output_tokens / 2
            self._used -= self._pages_of(task)
            progress.append(Progress(task.id, end_s=now_s))
        while self._jobs and self._jobs[0][0] <= self._trained_s + 1e-6:
            progress.append(Progress(heappop(self._jobs)[1], end_s=now_s))

    def _pages_of(self, task: ClusterTask) -> int:
        return self.profile.num_pages(task.num_tokens + task.num_output_tokens)

    def _average(self, now_s: float) -> None:
        """Update the recent slack and utilisation."""
        seconds = now_s - self._since_s
        if seconds < _RECENT_S:
            return
        self._slack = max(0.0, 1 - (self._requests_s - self._recent_s) / seconds)
        self._utilisation = min(1.0, (self._busy - self._recent_busy) / seconds)
        self._since_s, self._recent_s, self._recent_busy = now_s, self._requests_s, self._busy
