"""Options that commands which measure have in common."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="A directory, a hub id, or dummy:PRESET.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or best: what this machine has instructions for."
    ),
]
Weights = Annotated[str, typer.Option(help="How weights of linear layers are stored, as in up.")]
Place = Annotated[
    str,
    typer.Option(
        "--device",
        help="Such as cpu or cuda:0; auto takes a GPU if there is one.",
        metavar="DEVICE",
    ),
]
Runs = Annotated[
    int, typer.Option(min=1, help="Turns that each side takes; numbers are medians over them.")
]
Dropout = Annotated[
    float, typer.Option(min=0, max=0.99, help="Of the adapters of jobs, and of PEFT's.")
]
Save = Annotated[
    Path | None,
    typer.Option(
        metavar="DIRECTORY",
        help="Also write the result, with the command and the machine, to a new file in this directory.",
    ),
]
DEFAULT_MODEL = "dummy:smollm2-135m"
