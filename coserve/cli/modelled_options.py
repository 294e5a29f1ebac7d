"""Options of commands that run on modelled hardware."""

from typing import Annotated

import typer

TensorParallel = Annotated[
    int,
    typer.Option(
        min=1,
        help=(
            "Devices that hold the model together, over the link of --hardware; each such group "
            "counts as one."
        ),
    ),
]
