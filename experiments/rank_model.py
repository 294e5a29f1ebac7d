"""Steps of several ranks on this machine, beside their modelled times.

    python -m experiments.rank_model [--model dummy:qwen2.5-0.5b] [--ranks 2] [--requests 1 8]
    [--rows 512]

Every rank is a process, bound to a core of its own and with one thread; there must be as many idle
cores. In turns the processes each run the whole model, all at once so that they share the memory's
bandwidth, and run it together. From the first, and from sums over the arena, follows the modelled
time of the second: by the share of a rank's graphs in those of the whole model, and by the sums.
The fastest turns count. Prints a line for each kind of step, the machine's load, and one line of
JSON.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from coserve.adapters import Adapter, LoraConfig
from coserve.bench.places import num_parameters
from coserve.kernels.groups.base import RankGroup
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models import Backbone, forward, load_backbone, logits
from coserve.models.dividing import divided_backbone
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.links import Link, SumTimes
from coserve.simulate.modelled_ranks import on_ranks
from coserve.simulate.roofline import roofline_profile
from coserve.tuning import TrainingPass, run_alone, training_programs
from coserve.tuning.examples import Example
from coserve.tuning.pack import pack_of
from experiments.rank_sums import on_ranks as run_on_ranks
from experiments.rank_sums import times_us, transports
from experiments.results import add_save_option, print_result

_BLOCK_TOKENS = 16
_LORA = LoraConfig(r=16, alpha=32, target_modules="all-linear")
_SUM_ROWS = (1, 8, 64, 512)
# What a call takes at least; only the rest of a step is divided.
_CALL_S = 2e-6
_FREE = Link(name="free", times=(SumTimes(num_devices=2, us=((1, 1e-9), (1 << 40, 1e-9))),))


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps that are measured or modelled."""

    model: str
    """Name of the model."""
    num_requests: tuple[int, ...]
    """Numbers of requests that decode at once, each a kind of step."""
    context: int
    """Tokens that each request has in the cache."""
    rows: int
    """Tokens of the sequence of a training step."""
    num_turns: int
    """Number of turns."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of each kind of step, turn by turn, by its name; and microseconds of sums."""

    alone_s: Mapping[str, Sequence[float]]
    """The whole model in each process."""
    together_s: Mapping[str, Sequence[float]]
    """The model divided among the processes."""
    sums_us: tuple[tuple[int, float], ...]
    """Bytes of a sum over the ranks, and what it takes."""
    link_flops_per_byte: float
    """FLOPs that a rank computes while a gather moves a byte: by this, ranks chose what they save
    in pieces."""


def decoding(backbone: Backbone, num_requests: int, context: int) -> Callable[[], None]:
    """Return a step in which requests decode, each with as many tokens in the cache."""
    each = -(-(context + 1) // _BLOCK_TOKENS)
    pages = PagedKv(backbone, num_pages=num_requests * each, block_tokens=_BLOCK_TOKENS)
    tables = [list(range(index * each, (index + 1) * each)) for index in range(num_requests)]
    prompt = [3 + index % 50 for index in range(context)]
    for table in tables:
        forward(backbone, [pages.rows([(table, 0, prompt)])])

    def step() -> None:
        rows = forward(backbone, [pages.rows([(table, context, [5]) for table in tables])])
        logits(backbone, rows).argmax(-1)

    return step


def training(backbone: Backbone, num_rows: int) -> Callable[[], None]:
    """Return a step that trains on a sequence, forward and backward."""
    adapter = Adapter(backbone, _LORA)
    programs = training_programs(adapter, link_flops_per_byte=backbone.link_flops_per_byte)
    tokens = tuple(3 + index % 50 for index in range(num_rows))
    example = Example(tokens=tokens, trained=(True,) * num_rows)

    def step() -> None:
        pack = TrainingPass(adapter, programs, pack_of([example]))
        run_alone(pack, forward_rows=num_rows, backward_rows=num_rows)

    return step


def steps_of(backbone: Backbone, asked: Steps) -> dict[str, Callable[[], None]]:
    """Return every kind of step by its name."""
    times = {
        f"decode {number}": decoding(backbone, number, asked.context)
        for number in asked.num_requests
    }
    return {**times, f"train {asked.rows}": training(backbone, asked.rows)}


def measure(asked: Steps, group: RankGroup) -> Times:
    """Time the steps on one rank, in turns with all others."""
    whole = load_backbone(asked.model, dtype="bfloat16")
    divided = divided_backbone(whole, group)
    alone, together = steps_of(whole, asked), steps_of(divided, asked)
    sides: tuple[dict[str, list[float]], ...] = (
        {name: [] for name in alone},
        {name: [] for name in alone},
    )
    for turn in range(asked.num_turns + 1):
        for name in alone:
            for side, steps in zip(sides, (alone, together), strict=True):
                group.barrier()
                start_s = time.perf_counter()
                steps[name]()
                if turn:  # the first one warms up
                    side[name].append(time.perf_counter() - start_s)
    width = whole.architecture.hidden_size
    sums = [(2 * rows * width, min(times_us(group, rows, width))) for rows in _SUM_ROWS]
    return Times(
        alone_s=sides[0],
        together_s=sides[1],
        sums_us=tuple(sums),
        link_flops_per_byte=divided.link_flops_per_byte,
    )


class Model:
    """Times of steps on modelled hardware, of one process or of several ranks, whose programs are
    always the same.
    """

    def __init__(self, asked: Steps, num_ranks: int, link_flops_per_byte: float) -> None:
        self._link_flops_per_byte = link_flops_per_byte
        whole = load_backbone(asked.model, dtype="bfloat16", device=torch.device("meta"))
        self._asked, self._whole, self._rank = asked, whole, on_ranks(whole, num_ranks)

    def seconds(self, name: str, hardware: Hardware, *, divided: bool) -> float:
        """Return what a kind of step takes."""
        backbone = self._rank if divided else self._whole
        profile = roofline_profile(
            backbone, hardware, link_flops_per_byte=self._link_flops_per_byte
        )
        kind, number = name.split()
        return (
            self._decode_s(profile, int(number))
            if kind == "decode"
            else self._train_s(profile, int(number))
        )

    def hardware(self, alone_s: Mapping[str, float]) -> Hardware:
        """Return hardware with the paces at which one process read the weights and trained."""
        free = Hardware(name="here", flops_per_s=1.0, bytes_per_s=1.0, call_s=_CALL_S, link=_FREE)
        profile, rows = roofline_profile(self._whole, free), self._asked.rows
        pairs, model, job = rows * (rows + 1) / 2, profile.model, profile.job
        flops = rows * (model.flops_per_row + job.flops_per_row + 2 * model.head_flops_per_row)
        flops += pairs * model.flops_per_pair
        flops += job.num_parts * (
            rows * job.backward_flops_per_row + pairs * job.backward_flops_per_pair
        )
        few, train = f"decode {min(self._asked.num_requests)}", f"train {rows}"
        num_bytes = self._whole.dtype.itemsize * num_parameters(self._whole)
        return replace(
            free, flops_per_s=flops / alone_s[train], bytes_per_s=num_bytes / alone_s[few]
        )

    def _decode_s(self, profile: Profile, number: int) -> float:
        keys = number * self._asked.context
        return profile.forward.at(number) + profile.head.at(number) + keys * profile.s_per_key

    def _train_s(self, profile: Profile, rows: int) -> float:
        pairs, blocks = rows * (rows + 1) / 2, profile.job.num_parts
        forward_s = (
            profile.forward.at(rows) + rows * profile.s_per_window_row + pairs * profile.s_per_pair
        )
        backward_s = blocks * (profile.backward.at(rows) + pairs * profile.backward_s_per_pair)
        return forward_s + profile.loss.at(rows - 1) + backward_s


def compared(asked: Steps, num_ranks: int, times: Times) -> list[dict[str, Any]]:
    """Return, for each kind of step, what it took and what it was modelled to take."""
    alone_s = {name: min(each) for name, each in times.alone_s.items()}
    model = Model(asked, num_ranks, times.link_flops_per_byte)
    hardware = model.hardware(alone_s)
    link = Link(name="arena", times=(SumTimes(num_devices=num_ranks, us=times.sums_us),))
    rows = []
    for name, whole_s in alone_s.items():
        free_s, with_sums_s = (
            model.seconds(name, replace(hardware, link=each), divided=True)
            for each in (_FREE, link)
        )
        share = free_s / model.seconds(name, hardware, divided=False)
        modelled_s, took_s = whole_s * share + with_sums_s - free_s, min(times.together_s[name])
        rows.append(
            {
                "step": name,
                "whole_ms": round(1e3 * whole_s, 3),
                "share": round(share, 4),
                "sums_ms": round(1e3 * (with_sums_s - free_s), 3),
                "modelled_ms": round(1e3 * modelled_s, 3),
                "measured_ms": round(1e3 * took_s, 3),
                "error": round(modelled_s / took_s - 1, 4),
            }
        )
    return rows


def main() -> None:
    """Measure, model and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:qwen2.5-0.5b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--turns", type=int, default=9)
    add_save_option(parser)
    options = parser.parse_args()
    asked = Steps(
        model=options.model,
        num_requests=tuple(options.requests),
        context=options.context,
        rows=options.rows,
        num_turns=options.turns,
    )
    loads = [os.getloadavg()[0]]
    name, joins = next(iter(transports(options.ranks).items()))
    times = run_on_ranks(joins, partial(measure, asked))
    loads.append(os.getloadavg()[0])
    rows = compared(asked, options.ranks, times)
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print(
        f"sums over {name}: "
        + ", ".join(f"{us:.1f} us of {size:,} bytes" for size, us in times.sums_us)
    )
    print(f"load of the machine: {loads[0]:.1f} before, {loads[1]:.1f} after")
    print_result(
        "rank_model",
        {"ranks": options.ranks, "model": options.model, "load": loads, "rows": rows},
        options.save,
    )


if __name__ == "__main__":
    main()
