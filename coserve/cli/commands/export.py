"""`coserve export`: writes a job's adapter, the model with the adapter merged, or a fully
fine-tuned model.
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
            metavar="ID",
            help="Fine-tuned model, job, last (the newest), or a PEFT adapter directory.",
        ),
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to write to; it must be new or empty.")
    ],
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Write the whole model with the adapter merged into its weights.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Base model for --merge. [the one that the adapter was trained on]",
        ),
    ] = None,
    home: Home = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Write a finished adapter to DIR in PEFT's format, or with --merge the whole model.

    Merged models are in Hugging Face's format. Full fine-tuning gives a whole model in any case;
    `coserve up DIR` serves it. The server may keep running. Merging needs memory for the model's
    weights in float32.
    """
    from coserve.errors import AdapterError

    if model is not None and not merge:
        raise typer.BadParameter("applies only to --merge", param_hint="--model")
    source, base, is_model, name = _find(name, home, database)
    with _written_whole(directory) as part:
        if is_model:
            _copy_model(source, part)
        elif merge:
            from coserve.adapters.merge import export_merged
            from coserve.models.source import check_room_for_copy

            if (named := model or base) is None:
                raise AdapterError("--merge needs the base model: set --model")
            _check_memory(named)
            check_room_for_copy(named, part)
            export_merged(named, source, part)
        else:
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copy(source / file, part)
    print(
        json.dumps({"directory": str(directory), "merged": merge or is_model, "exported": name})
        if as_json
        else f"{directory}: {name} written"
    )


def _check_memory(model: str) -> None:
    """Check that a model's weights in float32 fit into the free memory.

    Raises:
        AdapterTooLargeError: They do not.
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
            f"merging needs about {needed_bytes / 1e9:.1f} GB of memory, and "
            f"{free_bytes / 1e9:.1f} GB are free"
        )


@contextmanager
def _written_whole(directory: Path) -> Iterator[Path]:
    """Yield a directory to write to, whose files are moved to the given one at the end.

    If writing fails, nothing is left.

    Raises:
        AdapterError: The given directory is not empty, or cannot be written.
    """
    from coserve.errors import AdapterError

    # Inside the directory itself, so that files can be renamed into place.
    part, is_new = directory / ".part-export", not directory.exists()
    try:
        if not is_new and any(directory.iterdir()):
            raise AdapterError(f"{directory} is not empty: choose a new or empty directory")
        part.mkdir(parents=True)
        yield part
        for path in part.iterdir():
            path.rename(directory / path.name)
        part.rmdir()
    except OSError as error:
        raise AdapterError(
            f"{directory} cannot be written: {error.strerror or error} ({error.filename})"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it is there if something is in it
                directory.rmdir()


def _find(name: str, home: str | None, database: str | None) -> tuple[Path, str | None, bool, str]:
    """Return the directory, the base model if it is known, whether it is a model by itself, and the
    name.
    """
    path = Path(name)
    if (path / CONFIG_FILE).is_file():
        return path, _base_of(path / CONFIG_FILE), False, name
    finished = find_finished(name, home, database)
    return finished.directory, finished.base, finished.is_model, finished.name


def _base_of(config: Path) -> str | None:
    """Return the base model that a PEFT configuration names, if it names one."""
    from coserve.errors import AdapterError

    try:
        base: str | None = json.loads(config.read_text()).get("base_model_name_or_path")
        return base
    except OSError as error:
        raise AdapterError(f"{config} cannot be read: {error.strerror or error}") from None
    except (ValueError, AttributeError, RecursionError):
        raise AdapterError(
            f"{config} is not a PEFT configuration: it must hold a JSON object"
        ) from None


def _copy_model(source: Path, directory: Path) -> None:
    """Copy a fully fine-tuned model, without the files that only a job needs to resume."""
    from coserve.devices.messages.jobs import OPTIMIZER_FILE
    from coserve.engine.jobs.checkpoint import POSITION_FILE

    for path in source.iterdir():
        if path.name not in (FULL_FILE, OPTIMIZER_FILE, POSITION_FILE):
            shutil.copy(path, directory)
