"""Cost of the adapters of eight requests in the forward pass of a decode step.

    OMP_NUM_THREADS=1 python -m experiments.adapters [--kernels plain]

With one thread, times are those of the thread, so that other processes count little; with more,
wall-clock times. Prints a table, and one line of JSON. `experiments.many.decode_steps` measures
whole steps of an engine.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch

from coserve.adapters import Adapter, LoraConfig
from coserve.bench.machine import describe
from coserve.devices.torch.process_memory import keep_freed_memory
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models import Backbone, forward, load_backbone, logits
from coserve.models.bypasses import Bypasses
from experiments.results import add_save_option, print_result

NUM_REQUESTS, CONTEXT, BLOCK = 8, 64, 16
RANKS = (4, 8, 16, 32)
TARGETS: tuple[str | tuple[str, ...], ...] = (
    "all-linear",
    ("q_proj", "v_proj"),
    ("o_proj", "down_proj"),
)


def make(
    backbone: Backbone, index: int, rank: int, targets: str | tuple[str, ...] = "all-linear"
) -> Bypasses:
    """Return a random adapter."""
    adapter = Adapter(
        backbone, LoraConfig(r=rank, alpha=2 * rank, target_modules=targets), seed=index
    )
    generator = torch.Generator().manual_seed(index)
    for master in adapter.masters.values():
        master.copy_(torch.randn(master.shape, generator=generator).mul_(0.01))
    adapter.sync_compute_copy()
    return adapter.bypasses()


def sides_of(backbone: Backbone) -> dict[str, Sequence[Bypasses | None]]:
    """Return the adapters of the requests, by the name of the case."""
    each = range(NUM_REQUESTS)
    same = [make(backbone, i, 16) for i in each]
    return {
        "none": [None for _ in each],
        "one of rank 16": [same[0] for _ in each],
        "eight of rank 16": same,
        "eight of ranks 4 to 32": [make(backbone, i, RANKS[i % 4]) for i in each],
        "the same, on other targets": [
            make(backbone, i, RANKS[i % 4], TARGETS[i % 3]) for i in each
        ],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="dummy:smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernels")
    parser.add_argument("--turns", type=int, default=5)
    add_save_option(parser)
    options = parser.parse_args()
    keep_freed_memory()
    backbone = load_backbone(options.model, dtype=options.dtype, kernels=options.kernels)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    num_pages = CONTEXT // BLOCK + 1
    pages = PagedKv(backbone, num_pages=NUM_REQUESTS * num_pages, block_tokens=BLOCK)
    pages.storage.zero_()

    def step_s(users: Sequence[Bypasses | None]) -> float:
        start = clock()
        spans = [
            pages.rows([(range(i * num_pages, (i + 1) * num_pages), CONTEXT, [5 + i])], users[i])
            for i in range(NUM_REQUESTS)
        ]
        logits(backbone, forward(backbone, spans), [(1, bypasses) for bypasses in users])
        return clock() - start

    sides = sides_of(backbone)
    times: dict[str, list[float]] = {name: [] for name in sides}
    with torch.inference_mode():
        for turn in range(options.turns + 1):  # the first warms up
            for name, users in sides.items():
                times_s = [step_s(users) for _ in range(4)]
                times[name] += times_s if turn else []
    print(
        f"{describe(torch.device('cpu'))}, {options.model}, {options.dtype}, "
        f"{type(backbone.backend).__name__}"
    )
    middle = {name: 1e3 * median(each) for name, each in times.items()}
    for name, ms in middle.items():
        print(f"{name:28} {ms:7.1f} ms {ms / middle['none']:6.2f}")
    print_result(
        "adapters", {"step_ms": {name: round(ms, 2) for name, ms in middle.items()}}, options.save
    )


if __name__ == "__main__":
    main()
