"""Costs of rows as numbers; `coserve.devices.counting` counts them from the graphs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """Costs of a model's rows."""

    flops_per_row: float
    """FLOPs of a row through all blocks, without attention."""
    flops_per_pair: float
    """FLOPs of a pair of row and key in all blocks' attention."""
    head_flops_per_row: float
    """FLOPs of a row through the head."""
    kv_bytes_per_key: int
    """Bytes of K and V per token."""


@dataclass(frozen=True, kw_only=True)
class JobCounts:
    """Costs of a job's rows."""

    flops_per_row: float
    """Forward FLOPs beyond the bare model's, for its bypasses."""
    backward_flops_per_row: float
    """Backward FLOPs of a row in one part, averaged over the parts."""
    backward_flops_per_pair: float
    """Backward FLOPs of a pair of row and key in one part, averaged over the parts."""
    num_parts: int
    """Parts that have a backward pass."""
    num_bypasses: int
    """Sites of its adapter."""
    num_parameters: int
    """Parameters that an optimizer step moves."""
    model: str = ""
    """Model that it trains; empty for the one that serves. Packs of another model run tasklets
    alone, and the averages are over these.
    """
    runs_at_once: bool = True
    """Whether its windows may run in one call with requests (`coserve.models.traced`)."""

    def __hash__(self) -> int:
        """Return the hash of one number: a plan looks up by these counts some dozen times."""
        return hash(self.flops_per_row)
