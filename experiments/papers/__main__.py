"""Figures of the papers on modelled devices: their numbers, ours beside them, and whether the trend
is the same.

    python -m experiments.papers ../shared/data --figures flexllm-11,harli-11 --seconds 120

Ends with a line of JSON.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from experiments.papers import flexllm, harli, here, llmstation
from experiments.papers.setting import Data, Row, run_task
from experiments.results import add_save_option, print_result

FIGURES = {**flexllm.FIGURES, **llmstation.FIGURES, **harli.FIGURES, **here.FIGURES}


def main() -> None:
    """Print a line for each row and claim, and end with JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="the folder of traces and data sets")
    parser.add_argument(
        "--figures", default=",".join(FIGURES), help=f"of {', '.join(FIGURES)} [all]"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of requests, in each cell")
    parser.add_argument("--processes", type=int, default=2)
    add_save_option(parser)
    options = parser.parse_args()
    data, result = Data(folder=options.data, seconds=options.seconds), {}
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for name in options.figures.split(","):
            figure, started_s = FIGURES[name], time.perf_counter()
            print(f"# {name}: {figure.title}", flush=True)
            rows: list[Row] = []
            for found in pool.map(run_task, figure.tasks(data)):
                rows += found
                for row in found:
                    print(*(f"{key} {value}" for key, value in row.items()), flush=True)
            claims = [claim._asdict() for claim in figure.claims(rows)]
            for claim in claims:
                print(*(f"{key}: {value}." for key, value in claim.items()), flush=True)
            print(f"{time.perf_counter() - started_s:.0f} s", flush=True)
            result[name] = {"rows": rows, "claims": claims}
    numbers = {"experiment": "papers", "seconds": options.seconds, "figures": result}
    print_result("papers", numbers, options.save)


if __name__ == "__main__":
    main()
