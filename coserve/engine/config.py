"""Configuration of an engine: policy, memory, limits and default SLO."""

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
    """Options of an engine.

    Raises:
        ValueError: when created; the message names the field and its range.
    """

    policy: str = DEFAULT_POLICY
    """Name of the scheduling policy (see `coserve.scheduling.policies`)."""
    policy_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the policy by name, as values or as text."""
    ttft_s: float = 2.0
    """Default time to first token, in seconds, for requests without an SLO."""
    tpot_s: float | None = None
    """Default mean time between later tokens, in seconds; None: a multiple of what a decode step
    takes alone on the device (`default_tpot_s`).
    """
    memory_bytes: int | None = None
    """Size of the page pool, for keys and values and for activations of fine-tuning; None: a share
    of the free memory. With several ranks, the size on each.
    """
    host_memory_bytes: int = 0
    """Size of the swap space in host memory; 0: none. It holds keys and values of preempted
    requests and packs of jobs, where copying them back is faster than recomputing them; optimizer
    states of paused jobs; and adapters that no request reads. With several ranks, the size for
    each.
    """
    block_tokens: int = 16
    """Number of tokens whose keys and values fit in a page."""
    max_requests: int = 256
    """Maximum number of sequences that run at once."""
    max_step_rows: int = 2048
    """Maximum number of rows in a forward pass."""
    max_adapters: int = 64
    """Maximum number of adapters on the device that can be loaded from disk again. With host
    memory, the maximum of all adapter versions, as far as the others fit there.
    """
    deterministic: bool = False
    """Whether answers and adapters are bitwise the same, whatever runs beside them; steps take
    longer (docs/engine.md).
    """
    trainable_models: Mapping[str, str] = field(default_factory=dict)
    """Models that jobs may train beside the one that serves: directories or hub ids, by the names
    that jobs use.
    """
    weight_window_bytes: int | None = None
    """Maximum part of the page pool, in bytes, that weights of trainable models take at once; None:
    all that requests and packs leave.
    """
    tensor_parallel: int = 1
    """Number of ranks: processes that hold the model together, each on a device of its own
    (docs/parallel.md).
    """
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights by which tenants share the device, of tenants whose weight is not 1."""
    share_prefixes: bool = False
    """Whether all tenants share cached prompt prefixes; otherwise each tenant has its own, except
    for public prefixes.
    """

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
