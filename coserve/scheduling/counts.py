"""What rows cost, as numbers; `coserve.devices.counting` counts them from the graphs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """FLOPs of a row through all blocks (attention apart), of a pair of row and key in all blocks'
    attention, of a row through the head; bytes of K and V that a key brings.
    """

    flops_per_row: float
    flops_per_pair: float
    head_flops_per_row: float
    kv_bytes_per_key: int


@dataclass(frozen=True, kw_only=True)
class JobCounts:
    """What a job's rows cost.

    flops_per_row: forward, beyond the bare model's (its bypasses). backward_flops_per_row and
    backward_flops_per_pair: of one part, in the mean. num_parts: parts that have a backward pass.
    num_bypasses: sites of its adapter. num_parameters: what an optimizer step moves. model: that it
    trains, if that is not the one that serves; then all that its packs run are tasklets, and the
    means are over these. runs_at_once: whether its windows may run in one call with requests
    (`coserve.models.traced`).
    """

    flops_per_row: float
    backward_flops_per_row: float
    backward_flops_per_pair: float
    num_parts: int
    num_bypasses: int
    num_parameters: int
    model: str = ""
    runs_at_once: bool = True

    def __hash__(self) -> int:
        """Of one number: a plan looks up by these counts some dozen times."""
        return hash(self.flops_per_row)
