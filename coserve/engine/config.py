"""How an engine is set up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coserve.scheduling.policies import DEFAULT_POLICY, make_policy
from coserve.settings import check_whole, is_number

# Beside a far larger weight the share of a tenant would be 0 in floating point, and plans divide by
# shares.
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """ValueError when created names the field and its range.

    policy, policy_settings: see `coserve.scheduling.policies`; settings by name, as values or as
    text. ttft_s: SLO of requests that bring none, seconds to the first token. tpot_s: likewise,
    mean seconds between later tokens; None: what `coserve.scheduling.slo` makes of a decode step
    alone on this device. memory_bytes: of the page pool, for keys and values and fine-tuning's
    activations; None: a share of what is free. host_memory_bytes: for keys and values of preempted
    requests and packs that gave way, which come back from there where that is quicker than
    computing them again; for the optimizers of paused jobs, and for adapters that no request reads;
    0: none. block_tokens: tokens of a page. max_requests: sequences that run at once.
    max_step_rows: rows of a forward pass. max_adapters: how many of those that lie on disk stay on
    the device; with host memory, how many of all, as far as there is room for the others.
    deterministic: answers and adapters are the same bit for bit, whatever runs beside them; steps
    take longer (docs/engine.md). trainable_models: directories or hub ids of models that jobs may
    train beside the one that serves, by the names that jobs give. tenant_weights: the parts of the
    device that tenants have beside one another, of those whose part is not 1. share_prefixes:
    whether all tenants share what is known of prompts' beginnings; otherwise each has its own, but
    for those that are public. weight_window_bytes: of the page pool, that the weights of trainable
    models may take at once; None: all that requests and packs leave.
    """

    policy: str = DEFAULT_POLICY
    policy_settings: Mapping[str, Any] = field(default_factory=dict)
    ttft_s: float = 2.0
    tpot_s: float | None = None
    memory_bytes: int | None = None
    host_memory_bytes: int = 0
    block_tokens: int = 16
    max_requests: int = 256
    max_step_rows: int = 2048
    max_adapters: int = 64
    deterministic: bool = False
    trainable_models: Mapping[str, str] = field(default_factory=dict)
    weight_window_bytes: int | None = None
    tensor_parallel: int = 1
    """Number of ranks: processes that hold the model together, each on a device of its own
    (docs/parallel.md).

    `memory_bytes` and `host_memory_bytes` are then those of each rank.
    """
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        make_policy(self.policy, self.policy_settings)
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if (value is not None or name == "ttft_s") and (not is_number(value) or value <= 0):
                raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")
        numbers = (
            "memory_bytes",
            "block_tokens",
            "max_requests",
            "max_step_rows",
            "max_adapters",
            "tensor_parallel",
        )
        for name in numbers:
            value = getattr(self, name)
            if value is None and name == "memory_bytes":
                continue
            check_whole(name, value, 1)
        check_whole("host_memory_bytes", self.host_memory_bytes, 0)
        if self.weight_window_bytes is not None:
            check_whole("weight_window_bytes", self.weight_window_bytes, 1)
        for tenant, weight in self.tenant_weights.items():
            if not is_number(weight) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                wanted = f"tenant_weights must be numbers from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
                raise ValueError(f"{wanted}, not {weight!r} of {tenant!r}")
        if self.trainable_models and self.deterministic:
            raise ValueError(
                "trainable_models must be empty where deterministic is set: their sums depend on "
                "the plan"
            )
        if self.trainable_models and self.tensor_parallel > 1:
            raise ValueError(
                "trainable_models must be empty where tensor_parallel is above 1: ranks hold one "
                "model"
            )
