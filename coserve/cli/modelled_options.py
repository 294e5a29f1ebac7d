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
            "Devices that hold the model together, over the link of --hardware; each such group "
            "counts as one."
        ),
    ),
]


def modelled_places(shapes: "Backbone", names: str) -> "list[ModelledPlace]":
    """Devices of the catalogue, by their names with commas between them."""
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
    """Examples that are longer than what the model was made for."""
    if sequence > shapes.max_positions:
        words = f"{sequence} tokens are more than the model has positions: {shapes.max_positions}"
        raise typer.BadParameter(words, param_hint="--sequence")


def modelled_place(shapes: "Backbone", name: str, tensor_parallel: int = 1) -> "ModelledPlace":
    """Return the place of a model on one kind of device of the catalogue, or on a group of as many
    such devices.
    """
    from coserve.simulate.modelled_ranks import on_ranks

    places = modelled_places(on_ranks(shapes, tensor_parallel), name)
    if len(places) != 1:
        raise typer.BadParameter("one kind of device at a time", param_hint="--hardware")
    return places[0]
