"""Sources of models: a directory, a hub id, the package itself (`tiny`), or a shape without weights
(`dummy:…`).
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coserve.errors import DiskFullError, ModelError, UnknownModelError
from coserve.models.files import check_config, gguf_error, weight_files
from coserve.models.presets import PRESETS
from coserve.settings import shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DUMMY = "dummy:"
# The small model that comes with the package (its card: tiny/README.md).
TINY = "tiny"
_TINY_DIRECTORY = Path(__file__).parent / "tiny"
# Left free for others that write there, and for a head that is written beside the table that it
# was: as much again as the model's files have, up to this.
_MAX_SPARE_BYTES = 10_000_000_000


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that has been found."""

    name: str
    """Name as it was given."""
    config: "PretrainedConfig"
    """Configuration of the model, or of its text part if it reads pictures, too."""
    directory: Path | None
    """Directory of the weights; None: they are random."""


def find_model(name: str | Path, *, with_weights: bool = True) -> ModelSource:
    """Find a model and read its configuration.

    Args:
        name: A directory in Hugging Face's layout, a hub id ("org/name"), "tiny" for the built-in
            model (a directory of that name is "./tiny"), "dummy:<preset>", or "dummy:<path to a
            config.json>".
        with_weights: Whether a hub model's weights are fetched too, or only its configuration.

    Raises:
        UnknownModelError: there is no such model.
        UnsupportedModelError: the family is not supported, it does not generate text, or its
            weights are in a format that is not read (quantised, GGUF).
    """
    if isinstance(name, Path):  # never what is built in, or on the hub
        name = str(name.absolute())
    if not isinstance(name, str):
        raise UnknownModelError(
            f"a model is a directory, or has a name, and {shown(name)} is neither"
        )
    if name.startswith(_DUMMY):
        return ModelSource(
            name=name, config=_dummy_config(name.removeprefix(_DUMMY)), directory=None
        )
    directory = _local_directory(name) or _fetch(name, with_weights)
    return ModelSource(
        name=name, config=_read_config(directory / "config.json"), directory=directory
    )


def find_here(name: str) -> str:
    """Return a name for a model whose files are on this machine: for a hub id its directory in the
    hub's cache, for any other name the name itself. Nothing is fetched.

    Raises:
        UnknownModelError: there is no such model on this machine.
    """
    if name.startswith(_DUMMY) or _local_directory(name) is not None:
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, local_files_only=True)
    except Exception as error:  # many kinds, as in `_fetch`
        raise UnknownModelError(
            f"{shown(name)} is not a model on this machine, and it is not fetched for this"
        ) from error


def find_fetched(name: str) -> ModelSource:
    """Find a model whose files another process of this machine has fetched, without asking the hub,
    which may have another revision by now. Raises as `find_here` does.
    """
    return replace(find_model(find_here(name)), name=name)


def check_model(name: str) -> None:
    """Refuse a model on this machine that its small files rule out, which takes no time; see
    `find_model`.

    Raises:
        ModelError: `find_model` would refuse it, or its weights are not there.
    """
    if name.startswith(_DUMMY):
        if (path := _dummy_path(name.removeprefix(_DUMMY))) is not None:
            check_config(path)
    elif (directory := _local_directory(name)) is not None:
        check_config(directory / "config.json")
        weight_files(directory)


def model_files(name: str) -> list[Path]:
    """Return the configuration and the weight files of a model that is a directory here; nothing
    for any other, and for one that cannot be used.
    """
    try:
        directory = None if name.startswith(_DUMMY) else _local_directory(name)
        return [] if directory is None else [directory / "config.json", *weight_files(directory)]
    except ModelError:
        return []


def check_room_for_copy(model: str, directory: Path) -> None:
    """Check that the disk of a directory has room for a copy of a model, with some to spare.
    Blocks.

    A model whose files are not on this machine is not checked.

    Raises:
        DiskFullError: there is not enough room.
    """
    try:
        files = model_files(find_here(model))
    except UnknownModelError:
        return
    num_bytes = sum(path.stat().st_size for path in files)
    needed_bytes = num_bytes + min(num_bytes, _MAX_SPARE_BYTES)
    free_bytes = shutil.disk_usage(directory).free
    if needed_bytes > free_bytes:
        raise DiskFullError(
            f"the merged model needs {needed_bytes / 1e9:.3g} GB of free disk, and "
            f"{free_bytes / 1e9:.3g} GB are free"
        )


def _local_directory(name: str) -> Path | None:
    """Return the directory of a model on this machine; None if the name can only be the hub's."""
    directory = _TINY_DIRECTORY if name == TINY else Path(name)
    if name and _is(Path.is_dir, directory):
        return directory
    if name.endswith(".gguf") and _is(Path.is_file, directory):
        raise gguf_error(directory)
    if (
        not name
        or _is(Path.exists, directory)
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    ):
        raise UnknownModelError(
            f"{name!r} is not a directory; give one that holds config.json and *.safetensors, or "
            f"the name {TINY}"
        )
    return None


def _dummy_config(name: str) -> "PretrainedConfig":
    from transformers import AutoConfig

    path = _dummy_path(name)
    return AutoConfig.for_model(**PRESETS[name]) if path is None else _read_config(path)


def _dummy_path(name: str) -> Path | None:
    """Return the path of a config.json; None for a preset."""
    if name in PRESETS:
        return None
    path = Path(name)
    path = path / "config.json" if _is(Path.is_dir, path) else path
    if not _is(Path.is_file, path):
        raise UnknownModelError(f"no preset or config.json {name!r}; presets: {', '.join(PRESETS)}")
    return path


def _is(question: Callable[[Path], bool], path: Path) -> bool:
    """Return a predicate of a path, and False for a name that cannot be one (too long for the file
    system).
    """
    try:
        return question(path)
    except OSError:
        return False


def _read_config(path: Path) -> "PretrainedConfig":
    from transformers import AutoConfig

    from coserve.models.vision_language import text_config

    check_config(path)
    try:
        return text_config(AutoConfig.from_pretrained(path))
    except (
        Exception
    ) as error:  # transformers validates with many error types; all of them mean a bad file
        raise ModelError(
            f"{path} is not a usable configuration: {' '.join(str(error).split())}"
        ) from error


def _fetch(name: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "tokenizer*", "*.jinja"] + ["model*.safetensors"] * with_weights
    try:
        # First this alone: nothing else is fetched of a model that is refused for its
        # configuration.
        check_config(Path(snapshot_download(name, allow_patterns="config.json")) / "config.json")
        return Path(snapshot_download(name, allow_patterns=patterns))
    except ModelError:
        raise
    except (
        Exception
    ) as error:  # network, authorisation, no such repository: the hub client's message says which
        reason = " ".join(str(error).split())[:300]
        raise UnknownModelError(
            f"{name!r} is neither a directory, nor {TINY}, nor a model that the hub gives: {reason}"
        ) from error
