"""`coserve export`: an adapter that a job has made, as files: by itself, or merged into its model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coserve.cli.at_rest import Database, Home, existing_home
from coserve.cli.connection import Json


def export(
    name: Annotated[str, typer.Argument(metavar="ID", help="A fine-tuned model, a job, or a directory of PEFT's.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; a new or empty directory.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the whole model with the adapter in its weights, not the adapter.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base model for --merge. [the one it was trained on]")
    ] = None,
    home: Home = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Write a finished adapter to DIR in PEFT's format, or with --merge its whole model in Hugging Face's.

    The server may run meanwhile. Merging needs memory for the model's weights in float32.
    """
    import shutil

    from coserve.errors import AdapterError

    found, base = _find(name, home, database)
    if directory.exists() and any(directory.iterdir()):
        raise AdapterError(f"{directory} is not empty; name a directory that is, or that is not there")
    if merge:
        from coserve.adapters.merge import export_merged

        if (named := model or base) is None:
            raise AdapterError("--merge needs the base model: say --model MODEL")
        export_merged(named, found, directory)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(found / file, directory)
    print(json.dumps({"directory": str(directory), "merged": merge}) if as_json else f"{directory}: written")


def _find(name: str, home: str | None, database: str | None) -> tuple[Path, str | None]:
    """The directory of an adapter, and the model that it is of, if that is known."""
    from coserve.errors import AdapterError
    from coserve.jobs.databases import database_url
    from coserve.jobs.records import AdapterRecord
    from coserve.jobs.store import Store

    path = Path(name)
    if (path / "adapter_config.json").is_file():
        base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
        return path, base
    url = database_url(database)
    store = Store.at(existing_home(home, url), url)
    try:
        with store.read() as transaction:
            records = [each for each in transaction.all_of(AdapterRecord) if each.directory]
    finally:
        store.close()
    for record in records:
        if name in (record.name, record.job):
            return Path(record.directory or ""), record.base
    known = ", ".join(record.name for record in records) or "none"
    raise AdapterError(f"there is no finished adapter {name!r}; there are: {known}")
