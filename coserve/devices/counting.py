"""Costs of rows, counted from the graphs: the same numbers on every device."""

from math import prod

import torch

from coserve.adapters.base import Adapter
from coserve.devices.fingerprint import fingerprint
from coserve.devices.messages.commands import DeviceInfo
from coserve.devices.messages.jobs import OtherModel, TensorBytes, TrainerOpened
from coserve.graph.operators.base import Load
from coserve.kernels import why_slow
from coserve.kernels.gated_delta import CHUNK_ROWS
from coserve.memory.tensors.paged_kv import kv_page_bytes, whole_page_bytes
from coserve.memory.tensors.paged_states import num_state_pages
from coserve.memory.tensors.weight_window import WeightWindow
from coserve.models.backbone import Backbone
from coserve.models.weights import weight_tensors
from coserve.scheduling.counts import JobCounts, ModelCounts
from coserve.scheduling.profile import Profile
from coserve.tuning.layerwise import num_loss_turns
from coserve.tuning.optimizer import NUM_MOMENTS
from coserve.tuning.pack_states import NUM_FIXED, NUM_PLACES, STATES
from coserve.tuning.pass_memory import saved_shapes, workspace_shapes
from coserve.tuning.programs import TrainingPrograms


def model_counts(backbone: Backbone) -> ModelCounts:
    """Count the bare model."""
    local = backbone.local

    def flops(rows: int, keys: float) -> float:
        load = Load(rows=rows, mean_context_len=keys, compute_dtype=backbone.dtype)
        return sum(local.graphs[part].cost(load).flops for part in local.parts[:-1])

    return ModelCounts(
        flops_per_row=flops(1, 0),
        flops_per_pair=(flops(1, 1000) - flops(1, 0)) / 1000,
        head_flops_per_row=local.graphs["head"]
        .cost(Load(rows=1, mean_context_len=0, compute_dtype=backbone.dtype))
        .flops,
        kv_bytes_per_key=len(local.kv_layers) * sum(local.kv_widths) * backbone.dtype.itemsize,
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
        num_bypasses=len(adapter.layout.places),
        num_parameters=adapter.num_parameters,
        runs_at_once=adapter.bypasses(training=True).low_rank is not None,
    )


def layerwise_counts(adapter: Adapter, programs: TrainingPrograms) -> JobCounts:
    """Count the training of an adapter whose packs run part by part, forward, through the loss and
    backward.
    """
    backbone = adapter.backbone
    forward = list(programs.program.values())
    backward = [programs.program[part] for part in programs.parts]

    def flops(keys: float) -> float:
        load = Load(rows=1, mean_context_len=keys, compute_dtype=backbone.dtype)
        costs = [program.forward_cost(load) for program in (*forward, programs.loss)]
        costs += [program.backward_cost(load) for program in (*backward, programs.loss)]
        return sum(cost.flops for cost in costs)

    num_turns = len(forward) + num_loss_turns(adapter, programs) + len(backward)
    return JobCounts(
        flops_per_row=flops(0),
        backward_flops_per_row=flops(0) / num_turns,
        backward_flops_per_pair=(flops(1000) - flops(0)) / 1000 / num_turns,
        num_parts=num_turns,
        num_bypasses=len(adapter.layout.places),
        num_parameters=adapter.num_parameters,
        model=backbone.name,
    )


def trainer_opened(
    adapter: Adapter,
    programs: TrainingPrograms,
    evaluation: TrainingPrograms,
    window: WeightWindow | None = None,
) -> TrainerOpened:
    """Return what a job costs.

    Args:
        adapter: The adapter.
        programs: The programs that train it.
        evaluation: The programs that measure the loss alone.
        window: Window that the weights of its model pass through, if that is not the one on the
            device.
    """
    architecture, other = adapter.backbone.architecture, None
    if window is not None:
        other = OtherModel(
            vocab_size=architecture.vocab_size,
            max_positions=adapter.backbone.max_positions,
            forward_turns=len(adapter.backbone.local.parts) - 1,
            loss_turns=num_loss_turns(adapter, programs),
            evaluation_loss_turns=num_loss_turns(adapter, evaluation),
            least_bytes=window.least_bytes,
            all_bytes=window.all_bytes,
        )
    return TrainerOpened(
        counts=job_counts(adapter, programs)
        if other is None
        else layerwise_counts(adapter, programs),
        training=_groups(adapter.backbone, programs),
        evaluation=_groups(adapter.backbone, evaluation),
        trained_parts=len(programs.parts),
        version_bytes=0 if adapter.config.is_model else adapter.num_bytes,
        optimizer_bytes=NUM_MOMENTS * adapter.num_bytes,
        num_virtual_tokens=adapter.config.num_virtual_tokens,
        changes_model=adapter.config.is_model,
        vocab_size=adapter.vocab_size,
        other=other,
    )


def device_info(
    backbone: Backbone,
    *,
    num_pages: int,
    block_tokens: int,
    threads: int,
    profile: Profile,
    profile_path: str = "",
    num_units: int = 1,
    num_host_pages: int = 0,
    is_provisional: bool = False,
) -> DeviceInfo:
    """Return the description of a model on a device with a page pool."""
    page_bytes = kv_page_bytes(backbone, block_tokens)
    weights = {
        id(tensor): tensor for held in backbone.weights.values() for tensor in weight_tensors(held)
    }
    return DeviceInfo(
        model=backbone.name,
        dtype=str(backbone.dtype).removeprefix("torch."),
        weights=backbone.weight_format,
        device=str(backbone.device),
        threads=threads,
        vocab_size=backbone.architecture.vocab_size,
        max_positions=backbone.max_positions,
        num_layers=backbone.architecture.num_layers,
        weight_bytes=sum(tensor.nbytes for tensor in weights.values()),
        num_pages=num_pages,
        page_bytes=page_bytes,
        whole_page_bytes=whole_page_bytes(backbone, block_tokens),
        block_tokens=block_tokens,
        profile=profile,
        profile_path=profile_path,
        deterministic=backbone.block_rows is not None,
        num_units=num_units,
        num_host_pages=num_host_pages,
        num_state_pages=num_state_pages(backbone.local, page_bytes),
        fingerprint=fingerprint(backbone),
        kernels=backbone.backend.identity,
        kernels_warning=why_slow(backbone.backend),
        num_ranks=backbone.group.size,
        is_provisional=is_provisional,
    )


def _groups(backbone: Backbone, programs: TrainingPrograms) -> tuple[tuple[TensorBytes, ...], ...]:
    """Return the bytes of each tensor, by the groups in which a pass takes them."""
    parts = backbone.local.parts[:-1]
    groups = [
        workspace_shapes(programs, backbone, 1),
        *(saved_shapes(programs, backbone, part, 1) for part in parts),
    ]
    return tuple(
        tuple(_tensor_bytes(name, *each) for name, each in shapes.items()) for shapes in groups
    )


def _tensor_bytes(name: str, shape: tuple[int, ...], kind: torch.dtype) -> TensorBytes:
    """Return the bytes of a tensor, from its shape for a pack of one row."""
    if name != STATES:
        return TensorBytes(prod(shape) * kind.itemsize)
    num_places, state_bytes = shape[0], shape[1] * kind.itemsize
    if num_places == NUM_PLACES:
        return TensorBytes(0, fixed=num_places * state_bytes)
    return TensorBytes(0, chunk=state_bytes, chunk_rows=CHUNK_ROWS, fixed=NUM_FIXED * state_bytes)
