"""Microseconds of a policy's plan for one step: 64 requests beside one and eight jobs, in every
phase.

    python -m experiments.plan_time

The default policy also plans for three tenants, to which requests and jobs belong in turn. A plan
is made while the device waits: the target is 50 us. The target of a prediction, of which a plan
needs some, is 5 us: of the latency model, with which most policies plan, and of HARLI's two stages.
`harli` and `llmstation` plan for a device that can be divided, `llmstation` without a record, so
that it uses its linear models. Times are those of the thread, so that other processes count little.
Prints tables, and one line of JSON.
"""

import time
import timeit
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

from coserve.models import load_backbone
from coserve.scheduling import (
    JobInfo,
    JobProgress,
    LatencyModel,
    RequestInfo,
    RequestProgress,
    View,
    make_policy,
)
from coserve.scheduling.latency import ForwardLoad
from coserve.scheduling.plan import TenantView
from coserve.scheduling.policies.harli import predictor
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from experiments.results import print_result, save_option

NUM_REQUESTS, NUMS_JOBS = 64, (1, 8)
PHASES = {
    "forward": ("forward",),
    "loss": ("loss",),
    "backward": ("backward",),
    "update": ("update",),
    "all": ("forward", "loss", "backward", "update"),
}
# The policy, the units of the device that it plans for, and the number of tenants.
CASES = (
    ("slack", 1, 1),
    ("slack", 1, 3),
    ("token-fusion", 1, 1),
    ("harli", 2, 1),
    ("llmstation", 2, 1),
)
NOW_S, REPEATS, NUMBER = 10.0, 200, 10


def make_view(
    phases: tuple[str, ...],
    latency: LatencyModel,
    *,
    num_jobs: int,
    num_prompts: int,
    num_units: int = 1,
    num_tenants: int = 1,
) -> View:
    """Return requests with time to spare, some of them prompts that fit as a whole, so that jobs
    get their turn.
    """
    tenants = [f"tenant-{i}" for i in range(num_tenants)]
    requests = [
        RequestProgress(
            id=f"r{i}",
            info=RequestInfo(
                arrival_s=0.0,
                ttft_s=20.0,
                tpot_s=2.0,
                version=f"adapter-{i % 4}",
                num_bypasses=168,
                tenant=tenants[i % num_tenants],
            ),
            num_rows=1,
            num_past=500 + i,
            num_output=40,
            first_token_s=8.0,
            last_token_s=NOW_S,
        )
        for i in range(NUM_REQUESTS - num_prompts)
    ]
    requests += [
        RequestProgress(
            id=f"p{i}",
            info=RequestInfo(
                arrival_s=NOW_S,
                ttft_s=20.0,
                tpot_s=2.0,
                tenant=tenants[(len(requests) + i) % num_tenants],
            ),
            num_rows=40,
            num_past=0,
            num_output=0,
            first_token_s=None,
            last_token_s=NOW_S,
        )
        for i in range(num_prompts)
    ]
    jobs = [
        JobProgress(
            id=f"j{i}",
            info=JobInfo(counts=latency.profile.job, tenant=tenants[i % num_tenants]),
            phase=phases[i % len(phases)],  # type: ignore[arg-type]
            num_rows=1024,
            num_rows_left=1024 - 100 * i,
            num_parts_left=24,
            mean_context_len=128.0,
        )
        for i in range(num_jobs)
    ]
    return View(
        now_s=NOW_S,
        requests=tuple(requests),
        jobs=tuple(jobs),
        tenants=tuple(
            [TenantView(name=name, used_s=1.0 + i / 100) for i, name in enumerate(tenants)]
        ),
        ttft_s=20.0,
        tpot_s=2.0,
        num_units=num_units,
    )


def microseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return the minimum and the median."""
    times = timeit.repeat(call, timer=time.thread_time, number=NUMBER, repeat=REPEATS)
    return 1e6 * min(times) / NUMBER, 1e6 * median(times) / NUMBER


def predictions(latency: LatencyModel) -> dict[str, Callable[[], object]]:
    """Return predictions by name: of the default's model, and of HARLI's two stages."""
    load, job = ForwardLoad(), make_view(("backward",), latency, num_jobs=1, num_prompts=0).jobs[0]
    load.add_decodes(make_view((), latency, num_jobs=0, num_prompts=0).requests)
    partition = latency.sharing.partitions[0]
    return {
        "forward pass": partial(latency.forward_s, load),
        "tasklet": partial(latency.tasklet_s, job, 128),
        "decode step": partial(latency.decode_s, num_requests=NUM_REQUESTS, context=500),
        "HARLI, beside a job": lambda: predictor(latency).seconds(partition, NUM_REQUESTS, 500.0),
    }


def main(save: Path | None = None) -> None:
    """Measure and print.

    Args:
        save: Directory for the result; None saves nothing.
    """
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    hardware = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5, num_units=2)
    latency = LatencyModel(roofline_profile(backbone, hardware))
    predicted = {words: microseconds(call) for words, call in predictions(latency).items()}
    print("prediction              min us   median us")
    for words, (least, middle) in predicted.items():
        print(f"{words:20} {least:9.2f} {middle:11.2f}")
    results = []
    print(
        f"\n{NUM_REQUESTS} requests\n\npolicy        tenants  jobs phases    prompts   min us   "
        f"median us"
    )
    for (policy, num_units, num_tenants), num_jobs, name, num_prompts in product(
        CASES, NUMS_JOBS, PHASES, (0, 4)
    ):
        if name == "all" and num_jobs == 1:
            continue
        plan = make_policy(policy).plan
        view = make_view(
            PHASES[name],
            latency,
            num_jobs=num_jobs,
            num_prompts=num_prompts,
            num_units=num_units,
            num_tenants=num_tenants,
        )
        planned = plan(view, latency)
        # LLMStation prefills by itself.
        num_served = num_prompts if policy == "llmstation" and num_prompts else NUM_REQUESTS
        assert len(planned.rows) >= num_served, "every request is served"
        least, middle = microseconds(partial(plan, view, latency))
        print(
            f"{policy:13} {num_tenants:7} {num_jobs:5} {name:9} {num_prompts:7} {least:8.0f} "
            f"{middle:11.0f}"
        )
        results.append(
            {
                "policy": policy,
                "tenants": num_tenants,
                "jobs": num_jobs,
                "phases": name,
                "prompts": num_prompts,
                "min_us": round(least, 1),
                "median_us": round(middle, 1),
            }
        )
    told = {words: round(least, 2) for words, (least, _) in predicted.items()}
    result = {"requests": NUM_REQUESTS, "predictions_us": told, "plans": results}
    print_result("plan_time", result, save)


if __name__ == "__main__":
    main(save_option(__doc__))
