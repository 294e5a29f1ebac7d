"""Nodes without engines, machines or Ray: they take a front's commands, and report what a test
wants.
"""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

from coserve.cluster.front.link import ClusterLink
from coserve.cluster.nodes.checks import NodeChecks
from coserve.cluster.nodes.messages import CommandBatch, NodeEngineLost, NodeReports, NodeStatus
from coserve.cluster.nodes.shared_paths import SharedPaths
from coserve.cluster.placement import make_placement
from coserve.cluster.scheduler import ClusterScheduler
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import AddRequest, JobStart
from coserve.engine.records import EngineStats
from coserve.engine.request import Chunk
from coserve.errors import EngineGoneError
from coserve.protocol.messages import (
    CallReply,
    Ready,
    StepRecord,
    StepReport,
    decode_command,
    encode,
)
from coserve.scheduling.counts import JobCounts, ModelCounts
from coserve.scheduling.fairness import TokenWeights
from coserve.scheduling.profile import Curve, Profile
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.version import VERSION

LIMIT_S = 20.0
# 1 ms for any pass, and 0.1 ms for each row.
LINE = Curve(rows=(1, 1001), seconds=(0.0011, 0.1011))
PROFILE = Profile(
    model=ModelCounts(
        flops_per_row=1.0, flops_per_pair=0.0, head_flops_per_row=1.0, kv_bytes_per_key=1
    ),
    job=JobCounts(
        flops_per_row=0.0,
        backward_flops_per_row=1.0,
        backward_flops_per_pair=0.0,
        num_parts=2,
        num_bypasses=1,
        num_parameters=10,
    ),
    forward=LINE,
    head=LINE,
    loss=LINE,
    backward=LINE,
    s_per_pair=0.0,
    backward_s_per_pair=0.0,
    s_per_key=0.0,
    s_per_span=0.0,
    s_per_bypass=0.0,
    s_per_window_row=0.0,
    s_per_parameter=0.0,
    update_s=0.001,
)
READY = Ready(
    model="tiny",
    dtype="float32",
    device="cpu",
    threads=1,
    slo=Slo(ttft_s=2.0, tpot_s=0.1),
    vocab_size=100,
    max_positions=64,
    num_pages=10,
    page_bytes=1,
    block_tokens=16,
    weight_bytes=1,
    hardware="slow one",
    profile=PROFILE,
)


def make_stats(**settings: Any) -> EngineStats:
    """Return stats of zeros, but for these."""
    names = (
        "num_running",
        "num_waiting",
        "num_jobs",
        "num_jobs_running",
        "num_steps",
        "num_tokens_trained",
    )
    more = (
        "num_preemptions",
        "num_packs_dropped",
        "num_pages",
        "num_pages_free",
        "num_slos_clamped",
    )
    counts: dict[str, Any] = dict.fromkeys((*names, *more), 0)
    whole = {
        "num_pages_by_owner": {},
        "margin": 1.0,
        "joined_jobs": (),
        "slo": Slo(ttft_s=2.0, tpot_s=0.1),
    }
    return EngineStats(**counts | whole | settings)


def make_step(end_s: float, step_s: float) -> StepRecord:
    """Return a step that decoded a row."""
    return StepRecord(
        end_s=end_s,
        step_s=step_s,
        predicted_s=0,
        decode_rows=1,
        prefill_rows=0,
        window_rows=0,
        backward_rows=0,
    )


class ScriptedNode:
    """A node that answers calls at once, and requests when the test says so. Implements
    `NodeCalls`.
    """

    def __init__(
        self,
        ready: Ready = READY,
        version: str = VERSION,
        error: str | None = None,
        settings: str = "",
    ) -> None:
        self.ready, self.version, self.error, self.settings = ready, version, error, settings
        self.unseen: str | None = None
        self.is_alive, self.pid = True, 1
        self.delay_s: Callable[[], float] = lambda: 0.0  # before what it says is heard
        self.session: str | None = None
        self.commands: list[Any] = []
        self.answers_requests = False
        self.answers: Callable[[Any], str | None] = lambda command: (
            None
        )  # what is wrong with a call
        self.before_reply: Callable[[Any], Any] = lambda command: None
        self._reports: dict[int, bytes] = {}
        self._last = 0
        self._news = asyncio.Event()

    # -- as a front sees it -------------------------------------------------------------

    async def describe(self) -> NodeStatus:
        self._check()
        state = "ready" if self.error is None else "failed"
        return NodeStatus(
            version=self.version,
            host="here",
            pid=self.pid,
            state=state,
            settings=self.settings,
            error=self.error,
        )

    async def compare_files(self, shared: SharedPaths) -> str | None:
        self._check()
        return self.unseen

    async def attach(self, session: str) -> None:
        self._check()
        self.session, self._reports, self._last = session, {}, 0
        self.say(self.ready)

    async def send(self, session: str, batch: CommandBatch) -> None:
        self._check(session)
        for each in batch.commands:
            command = decode_command(each)
            self.commands.append(command)
            if isinstance(command, AddRequest) and self.answers_requests:
                self.answer(command.id, 7, finish="stop")
            if hasattr(command, "call"):
                self.before_reply(command)
                wrong = self.answers(command)
                self.say(CallReply(command.call, wrong, None if wrong is None else "AdapterError"))

    async def reports(self, session: str, after: int, wait_s: float) -> NodeReports:
        self._check(session)
        self._reports = {number: each for number, each in self._reports.items() if number > after}
        if not self._reports:
            self._news.clear()
            await asyncio.wait([asyncio.ensure_future(self._news.wait())], timeout=wait_s)
            self._check(session)
        await asyncio.sleep(self.delay_s())
        self._check(session)
        return NodeReports(
            reports=list(self._reports.values()), last=self._last, now_s=0.0, silent_s=0.0
        )

    async def detach(self, session: str) -> None:
        self._check(session)
        self.session = None
        self._news.set()

    def _check(self, session: str | None = None) -> None:
        if not self.is_alive or (session is not None and session != self.session):
            raise EngineGoneError("the actor died")

    # -- as a test moves it ---------------------------------------------------------------

    def say(self, report: Any) -> None:
        self.say_encoded(encode(report))

    def say_encoded(self, report: bytes) -> None:
        self._last += 1
        self._reports[self._last] = report
        self._news.set()

    def answer(self, request: str, *tokens: int, finish: Any = None) -> None:
        self.say(StepReport(chunks=[Chunk(request=request, tokens=tokens, finish_reason=finish)]))

    def lose_engine(self, jobs_at_death: tuple[str, ...] = ()) -> None:
        self.say(NodeEngineLost("the engine died", jobs_at_death))
        self.say(self.ready)

    def die(self) -> None:
        self.is_alive, self.session = False, None
        self._news.set()

    def live(self) -> None:
        """Live again, as another process if it had died."""
        self.pid += not self.is_alive
        self.is_alive = True

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.commands if isinstance(each, kind)]


async def until(question: Callable[[], Any]) -> Any:
    """Wait until something is true, and return it."""
    until_s = asyncio.get_running_loop().time() + LIMIT_S
    while not (found := question()):
        assert asyncio.get_running_loop().time() < until_s, "it has not come true"
        await asyncio.sleep(0.005)
    return found


@asynccontextmanager
async def cluster(
    *nodes: ScriptedNode,
    placement: str = "round-robin",
    ready: int | None = None,
    weights: TokenWeights | None = None,
    checks: NodeChecks | None = None,
    **settings: float,
) -> Any:
    """Yield a link to nodes.

    Args:
        nodes: The nodes.
        placement: Name of the placement.
        ready: Number of nodes that are waited for (default: all).
        weights: As in `ClusterScheduler`.
        checks: Checks of nodes.
        settings: Settings of the placement.
    """
    found = {f"node-{number}": node for number, node in enumerate(nodes)}

    async def find() -> dict[str, ScriptedNode]:
        return found

    link = ClusterLink(
        find, ClusterScheduler(make_placement(placement, settings), weights), checks=checks
    )
    running = asyncio.create_task(link.run())
    try:
        await until(lambda: num_ready(link) == (len(nodes) if ready is None else ready))
        yield link
    finally:
        await link.stop()
        await running


def num_ready(link: ClusterLink) -> int:
    return sum(each["state"] == "ready" for each in link.describe())


def make_request(id: str, **settings: Any) -> AddRequest:
    usual = {"prompt": [1, 2, 3], "params": SamplingParams(max_tokens=4), "arrival_s": 0.0}
    return AddRequest(**{"id": id, **usual, **settings})


def make_job(id: str, **settings: Any) -> JobStart:
    return JobStart(
        id=id,
        name=f"ft:{id}",
        examples="/none",
        checkpoints="/none",
        config=TuningConfig(),
        **settings,
    )
