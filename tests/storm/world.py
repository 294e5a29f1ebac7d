"""An engine on a device that fails, what was asked of it and what came of that; and what starts it
again.

Time is the modelled device's. Everything is drawn from one seed, so the same seed gives the same
history.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from random_plans import random_policy
from storm.faults import FaultyDevice, StormError
from storm.ledger import Adapter, Disk, LedgerDevice
from transformers import AutoConfig

from coserve.adapters import LoraConfig
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.command_log import LostCommandError
from coserve.engine.config import EngineConfig
from coserve.engine.jobs.checkpoint import Checkpoint
from coserve.engine.jobs.events import JobEvent
from coserve.engine.outbox import Event
from coserve.engine.request import Chunk
from coserve.engine.served_adapters import AdapterLoad
from coserve.engine.token_engine import TokenEngine
from coserve.errors import CoserveError, DeviceGoneError
from coserve.models import Backbone
from coserve.models.backbone import build_backbone
from coserve.models.presets import PRESETS
from coserve.models.source import ModelSource
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.policies import make_policy, policy_names
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.virtual_clock import VirtualClock
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

END_TOKENS = (0, 7)
TENANTS = ("", "a", "b", "c")
ANY_PLAN = "any-plan"  # beside the policies: whatever a plan may be
_HARDWARE = {
    "cpu": Hardware(name="cpu", flops_per_s=1e11, bytes_per_s=3e9, call_s=1e-4),
    "slow": Hardware(name="slow", flops_per_s=1e10, bytes_per_s=3e8, call_s=1e-3),
}
# Pages (None: drawn), those of the host, and tokens of a page. With small ones there is room for
# few requests.
_MEMORY = ((None, 0, 16), (120, 2000, 4), (None, 0, 16), (200, 60, 4), (None, 400, 16))


@dataclass(kw_only=True)
class Asked:
    """A request that was accepted. ends: of each sequence that is over, its finish_reason."""

    prompt: list[int]
    params: SamplingParams
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_scored: int = 0
    ends: dict[int, str] = field(default_factory=dict)
    was_cancelled: bool = False
    stopped: set[int] = field(default_factory=set)

    @property
    def is_finished(self) -> bool:
        return len(self.ends) == self.params.n


@dataclass(kw_only=True)
class Submitted:
    """A job that was accepted. adapter: PEFT's fields, or the directory of the one that it begins
    with. checkpoints: that were written, the last one last. step: the last that this engine told.
    state: as it was told.
    """

    id: str
    examples: list[Example]
    validation: list[Example]
    config: TuningConfig
    adapter: dict[str, Any] | str
    tenant: str
    checkpoints: list[tuple[int, Path]] = field(default_factory=list)
    step: int = 0
    state: str = "running"

    @property
    def is_finished(self) -> bool:
        return self.state not in ("running", "paused")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a storm is about, drawn from its seed."""

    policy: str
    hardware: str
    expected_hardware: str
    noise: float
    num_pages: int
    num_host_pages: int
    block_tokens: int
    max_requests: int
    max_step_rows: int
    max_adapters: int
    most_waiting: int

    @classmethod
    def drawn(cls, seed: int, rng: Random) -> "Setting":
        """Policies take turns, so that not many seeds try them all; and with each of them, kinds of
        memory do."""
        policies = (*policy_names(), "slack", "vtc", ANY_PLAN)
        num_pages, num_host_pages, block_tokens = _MEMORY[seed // len(policies) % len(_MEMORY)]
        hardware = rng.choice(list(_HARDWARE))
        return cls(
            policy=policies[seed % len(policies)],
            hardware=hardware,
            expected_hardware=hardware if rng.random() < 0.8 else rng.choice(list(_HARDWARE)),
            noise=rng.choice((0.0, 0.05, 0.3)),
            num_pages=rng.choice((60, 120, 400)) if num_pages is None else num_pages,
            num_host_pages=num_host_pages,
            block_tokens=block_tokens,
            max_requests=rng.choice((1, 4, 256)),
            max_step_rows=rng.choice((5, 20, 100, 2048)),
            max_adapters=rng.choice((1, 2, 64)),
            most_waiting=rng.choice((5, 5, 30)),
        )


class World:
    """See the module."""

    def __init__(self, seed: int, home: Path) -> None:
        self.rng, self.home = Random(seed), home
        self.setting = Setting.drawn(seed, self.rng)
        self.disk = Disk()
        self.prompts: dict[str, list[int]] = {}
        self.asked: dict[str, Asked] = {}
        self.jobs: dict[str, Submitted] = {}
        self.ended: list[Submitted] = []  # that are to be checked
        self.lost: list[str] = []  # jobs that are to be started again
        self.saved = [str(home / "given")]  # directories of adapters
        given = Adapter(
            start="given", fields=LoraConfig(r=4, target_modules="all-linear").to_peft()
        )
        self.disk.write(given, Path(self.saved[0]), with_optimizer=False)
        self.loads: list[AdapterLoad] = []  # under way beside steps
        self.taken: list[tuple[str, Checkpoint]] = []  # and not written yet
        self.counts: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.num_actions = 0
        self.jumped_s = 0.0
        self.faults: tuple[float, tuple[str, ...]] = 0.0, ()  # how often, and of what kinds
        self.clock = VirtualClock()
        self.make_engine()

    # -- the engine -----------------------------------------------------------------

    def make_engine(self) -> None:
        """A new device with a new engine: nothing of the old ones is left but what was written."""
        setting = self.setting
        modelled = ModelledDevice(
            backbone(),
            profile(setting.hardware),
            num_pages=setting.num_pages,
            block_tokens=setting.block_tokens,
            num_host_pages=setting.num_host_pages,
            noise=setting.noise,
            seed=self.rng.randrange(1 << 30),
        )
        modelled.clock = self.clock
        self.ledger = LedgerDevice(modelled, self.disk, self.prompts)
        self.device = FaultyDevice(self.ledger, self.rng)
        self.device.rate, self.device.kinds = self.faults
        config = EngineConfig(
            policy="slack" if setting.policy == ANY_PLAN else setting.policy,
            block_tokens=setting.block_tokens,
            max_requests=setting.max_requests,
            max_step_rows=setting.max_step_rows,
            max_adapters=setting.max_adapters,
        )
        latency = LatencyModel(profile(setting.expected_hardware))
        self.engine = TokenEngine(self.device, latency, config, end_tokens=END_TOKENS)
        if setting.policy == ANY_PLAN:
            self.engine.policy = random_policy(self.rng.randrange(1 << 30))

    def start_again(self) -> None:
        """The engine is thrown away. Open answers end with an error; jobs are to resume from their
        checkpoints."""
        self.counts["engines thrown away"] += 1
        self.count_copies()
        self.hits.update(self.device.hits)
        self.num_actions += self.device.num_actions
        self.jumped_s += self.device.jumped_s
        for asked in self.asked.values():
            for index in range(asked.params.n):
                asked.ends.setdefault(index, "thrown away")
        self.lost = [job.id for job in self.jobs.values() if not job.is_finished]
        self.taken.clear()
        self.loads.clear()
        self.ended.clear()
        self.make_engine()

    def count_copies(self) -> None:
        """Of an engine that is over."""
        stats = self.engine.stats()
        self.counts["requests preempted"] += stats.num_preemptions
        self.counts["pages to the host"] += stats.num_swapped_out
        self.counts["packs from the host"] += self.ledger.num_packs_moved
        self.counts["pages moved aside"] += self.ledger.num_pages_moved
        self.counts["optimizers placed"] += self.ledger.num_optimizers_placed
        self.counts["optimizers from the host"] += self.ledger.num_optimizers_back
        self.counts["adapters from the host"] += self.ledger.num_versions_back
        self.counts["pages from the host"] += stats.num_swapped_in

    def attempt(self, what: Callable[[], Any]) -> bool:
        """Do something of which the device may fail. Returns whether it was done."""
        try:
            what()
        except DeviceGoneError:
            self.start_again()
            return False
        except (
            CoserveError,
            KeyboardInterrupt,
            LostCommandError,
            StormError,
        ) as error:  # all else is as it was
            self.counts[f"ended with {type(error).__name__}"] += 1
            return False
        return True

    def set_faults(self, rate: float, kinds: Sequence[str] = ()) -> None:
        self.faults = self.device.rate, self.device.kinds = rate, tuple(kinds)

    @property
    def elapsed_s(self) -> float:
        """Of virtual time, without the jumps of the clock."""
        return self.clock.now() - self.jumped_s - self.device.jumped_s

    # -- what comes of it ---------------------------------------------------------------

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Chunk):
                self._take_chunk(event)
            else:
                self._take_job_event(event)

    def _take_chunk(self, chunk: Chunk) -> None:
        asked = self.asked[chunk.request]
        assert chunk.index not in asked.ends, "nothing comes after the last chunk"
        asked.tokens.setdefault(chunk.index, []).extend(chunk.tokens)
        asked.num_scored += len(chunk.prompt_logprobs)
        self.counts["tokens"] += len(chunk.tokens)
        if chunk.finish_reason is not None:
            asked.ends[chunk.index] = chunk.finish_reason
            self.counts[f"requests: {chunk.finish_reason}"] += 1
            if chunk.finish_reason == "error":
                assert chunk.error is not None and "storm" in chunk.error, chunk.error

    def _take_job_event(self, event: JobEvent) -> None:
        job = self.jobs[event.job]
        assert not job.is_finished, f"nothing comes after the end: {event}"
        if event.kind == "step":
            assert event.step == job.step + 1, "each optimizer step is told once, in order"
            job.step = event.step
        elif event.kind in ("succeeded", "failed", "cancelled"):
            job.state = event.kind
            self.ended.append(job)
            self.counts[f"jobs: {event.kind}"] += 1
            if event.kind == "failed":
                assert "storm" in event.message or "KeyboardInterrupt" in event.message, (
                    event.message
                )


@cache
def backbone() -> Backbone:
    """Of a small model, two blocks: what a job costs is counted from all of them."""
    config = AutoConfig.for_model(**{**PRESETS["smollm2-135m"], "num_hidden_layers": 2})
    source = ModelSource(name="storm", config=config, directory=None)
    return build_backbone(source, dtype="bfloat16", device=torch.device("meta"))


@cache
def profile(hardware: str) -> Profile:
    return roofline_profile(backbone(), _HARDWARE[hardware])


def calm_policy(world: World) -> None:
    """One that serves everybody, so that everything comes to its end."""
    world.engine.policy = make_policy("slack")
