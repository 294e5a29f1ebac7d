"""Microseconds that a policy takes for the plan of one step: 64 requests beside one and eight jobs, in every phase.

    python benchmarks/plan_time.py

A plan is made while the device waits: the target is 50 us. Times are those of the thread, so that other processes count
little. Prints a table, and one line of JSON.
"""

import json
import time
import timeit
from functools import partial
from itertools import product
from statistics import median

from coserve.models import load_backbone
from coserve.scheduling import JobView, LatencyModel, RequestView, View, make_policy
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile

NUM_REQUESTS, NUMS_JOBS = 64, (1, 8)
PHASES = {
    "forward": ("forward",),
    "loss": ("loss",),
    "backward": ("backward",),
    "update": ("update",),
    "all": ("forward", "loss", "backward", "update"),
}
POLICIES = ("slack", "token-fusion")
NOW_S, REPEATS, NUMBER = 10.0, 200, 10


def make_view(phases: tuple[str, ...], latency: LatencyModel, *, num_jobs: int, num_prompts: int) -> View:
    """Requests with time to spare, some of them prompts that fit as a whole, so that jobs get their turn."""
    requests = [
        RequestView(f"r{i}", 1, 500 + i, 40, 0.0, 8.0, NOW_S, 20.0, 2.0, f"adapter-{i % 4}", 168)
        for i in range(NUM_REQUESTS - num_prompts)
    ]
    requests += [RequestView(f"p{i}", 40, 0, 0, NOW_S, None, NOW_S, 20.0, 2.0) for i in range(num_prompts)]
    jobs = [
        JobView(f"j{i}", phases[i % len(phases)], 1024, 1024 - 100 * i, 24, 128.0, latency.profile.job)  # type: ignore[arg-type]
        for i in range(num_jobs)
    ]
    return View(now_s=NOW_S, requests=tuple(requests), jobs=tuple(jobs), ttft_s=20.0, tpot_s=2.0)


def main() -> None:
    """Measure and print."""
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    hardware = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
    latency = LatencyModel(roofline_profile(backbone, hardware))
    results = []
    print(f"{NUM_REQUESTS} requests\n\npolicy         jobs phases    prompts   min us   median us")
    for policy, num_jobs, name, num_prompts in product(POLICIES, NUMS_JOBS, PHASES, (0, 4)):
        if name == "all" and num_jobs == 1:
            continue
        plan = make_policy(policy).plan
        view = make_view(PHASES[name], latency, num_jobs=num_jobs, num_prompts=num_prompts)
        made = plan(view, latency)
        assert len(made.rows) >= NUM_REQUESTS, "every request is served"
        times = timeit.repeat(partial(plan, view, latency), timer=time.thread_time, number=NUMBER, repeat=REPEATS)
        least, middle = (1e6 * f(times) / NUMBER for f in (min, median))
        print(f"{policy:13} {num_jobs:5} {name:9} {num_prompts:7} {least:8.0f} {middle:11.0f}")
        results.append(
            {
                "policy": policy,
                "jobs": num_jobs,
                "phases": name,
                "prompts": num_prompts,
                "min_us": round(least, 1),
                "median_us": round(middle, 1),
            }
        )
    print(json.dumps({"requests": NUM_REQUESTS, "plans": results}))


if __name__ == "__main__":
    main()
