"""Views that a placement gets of a cluster, and decisions that it returns: plain frozen data, which
nodes send as they are.

Terms are LeMix's (section II-A, table I). A node holds one copy of the model on one device, or on
several in a pipeline of stages. A task is what is placed as a whole: a request, or a piece of
training (a job, or an optimizer step of one). Times are in seconds of one clock, the cluster's.
"""

from math import ceil, sqrt
from typing import Literal, NamedTuple

import msgspec

from coserve.scheduling.plan import TenantView

TaskKind = Literal["request", "training"]


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a pass of C sequences of ℓ tokens through one stage.

    LeMix's η·C·ℓ² (section IV-A) is `s_per_pair` alone. The other two terms are added here; without
    them short sequences would seem to take no time.
    """

    fixed_s: float = 0.0
    """Least time of a pass, for reading the weights."""
    s_per_token: float = 0.0
    """Time per row, for products."""
    s_per_pair: float = 0.0
    """Time per pair of tokens of a sequence, for attention."""

    def seconds(self, length: int, batch_size: int = 1) -> float:
        """Return the seconds of a pass of this many sequences of a length."""
        return self.fixed_s + batch_size * length * (self.s_per_token + length * self.s_per_pair)


class NodeProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile of a device with a model, by the offline profiler (LeMix section IV-A, X1)."""

    forward: Latency
    """Seconds of a forward pass through one stage."""
    backward: Latency
    """Seconds of a backward pass through one stage."""
    decode_s: float = 0.0
    """Seconds of a decode step of one request."""
    decode_request_s: float = 0.0
    """Seconds of each further request in a decode step."""
    memory_share: float = 0.9
    """κ: share of the pool's pages up to which tasks are placed."""
    longest_wait_s: float = 1.0
    """T_max: time that a task waits for memory before other tasks' caches are offloaded for it."""
    block_tokens: int = 16
    """Tokens of a page."""
    pages_per_request: int = 0
    """Pages of a request's states, beside those of its tokens."""
    pages_per_trained_token: float = 0.0
    """Pages that training keeps between its forward and backward pass, per token."""
    training_yields: bool = False
    """Whether training, and batch work too, gives way to requests within a step, as in an engine,
    so that no request waits for a pass.
    """

    def num_pages(self, num_tokens: int, *, num_requests: int = 1) -> int:
        """Return the pages of requests that have this many tokens together."""
        return num_requests * self.pages_per_request + ceil(num_tokens / self.block_tokens)

    def gives_way(self, task: "ClusterTask") -> bool:
        """Return whether a task runs here in what requests leave of each step, so that no request
        waits for it.
        """
        return self.training_yields and (task.trains or task.is_batch)


class ClusterTask(msgspec.Struct, frozen=True, kw_only=True):
    """A request or a piece of training that is to be placed."""

    id: str
    """Id of the request or job."""
    kind: TaskKind
    """A request, or training."""
    arrival_s: float
    """Time of arrival."""
    num_tokens: int
    """ℓ: length of the prompt, or of a training sequence."""
    batch_size: int = 1
    """C: number of sequences of that length."""
    num_output_tokens: int = 0
    """Tokens that may follow, as far as known."""
    adapter: str | None = None
    """Label of the adapter, `name` or `name@step`; None: the bare model."""
    prefix: tuple[bytes, ...] = ()
    """Keys of the prompt's full blocks (`coserve.memory.pages.prefix_index`), as far as known."""
    ttft_s: float | None = None
    """TTFT SLO; None: none."""
    tpot_s: float | None = None
    """TPOT SLO; None: none."""
    tenant: str = ""
    """Name of the tenant."""
    job: str = ""
    """Job to which a piece of training belongs."""
    priority: int = 0
    """Priority of a request: `RequestInfo`."""
    batch_due_s: float | None = None
    """Time at which batch work is due: `RequestInfo`."""
    excluded: frozenset[str] = frozenset()
    """Nodes where the task cannot go, such as those that have just failed it."""

    @property
    def trains(self) -> bool:
        """True for training."""
        return self.kind == "training"

    @property
    def is_batch(self) -> bool:
        """True for batch work, for which nobody waits."""
        return self.batch_due_s is not None


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """The execution path of a task on a node: as planned when it was placed, later as measured
    (LeMix figure 7).
    """

    task: str
    """Id of the task."""
    kind: TaskKind
    """A request, or training."""
    arrival_s: float
    """Time of arrival."""
    forward_start_s: tuple[float, ...]
    """Start of the forward pass, by stage."""
    forward_end_s: tuple[float, ...]
    """End of the forward pass, by stage."""
    backward_start_s: tuple[float, ...] = ()
    """Start of the backward pass, by stage; empty for a request."""
    backward_end_s: tuple[float, ...] = ()
    """End of the backward pass, by stage; empty for a request."""

    @property
    def end_s(self) -> float:
        """Time at which all of it has run: a backward pass ends at the first stage."""
        return self.backward_end_s[0] if self.backward_end_s else self.forward_end_s[-1]


class LengthStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the lengths, in tokens, of the tasks that a node has got, by Welford's
    algorithm.
    """

    count: int = 0
    """Number of tasks."""
    mean: float = 0.0
    """Mean length."""
    squares: float = 0.0
    """Sum of squared differences from the mean."""

    @property
    def deviation(self) -> float:
        """Standard deviation of the lengths."""
        return sqrt(self.squares / self.count) if self.count else 0.0

    def add(self, length: float) -> "LengthStats":
        """Return the statistics with one more length."""
        count, difference = self.count + 1, length - self.mean
        mean = self.mean + difference / count
        return LengthStats(
            count=count, mean=mean, squares=self.squares + difference * (length - mean)
        )


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it last reported itself, with what has been placed on it since.

    `ClusterScheduler` fills in the last four fields; nodes leave them out.
    """

    id: str
    """The node's name."""
    hardware: str
    """Kind of device."""
    profile: NodeProfile
    """Profile of this kind."""
    num_stages: int = 1
    """Number of pipeline stages."""
    training_in_flight: int | None = None
    """Number of training tasks that may be between the begin of their forward and the end of their
    backward pass at once (1: each learns from weights that have what the one before has learned);
    None: any.
    """
    is_draining: bool = False
    """Whether the node gets no more tasks."""
    num_running: int = 0
    """Tasks that have begun, but for batch work that gives way (`NodeProfile.gives_way`)."""
    num_waiting: int = 0
    """Tasks that have not begun, but for batch work that gives way."""
    num_batch_running: int = 0
    """Tasks of batch work that give way and have begun."""
    num_batch_waiting: int = 0
    """Tasks of batch work that give way and have not begun."""
    jobs: tuple[str, ...] = ()
    """Ids of the jobs that it runs."""
    slack: float = 1.0
    """Share of its time that the SLOs of its requests leave over (`EngineStats`)."""
    utilisation: float = 0.0
    """Share of recent time in which it was busy."""
    num_pages: int = 0
    """Pages of its pool."""
    num_free_pages: int = 0
    """Pages that could be allocated now."""
    adapters: frozenset[str] = frozenset()
    """Labels of the adapters on the device."""
    prefixes: frozenset[bytes] = frozenset()
    """Keys of cached blocks, those used last."""
    lengths: LengthStats = LengthStats()
    """Lengths of what was placed on it."""
    num_tasks: int = 0
    """Number of tasks that were placed on it and have not ended."""
    queue: tuple[PlannedTask, ...] = ()
    """Paths of these tasks, in the order of placement, where the placement plans paths."""
    last: PlannedTask | None = None
    """Path of the last task that was placed and does not give way, ended or not."""

    def num_pages_of(self, task: ClusterTask) -> int:
        """Return the pages that a task needs here."""
        tokens = task.batch_size * (task.num_tokens + task.num_output_tokens)
        if task.trains:
            pages = ceil(tokens * self.profile.pages_per_trained_token)
            # An engine trains in packs as large as there is room for: what κ leaves is enough.
            left = int((1 - self.profile.memory_share) * self.num_pages)
            return min(pages, left) if self.profile.training_yields else pages
        return self.profile.num_pages(tokens, num_requests=task.batch_size)

    def has_memory(self, task: ClusterTask) -> bool:
        """Return whether a task's pages stay below κ of the pool's (LeMix algorithm 2, line 7);
        always for a node that reports no pages.
        """
        used = self.num_pages - self.num_free_pages
        return (
            not self.num_pages
            or used + self.num_pages_of(task) <= self.profile.memory_share * self.num_pages
        )

    def num_cached_tokens(self, task: ClusterTask) -> int:
        """Return the number of a prompt's tokens that need not be computed here."""
        count = 0
        for key in task.prefix:
            if key not in self.prefixes:
                break
            count += 1
        # The last token of a prompt is always computed.
        return min(count * self.profile.block_tokens, task.num_tokens - 1)


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at the moment of a decision."""

    now_s: float
    """The time."""
    nodes: tuple[NodeView, ...]
    """The nodes, in an order that does not change."""
    requests: tuple[ClusterTask, ...] = ()
    """Requests that have no node yet, in the order of arrival, the one to be placed among them."""
    training: tuple[ClusterTask, ...] = ()
    """Training tasks that have no node yet, likewise."""
    num_requests_placed: int = 0
    """Number of requests placed so far."""
    num_training_placed: int = 0
    """Number of training tasks placed so far."""
    last_arrival_s: float | None = None
    """Arrival of the task before the one to be placed; None: it is the first."""
    request_rate: float = 0.0
    """Recent requests per second, but for batch work."""
    tenants: tuple[TenantView, ...] = ()
    """Tenants whose requests wait, where these are to be shared out among them; otherwise empty."""
    prompt_weight: float = 1.0
    """What a token of a prompt costs its tenant."""


class Placed(NamedTuple):
    """Decision that a task goes to a node."""

    node: str
    """The node."""
    path: PlannedTask | None = None
    """The path that the placement plans there; None: it plans none."""
    offloads: bool = False
    """Whether the node is to offload caches to the host first, since the task has waited for memory
    for too long.
    """


class Waits(NamedTuple):
    """Decision that a task stays in the queue."""

    reason: str
    """Why, in one line."""
    seconds: float
    """Time after which to ask again, if no node has changed before."""


Decision = Placed | Waits
