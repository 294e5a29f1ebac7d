"""Steps of a model whose blocks may run as one call, for tests."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from support import CONFIGS, random_tokens, random_weights_
from transformers import AutoConfig, AutoModelForCausalLM

from coserve.kernels.cpu import CpuBackend
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models import Backbone, forward, load_backbone
from coserve.models.bypasses import Bypasses

BLOCK = 4
# Whole tiles, of bfloat16 and of int8, where there is AMX.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@cache
def wide_directory(name: str, head_dim: int = 16) -> Path:
    config = AutoConfig.for_model(**{**CONFIGS[name], **WIDE, "head_dim": head_dim})
    directory = Path(mkdtemp(prefix="coserve-wide-"))
    # What bfloat16 can hold, so that a model in float32 says what is exact.
    model: Any = random_weights_(AutoModelForCausalLM.from_config(config)).bfloat16().float()
    model.save_pretrained(directory)
    return directory


def backbone_of(name: str, dtype: str, weights: str, head_dim: int = 16) -> Backbone:
    return load_backbone(str(wide_directory(name, head_dim)), dtype=dtype, weights=weights)


class Steps:
    """Sequences in pages, and steps in which each of them decodes, or has a piece of its prompt."""

    def __init__(self, backbone: Backbone, lengths: Sequence[int] = (5, 1, 7, 12, 3)) -> None:
        self.pages = PagedKv(backbone, num_pages=10 * len(lengths), block_tokens=BLOCK)
        self.pages.pages.fill_(torch.nan)
        self.lengths = list(lengths)
        self.pages.may_run_at_once = False
        for index, length in enumerate(lengths):
            forward(
                backbone,
                [self.pages.rows([(self.table(index), 0, random_tokens(length, index).tolist())])],
            )
        self.pages.may_run_at_once = True

    def table(self, index: int) -> list[int]:
        return [10 * index + page for page in (3, 0, 7, 1, 9, 2)]

    def step(
        self,
        bypasses: Sequence[Bypasses | None] | None = None,
        which: Sequence[int] | None = None,
        counts: Mapping[int, int] | None = None,
    ) -> torch.Tensor:
        """The next row of each, or of some; of those of `counts` as many, as a piece of a
        prompt."""
        which = range(len(self.lengths)) if which is None else which
        spans = []
        for index in which:
            own, start, number = (
                None if bypasses is None else bypasses[index],
                self.lengths[index],
                1,
            )
            if counts is not None:
                number = counts.get(index, 1)
            tokens = [(7 * position + index) % 90 for position in range(start, start + number)]
            spans.append(self.pages.rows([(self.table(index), start, tokens)], own))
            self.lengths[index] += number
        return forward(self.pages.backbone, spans)

    @property
    def num_traces(self) -> int:
        return sum(calls is not None for calls in self.pages.stores.traces.values())


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "trace", lambda self, dtype, run: None)
