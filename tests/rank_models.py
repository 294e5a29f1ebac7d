"""Functions that the processes of a group of ranks run with a model in tests."""

import itertools
import os
import signal
from typing import Any

import torch
from support import random_sequences
from torch import Tensor

from coserve.adapters import Adapter, LoraConfig, save_adapter
from coserve.kernels.groups.base import RankGroup
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models import forward, load_backbone, logits
from coserve.models.dividing import divided_backbone
from coserve.tuning import TrainingPass, make_pack, training_programs

_CONFIG = LoraConfig(r=4, target_modules="all-linear")
_TABLES = [[3, 0, 7, 1], [4, 2, 5, 6]]
_PROMPTS = [list(range(3, 9)), list(range(20, 25))]


def decode(
    group: RankGroup, directory: str, dtype: str, kernels: str | None = None
) -> tuple[Tensor, Tensor, int]:
    """Return the logits of prompts and of tokens after them, from blocks that run as one call where
    they can; the same from blocks that run one by one; and the number of traces.
    """
    backbone = load_backbone(directory, dtype=dtype, kernels=kernels)
    found, num_traces = list[Tensor](), 0
    if group.size > 1:
        backbone = divided_backbone(backbone, group)
    for may_run_at_once in (True, False):
        pages = PagedKv(backbone, num_pages=8, block_tokens=4)
        pages.may_run_at_once = may_run_at_once
        prompts = [(table, 0, tokens) for table, tokens in zip(_TABLES, _PROMPTS, strict=True)]
        rows = [forward(backbone, [pages.rows(prompts)])]
        for step in range(3):
            tokens = [(table, len(given) + step, [5 + step]) for table, _, given in prompts]
            rows.append(forward(backbone, [pages.rows(tokens)]))
        found.append(logits(backbone, torch.cat(rows)))
        num_traces += sum(calls is not None for calls in pages.stores.traces.values())
    return found[0], found[1], num_traces


def save_adapter_of_ranks(
    group: RankGroup, directory: str, target: str, dies_after: int | None
) -> None:
    """Write a rank's pieces of an adapter. dies_after: the number of pieces after which rank 1 is
    killed, if it is."""
    backbone = divided_backbone(load_backbone(directory, dtype="float32"), group)
    adapter = Adapter(backbone, LoraConfig(r=4, target_modules="all-linear"), seed=3)
    if group.rank == 1 and dies_after is not None:
        pwrite, numbers = os.pwrite, itertools.count()

        def mortal(*arguments: Any) -> int:
            if next(numbers) == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return pwrite(*arguments)

        os.pwrite = mortal
    save_adapter(adapter, target)


def keep_windows(
    group: RankGroup, directory: str, dtype: str
) -> tuple[list[dict[str, Tensor]], list[Tensor], int]:
    """Return what a pack's windows beside a request keep, from steps that are one call and from
    steps that are not; the gradients of one parameter after each; and the number of traces for
    windows.
    """
    backbone = divided_backbone(load_backbone(directory, dtype=dtype), group)
    adapter, found, gradients, num_traces = (
        Adapter(backbone, _CONFIG),
        list[dict[str, Tensor]](),
        list[Tensor](),
        0,
    )
    programs = training_programs(adapter)
    for may_run_at_once in (True, False):
        pages = PagedKv(backbone, num_pages=8, block_tokens=4)
        pages.may_run_at_once = may_run_at_once
        forward(backbone, [pages.rows([(_TABLES[0], 0, _PROMPTS[0])])])
        training = TrainingPass(adapter, programs, make_pack(random_sequences((7, 4))))
        for step in range(3):
            request = pages.rows([(_TABLES[0], len(_PROMPTS[0]) + step, [5 + step])])
            window = training.next_window(5)
            rows = forward(backbone, [request, window])
            training.finish_window(rows[1:])
        num_traces += sum(
            what.has_windows and calls is not None for what, calls in pages.stores.traces.items()
        )
        kept = training.kept.saved.items()
        found.append(
            {f"{part}.{name}": rows.clone() for part, saved in kept for name, rows in saved.items()}
        )
        training.run_loss(100)
        while not training.done:
            training.run_tasklet(4)
        gradients.append(training.gradients["model.layers.0.self_attn.q_proj.lora_B.weight"])
    return found, gradients, num_traces


def link_pace(group: RankGroup, directory: str) -> float:
    """Return what the ranks measure of their link."""
    return divided_backbone(load_backbone(directory, dtype="bfloat16"), group).link_flops_per_byte
