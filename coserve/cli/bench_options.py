"""Options that measuring commands share."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Option(help="Directory, hub id, or dummy:PRESET for random weights of that shape.")
]
Dtype = Annotated[
    str,
    typer.Option(
        help=(
            "float32, bfloat16, float16, or best: the fastest that this machine has "
            "instructions for."
        )
    ),
]
Weights = Annotated[
    str, typer.Option(help="Storage of the weights of linear layers, as in coserve up.")
]
Place = Annotated[
    str,
    typer.Option(
        "--device",
        help="Device such as cpu or cuda:0; auto picks a GPU if there is one.",
        metavar="DEVICE",
    ),
]
Runs = Annotated[
    int, typer.Option(min=1, help="Number of turns per side; results are medians over them.")
]
Dropout = Annotated[
    float, typer.Option(min=0, max=0.99, help="Dropout of the jobs' adapters, and of PEFT's.")
]
Save = Annotated[
    Path | None,
    typer.Option(
        metavar="DIRECTORY",
        help=(
            "Also write the result to a new file in this directory, with the command and the "
            "machine."
        ),
    ),
]
DEFAULT_MODEL = "dummy:smollm2-135m"
