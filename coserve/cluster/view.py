"""What a placement may see of a cluster, and what it decides: plain frozen data, which nodes send
as they are.

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

    LeMix's η·C·ℓ² (section IV-A) is s_per_pair alone. What a pass takes at least (reading the
    weights) and what grows with the rows (products) are beside it, without which short sequences
    would seem to take nothing.
    """

    fixed_s: float = 0.0
    s_per_token: float = 0.0
    s_per_pair: float = 0.0

    def seconds(self, length: int, batch_size: int = 1) -> float:
        return self.fixed_s + batch_size * length * (self.s_per_token + length * self.s_per_pair)


class NodeProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What the offline profiler found out of a kind of device and a model (LeMix section IV-A, X1).

    forward, backward: a pass through one stage. decode_s: a decode step of one request;
    decode_request_s: each request more in it. memory_share: κ, of the pool's pages, up to which
    tasks are placed. longest_wait_s: T_max, for which a task waits for memory before others' caches
    are offloaded for it. block_tokens: tokens of a page. pages_per_request: that a request has for
    its states, beside those of its tokens. pages_per_trained_token: that training keeps between its
    forward and backward pass, for each token. training_yields: whether training gives way to
    requests within a step, as an engine has it, so that no request waits for a pass; then batch
    work does, too.
    """

    forward: Latency
    backward: Latency
    decode_s: float = 0.0
    decode_request_s: float = 0.0
    memory_share: float = 0.9
    longest_wait_s: float = 1.0
    block_tokens: int = 16
    pages_per_request: int = 0
    pages_per_trained_token: float = 0.0
    training_yields: bool = False

    def num_pages(self, num_tokens: int, *, num_requests: int = 1) -> int:
        """Of requests that have this many tokens together."""
        return num_requests * self.pages_per_request + ceil(num_tokens / self.block_tokens)

    def gives_way(self, task: "ClusterTask") -> bool:
        """Whether a task runs here in what requests leave of each step, so that none waits for
        it.
        """
        return self.training_yields and (task.trains or task.is_batch)


class ClusterTask(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed. num_tokens: ℓ, of the prompt, or of a training sequence. batch_size: C,
    sequences of that length. num_output_tokens: that may follow, as far as one knows. adapter: its
    label (`name` or `name@step`; None: the bare model). prefix: keys of the prompt's full blocks
    (`coserve.memory.pages.prefix_index`), as far as they are known. ttft_s, tpot_s: of its SLO; None:
    none. job: that a piece of training belongs to. priority, batch_due_s: of a request, see
    `RequestInfo`. excluded: nodes where it cannot go, such as those that have just failed it.
    """

    id: str
    kind: TaskKind
    arrival_s: float
    num_tokens: int
    batch_size: int = 1
    num_output_tokens: int = 0
    adapter: str | None = None
    prefix: tuple[bytes, ...] = ()
    ttft_s: float | None = None
    tpot_s: float | None = None
    tenant: str = ""
    job: str = ""
    priority: int = 0
    batch_due_s: float | None = None
    excluded: frozenset[str] = frozenset()

    @property
    def trains(self) -> bool:
        return self.kind == "training"

    @property
    def is_batch(self) -> bool:
        """Whether it is batch work, for which nobody waits."""
        return self.batch_due_s is not None


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """The execution path of a task on a node: as planned when it was placed, later as measured
    (LeMix figure 7).

    forward_start_s, forward_end_s: by stage. backward_start_s, backward_end_s: by stage, and empty
    for a request.
    """

    task: str
    kind: TaskKind
    arrival_s: float
    forward_start_s: tuple[float, ...]
    forward_end_s: tuple[float, ...]
    backward_start_s: tuple[float, ...] = ()
    backward_end_s: tuple[float, ...] = ()

    @property
    def end_s(self) -> float:
        """When all of it has run: a backward pass ends at the first stage."""
        return self.backward_end_s[0] if self.backward_end_s else self.forward_end_s[-1]


class LengthStats(msgspec.Struct, frozen=True, kw_only=True):
    """LengthStats in tokens of the tasks that a node has got: their number, mean, and sum of squared
    differences from it (Welford's).
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return sqrt(self.squares / self.count) if self.count else 0.0

    def add(self, length: float) -> "LengthStats":
        """With one more."""
        count, difference = self.count + 1, length - self.mean
        mean = self.mean + difference / count
        return LengthStats(
            count=count, mean=mean, squares=self.squares + difference * (length - mean)
        )


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as it last reported itself, with what has been placed on it since.

    hardware: kind of device. training_in_flight: training tasks that may be between the begin of
    their forward and the end of their backward pass at once (1: each learns from weights that have
    what the one before has learned); None: as many as come. is_draining: gets no more tasks.
    num_running, num_waiting: tasks that have begun, and that have not, but for batch work that
    gives way (`NodeProfile.gives_way`); num_batch_running, num_batch_waiting: the same of that.
    jobs: ids of those that it runs. slack: share of its time that the SLOs of its requests leave
    over (`EngineStats`). utilisation: share of recent time in which it was busy. num_free_pages:
    that could be had now. adapters: labels of those on the device. prefixes: keys of cached blocks,
    the ones used last. lengths: of what was placed on it. num_tasks: that were placed and have not
    ended. queue: the paths of these, in the order of placement; last: the path of what was placed
    last and does not give way, ended or not (both where the placement plans paths).
    `ClusterScheduler` fills in these four; nodes leave them out.
    """

    id: str
    hardware: str
    profile: NodeProfile
    num_stages: int = 1
    training_in_flight: int | None = None
    is_draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_batch_running: int = 0
    num_batch_waiting: int = 0
    jobs: tuple[str, ...] = ()
    slack: float = 1.0
    utilisation: float = 0.0
    num_pages: int = 0
    num_free_pages: int = 0
    adapters: frozenset[str] = frozenset()
    prefixes: frozenset[bytes] = frozenset()
    lengths: LengthStats = LengthStats()
    num_tasks: int = 0
    queue: tuple[PlannedTask, ...] = ()
    last: PlannedTask | None = None

    def num_pages_of(self, task: ClusterTask) -> int:
        """That a task needs here."""
        tokens = task.batch_size * (task.num_tokens + task.num_output_tokens)
        if task.trains:
            pages = ceil(tokens * self.profile.pages_per_trained_token)
            # An engine trains in packs as large as there is room for: what κ leaves is enough.
            left = int((1 - self.profile.memory_share) * self.num_pages)
            return min(pages, left) if self.profile.training_yields else pages
        return self.profile.num_pages(tokens, num_requests=task.batch_size)

    def has_memory(self, task: ClusterTask) -> bool:
        """Whether its pages stay below κ of the pool's (LeMix algorithm 2, line 7); a node that has
        told nothing of its pages has.
        """
        used = self.num_pages - self.num_free_pages
        return (
            not self.num_pages
            or used + self.num_pages_of(task) <= self.profile.memory_share * self.num_pages
        )

    def num_cached_tokens(self, task: ClusterTask) -> int:
        """Of a prompt, that need not be computed here."""
        count = 0
        for key in task.prefix:
            if key not in self.prefixes:
                break
            count += 1
        return min(count * self.profile.block_tokens, task.num_tokens - 1)


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at the moment of a decision.

    nodes: in an order that stays. requests, training: tasks that have no node yet, in the order in
    which they came, the one to be placed among them. num_requests_placed, num_training_placed: so
    far. last_arrival_s: of the task that arrived before the one to be placed; None: it is the
    first. request_rate: requests per second of late, but for batch work. tenants: of those whose
    requests wait, where these are to be shared out among them; otherwise none is told.
    prompt_weight: what a token of a prompt costs its tenant.
    """

    now_s: float
    nodes: tuple[NodeView, ...]
    requests: tuple[ClusterTask, ...] = ()
    training: tuple[ClusterTask, ...] = ()
    num_requests_placed: int = 0
    num_training_placed: int = 0
    last_arrival_s: float | None = None
    request_rate: float = 0.0
    tenants: tuple[TenantView, ...] = ()
    prompt_weight: float = 1.0


class Placed(NamedTuple):
    """A task goes to a node. path: as the placement plans it there; None: it plans none. offloads:
    the node is to offload caches to the host first, since the task has waited for memory for too
    long.
    """

    node: str
    path: PlannedTask | None = None
    offloads: bool = False


class Waits(NamedTuple):
    """A task stays in the queue. reason: for those who ask. seconds: after which to ask again, if
    no node has changed before.
    """

    reason: str
    seconds: float


Decision = Placed | Waits
