"""What rows cost, counted from the graphs: the same numbers on every device."""

from dataclasses import dataclass

from coserve.adapters.base import Adapter
from coserve.graph.operators.base import Load
from coserve.models.backbone import Backbone
from coserve.tuning.programs import TrainingPrograms


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """FLOPs of a row through all blocks (attention apart), of a pair of row and key in all blocks' attention, of a row
    through the head; bytes of K and V that a key brings.
    """

    flops_per_row: float
    flops_per_pair: float
    head_flops_per_row: float
    kv_bytes_per_key: int


@dataclass(frozen=True, kw_only=True)
class JobCounts:
    """What a job's rows cost.

    flops_per_row: forward, beyond the bare model's (its bypasses). backward_flops_per_row and
    backward_flops_per_pair: of one part, in the mean. num_parts: parts that have a backward pass. num_bypasses: bypass
    bypasses. num_parameters: what an optimizer step moves.
    """

    flops_per_row: float
    backward_flops_per_row: float
    backward_flops_per_pair: float
    num_parts: int
    num_bypasses: int
    num_parameters: int


def model_counts(backbone: Backbone) -> ModelCounts:
    """Count the bare model."""
    architecture = backbone.architecture

    def flops(rows: int, keys: float) -> float:
        load = Load(rows=rows, mean_context_len=keys, compute_dtype=backbone.dtype)
        return sum(architecture.graphs[part].cost(load).flops for part in architecture.parts[:-1])

    block = architecture.graphs[0]
    kv_bytes = sum(block.spec[name].num_bytes(backbone.dtype) for name in block.kv_tensors)
    return ModelCounts(
        flops_per_row=flops(1, 0),
        flops_per_pair=(flops(1, 1000) - flops(1, 0)) / 1000,
        head_flops_per_row=architecture.graphs["head"]
        .cost(Load(rows=1, mean_context_len=0, compute_dtype=backbone.dtype))
        .flops,
        kv_bytes_per_key=architecture.num_layers * kv_bytes,
    )


def job_counts(adapter: Adapter, programs: TrainingPrograms) -> JobCounts:
    """Count the training of an adapter."""
    backbone = adapter.backbone

    def load(keys: float) -> Load:
        return Load(rows=1, mean_context_len=keys, compute_dtype=backbone.dtype)

    forward = sum(program.forward_cost(load(0)).flops for program in programs.program.values())
    backward = [programs.program[part].backward_cost(load(0)).flops for part in programs.parts]
    with_keys = [programs.program[part].backward_cost(load(1000)).flops for part in programs.parts]
    num_parts = max(1, len(programs.parts))
    return JobCounts(
        flops_per_row=forward - model_counts(backbone).flops_per_row,
        backward_flops_per_row=sum(backward) / num_parts,
        backward_flops_per_pair=(sum(with_keys) - sum(backward)) / 1000 / num_parts,
        num_parts=len(programs.parts),
        num_bypasses=len(adapter.sites),
        num_parameters=adapter.num_parameters,
    )
