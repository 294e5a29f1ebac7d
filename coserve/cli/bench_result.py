"""Measurements of a loaded model, and their output."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from coserve.models.backbone import Backbone

# Adds columns and rows of a result to a table.
Fill = Callable[["Table", dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """Model of a measurement, and how to load it."""

    model: str
    """Directory, hub id, or dummy:PRESET."""
    dtype: str
    """Name of a dtype, or best."""
    weights: str
    """Storage of the weights of linear layers."""
    place: str
    """Name of a device, or auto."""


def measure(
    experiment: str,
    fill: Fill,
    model: MeasuredModel,
    runs: int,
    run: Callable[["Backbone"], dict[str, Any]],
    save: Path | None,
) -> dict[str, Any]:
    """Load a model, measure it, print the result, and return it.

    Args:
        experiment: Name of the measurement.
        fill: Function that fills the table.
        model: Model, and how to load it.
        runs: Number of turns, for the result.
        run: Measurement on the loaded model.
        save: Directory for the result; None saves nothing.
    """
    import torch

    from coserve.bench.machine import best_dtype, describe
    from coserve.devices.torch.process_memory import keep_freed_memory
    from coserve.models import load_backbone

    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if model.place == "auto" else model.place)
    dtype = best_dtype(device) if model.dtype == "best" else model.dtype
    keep_freed_memory()  # as the server's engine does; for all sides
    backbone = load_backbone(model.model, dtype=dtype, device=device, weights=model.weights)
    subject = {
        "model": model.model,
        "dtype": dtype,
        "weights": model.weights,
        "runs": runs,
        "machine": describe(device),
    }
    return print_result(experiment, fill, subject, run(backbone), save)


def print_result(
    experiment: str,
    fill: Fill,
    subject: dict[str, Any],
    numbers: dict[str, Any],
    save: Path | None,
) -> dict[str, Any]:
    """Print a table and a line of JSON, and return the whole result.

    Args:
        experiment: Name of the measurement.
        fill: Function that fills the table.
        subject: What was measured, and where.
        numbers: What the measurement found.
        save: Directory for the result; None saves nothing.
    """
    from rich.table import Table

    from coserve.bench.machine import versions
    from coserve.bench.results import save_result
    from coserve.cli.tables import console

    origin = {"versions": versions(), "date": datetime.now(UTC).date().isoformat()}
    result = {"experiment": experiment, **origin, **subject, **numbers}
    described = ("model", "dtype", "weights", "machine")
    title = ", ".join(str(subject[name]) for name in described if name in subject)
    table = Table(title=f"{experiment}: {title}", title_justify="left")
    fill(table, result)
    console().print(table)
    print(json.dumps(result))
    if save is not None:
        save_result(save, experiment, result)
    return result
