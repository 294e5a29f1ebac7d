"""`python -m storm`: storms until the time is over, or one that is to be repeated. The last line is
JSON."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count

# What a kind needs is imported by it: ranks are forked from a process that imports this module,
# too.


def main() -> int:
    """0 if every invariant held; else the failure is printed, with the command that repeats it."""
    parser = argparse.ArgumentParser(prog="python -m storm", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    simulated = kinds.add_parser(
        "simulated", help="the engine on a modelled device, in virtual time"
    )
    simulated.add_argument("--seed", type=int, help="one storm, that of this seed")
    simulated.add_argument("--first-seed", type=int, default=0, help="of many")
    simulated.add_argument("--minutes", type=float, default=10.0, help="of computing")
    simulated.add_argument("--hours", type=float, help="of computing")
    simulated.add_argument("--actions", type=int, help="on the device, of each storm")
    clustered = kinds.add_parser(
        "clustered", help="a front and the engines of three nodes, in one process"
    )
    clustered.add_argument("--seed", type=int, help="one storm, that of this seed")
    clustered.add_argument("--first-seed", type=int, default=0, help="of many")
    clustered.add_argument("--minutes", type=float, default=10.0)
    poisoned = kinds.add_parser("poisoned", help="lines of batches that engines and servers die of")
    poisoned.add_argument("--seed", type=int, help="one storm, that of this seed")
    poisoned.add_argument("--first-seed", type=int, default=0, help="of many")
    poisoned.add_argument("--minutes", type=float, default=10.0)
    ranks = kinds.add_parser("ranks", help="an engine on two ranks, of which one fails")
    ranks.add_argument("--seed", type=int, help="one storm, that of this seed")
    ranks.add_argument("--first-seed", type=int, default=0, help="of many")
    ranks.add_argument("--minutes", type=float, default=10.0)
    real = kinds.add_parser("real", help="a server, its clients, its disk and its clock")
    real.add_argument("--seed", type=int, default=0)
    real.add_argument("--minutes", type=float, default=10.0, help="of faults; then comes calm")
    real.add_argument("--hours", type=float, help="in storms of --minutes, each with the next seed")
    real.add_argument("--streams", type=int, default=512)
    real.add_argument("--jobs", type=int, default=8)
    options = parser.parse_args()
    run = {
        "simulated": simulate,
        "clustered": cluster_storms,
        "poisoned": poisoned_storms,
        "ranks": rank_storms,
        "real": real_storms,
    }
    return run[options.kind](options)


def simulate(options: argparse.Namespace) -> int:
    from storm.simulated import NUM_ACTIONS, Report, run_storm

    report, seconds = Report(), 3600 * options.hours if options.hours else 60 * options.minutes
    seeds = count(options.first_seed) if options.seed is None else [options.seed]
    until_s = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until_s:
            break
        run_storm(seed, report, num_actions=options.actions or NUM_ACTIONS)
    print(report.as_text())
    print(
        json.dumps(
            {
                "storms": report.num_storms,
                "hours": report.simulated_s / 3600,
                "faults": report.faults.total(),
            }
        )
    )
    return 0


def cluster_storms(options: argparse.Namespace) -> int:
    from storm.clustered import run_cluster_storm

    return _storms(options, run_cluster_storm)


def poisoned_storms(options: argparse.Namespace) -> int:
    from storm.poisoned import run_poisoned_storm

    return _storms(options, run_poisoned_storm)


def rank_storms(options: argparse.Namespace) -> int:
    from storm.ranks import run_rank_storm

    return _storms(options, run_rank_storm)


def _storms(
    options: argparse.Namespace, run: Callable[[int], tuple[Counter[str], list[str]]]
) -> int:
    """Storms of one kind until the time is over."""
    num_storms, broken, done = 0, list[str](), Counter[str]()
    until_s = time.monotonic() + 60 * options.minutes
    for seed in count(options.first_seed) if options.seed is None else [options.seed]:
        if time.monotonic() > until_s:
            break
        did, found = run(seed)
        num_storms, done = num_storms + 1, done + did
        if found:
            again = f"PYTHONPATH=tests python -m storm {options.kind} --seed {seed}"
            broken.append("\n".join([*found, f"a similar one: {again}"]))
            print(broken[-1], file=sys.stderr)
    print("\n".join(f"{number:7} {what}" for what, number in sorted(done.items())))
    if broken:  # again, where those look who see the end alone
        print("\n".join(broken))
    print(json.dumps({"storms": num_storms, "broken": len(broken)}))
    return int(bool(broken))


def real_storms(options: argparse.Namespace) -> int:
    """One, or as many as there are in some hours."""
    from storm.real.run import command, run_real_storm
    from storm.real.world import Settings

    num_storms = max(1, round(60 * options.hours / options.minutes)) if options.hours else 1
    reports = []
    for seed in range(options.seed, options.seed + num_storms):
        settings = Settings(
            seed=seed,
            storm_s=60 * options.minutes,
            num_streams=options.streams,
            num_jobs=options.jobs,
            is_exact=seed % 4 == 3,
        )
        report = run_real_storm(settings)
        reports.append(report)
        if report["broken"]:
            print(
                "\n".join(report["broken"]),
                f"repeat it with: {command(settings)}",
                sep="\n",
                file=sys.stderr,
            )
        print(json.dumps(report), flush=True)
    return int(any(report["broken"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
