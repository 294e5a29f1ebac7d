"""Measurements of a loaded model, and their output."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from coserve.models.backbone import Backbone

# Adds columns and rows of a result to a table.
Fill = Callable[["Table", dict[str, Any]], None]


def measure(
    experiment: str,
    fill: Fill,
    model: str,
    dtype: str,
    weights: str,
    place: str,
    runs: int,
    run: Callable[["Backbone"], dict[str, Any]],
    save: Path | None,
) -> dict[str, Any]:
    """Load a model, measure it, print the result, and return it.

    Args:
        experiment: Name of the measurement.
        fill: Function that fills the table.
        model: Directory, hub id, or dummy:PRESET.
        dtype: Name of a dtype, or best.
        weights: Storage of the weights of linear layers.
        place: Name of a device, or auto.
        runs: Number of turns, for the result.
        run: Measurement on the loaded model.
        save: Directory for the result; None saves nothing.
    """
    import torch

    from coserve.bench.machine import best_dtype, describe
    from coserve.devices.torch.process_memory import keep_freed_memory
    from coserve.models import load_backbone

    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if place == "auto" else place
    )
    dtype = best_dtype(device) if dtype == "best" else dtype
    keep_freed_memory()  # as the server's engine does; for all sides
    backbone = load_backbone(model, dtype=dtype, device=device, weights=weights)
    what = {
        "model": model,
        "dtype": dtype,
        "weights": weights,
        "runs": runs,
        "machine": describe(device),
    }
    return print_result(experiment, fill, what, run(backbone), save)


def print_result(
    experiment: str, fill: Fill, what: dict[str, Any], found: dict[str, Any], save: Path | None
) -> dict[str, Any]:
    """Print a table and a line of JSON, and return the whole result.

    Args:
        experiment: Name of the measurement.
        fill: Function that fills the table.
        what: What was measured, and where.
        found: Numbers.
        save: Directory for the result; None saves nothing.
    """
    from rich.table import Table

    from coserve.bench.machine import versions
    from coserve.bench.results import save_result
    from coserve.cli.tables import console

    said = {"versions": versions(), "date": datetime.now(UTC).date().isoformat()}
    result = {"experiment": experiment, **said, **what, **found}
    words = ", ".join(
        str(what[name]) for name in ("model", "dtype", "weights", "machine") if name in what
    )
    table = Table(title=f"{experiment}: {words}", title_justify="left")
    fill(table, result)
    console().print(table)
    print(json.dumps(result))
    if save is not None:
        save_result(save, experiment, result)
    return result
