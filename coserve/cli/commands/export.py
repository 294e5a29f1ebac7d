"""`coserve export`: what a job has made, as files: an adapter by itself or merged into its model,
or a whole model.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from coserve.adapters.file_names import CONFIG_FILE, FULL_FILE, WEIGHTS_FILE
from coserve.cli.at_rest import Database, Home
from coserve.cli.connection import Json
from coserve.cli.finished import find_finished

# Bytes of a model in float32 over those of its files, which mostly are in bfloat16.
_FLOAT32_TIMES = 2


def export(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="A fine-tuned model, a job, last, or a directory of PEFT's."
        ),
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write it; a new or empty directory.")
    ],
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Write the whole model with the adapter in its weights, not the adapter.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The base model for --merge. [the one it was trained on]"
        ),
    ] = None,
    home: Home = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Write a finished adapter to DIR in PEFT's format, or with --merge its whole model in Hugging
    Face's.

    What full fine-tuning has made is a whole model in any case: `coserve up DIR` serves it. The
    server may run meanwhile. Merging needs memory for the model's weights in float32.
    """
    from coserve.errors import AdapterError

    if model is not None and not merge:
        raise typer.BadParameter(
            "this is for --merge: an adapter is written as it is", param_hint="--model"
        )
    found, base, is_model, name = _find(name, home, database)
    with _written_whole(directory) as part:
        if is_model:
            _copy_model(found, part)
        elif merge:
            from coserve.adapters.merge import export_merged
            from coserve.models.copy_room import check_room

            if (named := model or base) is None:
                raise AdapterError("--merge needs the base model: say --model MODEL")
            _check_memory(named)
            check_room(named, part)
            export_merged(named, found, part)
        else:
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copy(found / file, part)
    print(
        json.dumps({"directory": str(directory), "merged": merge or is_model, "exported": name})
        if as_json
        else f"{directory}: {name} written"
    )


def _check_memory(model: str) -> None:
    """Raise AdapterTooLargeError if a model's weights in float32 do not fit into the free
    memory.
    """
    import torch

    from coserve.devices.torch.process_memory import available_bytes
    from coserve.errors import AdapterTooLargeError
    from coserve.models.files import weight_files
    from coserve.models.source import find_model

    directory = find_model(model).directory
    if directory is None:  # refused later, with the reason
        return
    needed_bytes = _FLOAT32_TIMES * sum(path.stat().st_size for path in weight_files(directory))
    free_bytes = available_bytes(torch.device("cpu"))
    if needed_bytes > free_bytes:
        raise AdapterTooLargeError(
            f"merging takes about {needed_bytes / 1e9:.1f} GB of memory, and "
            f"{free_bytes / 1e9:.1f} GB are free"
        )


@contextmanager
def _written_whole(directory: Path) -> Iterator[Path]:
    """A directory to write to, whose files are moved to this one at the end; of what goes wrong
    nothing is left.

    AdapterError if it is not empty, or cannot be written.
    """
    from coserve.errors import AdapterError

    part, is_new = directory / ".part-export", not directory.exists()
    try:
        if not is_new and any(directory.iterdir()):
            raise AdapterError(
                f"{directory} is not empty; name a directory that is, or that is not there"
            )
        part.mkdir(parents=True)
        yield part
        for path in part.iterdir():
            path.rename(directory / path.name)
        part.rmdir()
    except OSError as error:
        raise AdapterError(
            f"it cannot be written to {directory}: {error.strerror or error} ({error.filename})"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it is there if something is in it
                directory.rmdir()


def _find(name: str, home: str | None, database: str | None) -> tuple[Path, str | None, bool, str]:
    """The directory, the model that it is of, if that is known, whether it is a model by itself,
    and its name.
    """
    path = Path(name)
    if (path / CONFIG_FILE).is_file():
        return path, _base_of(path / CONFIG_FILE), False, name
    found = find_finished(name, home, database)
    return found.directory, found.base, found.is_model, found.name


def _base_of(config: Path) -> str | None:
    """The model that PEFT's configuration names, if it names one."""
    from coserve.errors import AdapterError

    try:
        base: str | None = json.loads(config.read_text()).get("base_model_name_or_path")
        return base
    except OSError as error:
        raise AdapterError(f"{config} cannot be read: {error.strerror or error}") from None
    except (ValueError, AttributeError, RecursionError):
        raise AdapterError(
            f"{config} is no configuration of PEFT's: it must hold a JSON object"
        ) from None


def _copy_model(source: Path, directory: Path) -> None:
    """What full fine-tuning has made, without what a job needs to resume."""
    from coserve.devices.messages.jobs import OPTIMIZER_FILE
    from coserve.engine.jobs.checkpoint import POSITION_FILE

    for path in source.iterdir():
        if path.name not in (FULL_FILE, OPTIMIZER_FILE, POSITION_FILE):
            shutil.copy(path, directory)
