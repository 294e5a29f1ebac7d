"""`python -m storm`: storms until the time is over, or one that is to be repeated."""

import argparse
import sys
import time
from itertools import count

from storm.simulated import NUM_ACTIONS, Report, run_storm


def main() -> int:
    """0 if every invariant held; else the failure is printed, with the command that repeats it."""
    parser = argparse.ArgumentParser(prog="python -m storm", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    simulated = kinds.add_parser("simulated", help="the engine on a modelled device, in virtual time")
    simulated.add_argument("--seed", type=int, help="one storm, that of this seed")
    simulated.add_argument("--first-seed", type=int, default=0, help="of many")
    simulated.add_argument("--minutes", type=float, default=10.0, help="of computing")
    simulated.add_argument("--hours", type=float, help="of computing")
    simulated.add_argument("--actions", type=int, default=NUM_ACTIONS, help="on the device, of each storm")
    options = parser.parse_args()
    return simulate(options)


def simulate(options: argparse.Namespace) -> int:
    report, seconds = Report(), 3600 * options.hours if options.hours else 60 * options.minutes
    seeds = count(options.first_seed) if options.seed is None else [options.seed]
    until_s = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until_s:
            break
        run_storm(seed, report, num_actions=options.actions)
    print(report.as_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
