"""What rows cost, counted from the graphs: the same numbers on every device."""

from coserve.adapters.base import Adapter
from coserve.graph.operators.base import Load
from coserve.models.backbone import Backbone
from coserve.scheduling.counts import JobCounts, ModelCounts
from coserve.tuning.programs import TrainingPrograms


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
