"""Programs of an adapter's training: one per part of the model, from the lowest part that has
parameters up to the loss.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from coserve.adapters.base import Adapter
from coserve.graph.division import UNDIVIDED, Division, dividable
from coserve.graph.fuse import fuse_loss
from coserve.graph.ir import Graph, GraphBuilder
from coserve.graph.program import Program, backward_graph, compile_program
from coserve.graph.rematerialize import Retention, Weighing, frontier
from coserve.kernels.gated_delta import CHUNK_ROWS
from coserve.models.base import Part


@lru_cache(maxsize=256)
def _one_of(program: Program) -> Program:
    """Return one object for equal programs, whatever they were compiled for: passes of one program
    run backward as one.
    """
    return program


@lru_cache(maxsize=256)
def _compile(graph: Graph, asked: tuple[str, ...], by: Weighing, **settings: Any) -> Program:
    return _one_of(compile_program(graph, asked, by, **settings))


@dataclass(frozen=True, kw_only=True)
class TrainingPrograms:
    """The programs of a pass; immutable."""

    program: dict[Part, Program]
    """Program of each part but the head."""
    loss: Program
    """Program of the head with the loss."""
    parts: tuple[Part, ...]
    """Parts that run backward, in this order: blocks from the last down, then the embedding if it
    is trained.
    """

    def saved_bytes_per_token(self, compute_dtype: torch.dtype) -> int:
        """Return the bytes that all blocks together keep of one row between forward and
        backward.
        """
        return sum(
            program.saved_bytes_per_token(compute_dtype) for program in self.program.values()
        )

    def kept_bytes_per_token(self, compute_dtype: torch.dtype) -> int:
        """Return the same with the states (float32) that blocks keep at every `CHUNK_ROWS`-th of
        many rows, per row.
        """
        states = sum(self.program[part].graph.state_size for part in self.parts)
        return self.saved_bytes_per_token(compute_dtype) + 4 * states // CHUNK_ROWS


def training_programs(
    adapter: Adapter,
    *,
    budget_bytes_per_token: int | None = None,
    max_recompute: float = 0.0,
    mean_context_len: float = 512.0,
    link_flops_per_byte: float | None = 0.0,
    fused: Collection[str] | None = None,
) -> TrainingPrograms:
    """Compile the parts of an adapter's model; equal blocks share one program.

    Args:
        budget_bytes_per_token: Maximum number of bytes that a block keeps of one row (see
            `compile_program`).
        max_recompute: Maximum FLOPs for keeping less.
        mean_context_len: Mean number of keys that a row attends to (`Pack.mean_context_len`), for
            choosing what to recompute.
        link_flops_per_byte: FLOPs that a rank computes while a gather moves a byte
            (`Division.flops_per_byte`), for choosing what ranks keep in pieces. With 0 a link costs
            nothing; with None nothing is kept in pieces.
        fused: Fused operators that the backward pass may use (`graph.fuse`); None for those of the
            adapter's backend.

    Raises:
        BudgetError: No block can do with so little.
    """
    backbone = adapter.backbone
    parts = backbone.local.parts
    # The lowest part with parameters: below it nothing runs backward.
    lowest = min(
        (index for index, part in enumerate(parts) if adapter.parameters(part)), default=len(parts)
    )
    programs: dict[Part, Program] = {}
    by = Weighing(compute_dtype=backbone.dtype, mean_context_len=mean_context_len)
    fused = frozenset(backbone.backend.fused if fused is None else fused)
    for index, part in enumerate(parts[:-1]):
        graph = adapter.attached(part).graph
        # No part below the lowest trained one needs the gradient of its output.
        asked = tuple(adapter.parameters(part)) + (("x",) if index > lowest else ())
        is_trained_block = isinstance(part, int) and index >= lowest
        programs[part] = _compile(
            graph,
            asked if index >= lowest else (),
            replace(by, division=_division(adapter, part, link_flops_per_byte))
            if is_trained_block
            else by,
            budget_bytes_per_token=budget_bytes_per_token if is_trained_block else None,
            max_recompute=max_recompute if is_trained_block else 0.0,
            fused=fused,
        )
    asked = tuple(adapter.parameters("head")) + (("x",) if lowest < len(parts) - 1 else ())
    loss = _compile(with_loss(adapter.attached("head").graph), asked, by, of=("loss",), fused=fused)
    reversed_parts = tuple(
        part for index, part in reversed(list(enumerate(parts[:-1]))) if index >= lowest
    )
    return TrainingPrograms(program=programs, loss=loss, parts=reversed_parts)


def evaluation_programs(adapter: Adapter, *, mean_context_len: float = 512.0) -> TrainingPrograms:
    """Return the programs of a pass that only measures the loss: nothing runs backward, and only K
    and V are kept.
    """
    backbone = adapter.backbone
    by = Weighing(compute_dtype=backbone.dtype, mean_context_len=mean_context_len)
    programs = {
        part: _compile(adapter.attached(part, training=False).graph, (), by)
        for part in backbone.local.parts[:-1]
    }
    graph = with_loss(adapter.attached("head", training=False).graph)
    loss = _compile(graph, (), by, of=("loss",))
    return TrainingPrograms(program=programs, loss=loss, parts=())


def frontier_of_part(
    programs: TrainingPrograms, adapter: Adapter, part: Part, *, mean_context_len: float
) -> tuple[Retention, ...]:
    """Return the sets of tensors that a trained part can keep, from everything that its backward
    pass reads to the least.
    """
    program = programs.program[part]
    backward = backward_graph(adapter.attached(part).graph, program.asked)
    by = Weighing(
        compute_dtype=adapter.backbone.dtype,
        mean_context_len=mean_context_len,
        division=program.retention.division,
    )
    return frontier(backward, by)


def _division(adapter: Adapter, part: Part, link_flops_per_byte: float | None) -> Division:
    """Return what the ranks of an adapter's model may keep in pieces in a block."""
    local = adapter.backbone.local
    if not local.divided or link_flops_per_byte is None:
        return UNDIVIDED
    of_part = adapter.graphs.divided.get(part) or local.divided[part]
    tensors = dividable(adapter.attached(part).graph, of_part.states, local.ranks.size)
    return Division(size=local.ranks.size, tensors=tensors, flops_per_byte=link_flops_per_byte)


def with_loss(head: Graph) -> Graph:
    """Return the head's graph with the next-token loss of each row after its logits.

    Its outputs are "loss" and "loss.correct".
    """
    b = GraphBuilder(*head.tensors, nodes=head.nodes)
    targets = b.constant("targets", dtype=torch.int64)
    loss = b.apply("cross_entropy", "loss", {"logits": head.outputs[0], "targets": targets})
    return fuse_loss(b.build(loss, f"{loss}.correct"))
