"""Options of commands that run on modelled hardware."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from coserve.bench.places import ModelledPlace
    from coserve.models.backbone import Backbone

TensorParallel = Annotated[
    int,
    typer.Option(
        min=1,
        help=(
            "Number of devices that hold the model together, over the link of --hardware; a "
            "group counts as one device."
        ),
    ),
]


def modelled_places(shapes: "Backbone", names: str) -> "list[ModelledPlace]":
    """Return devices of the catalogue, by names separated by commas."""
    from coserve.bench.places import ModelledPlace
    from coserve.simulate.hardware import CATALOGUE

    places = []
    for name in [each.strip().lower() for each in names.split(",")]:
        if name not in CATALOGUE:
            raise typer.BadParameter(
                f"{name!r} is not one of {', '.join(CATALOGUE)}", param_hint="--hardware"
            )
        places.append(ModelledPlace.of_hardware(shapes, CATALOGUE[name]))
    return places


def refuse_beyond_positions(shapes: "Backbone", sequence: int) -> None:
    """Refuse examples that are longer than the model's maximum."""
    if sequence > shapes.max_positions:
        words = f"{sequence} tokens are more than the model's maximum, {shapes.max_positions}"
        raise typer.BadParameter(words, param_hint="--sequence")


def modelled_place(shapes: "Backbone", name: str, tensor_parallel: int = 1) -> "ModelledPlace":
    """Return a model's place on a device of the catalogue, or on a group of such devices."""
    from coserve.simulate.modelled_ranks import on_ranks

    places = modelled_places(on_ranks(shapes, tensor_parallel), name)
    if len(places) != 1:
        raise typer.BadParameter(
            "only one kind of device is possible here", param_hint="--hardware"
        )
    return places[0]
