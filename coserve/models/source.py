"""Where a model comes from: a directory, a hub id, the package itself (`tiny`), or a shape without weights
(`dummy:…`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coserve.errors import ModelError, UnknownModelError, UnsupportedModelError
from coserve.models.families import require_family
from coserve.models.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DUMMY = "dummy:"
# The small model that comes with the package (its card: tiny/README.md).
TINY = "tiny"
_TINY_DIRECTORY = Path(__file__).parent / "tiny"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that has been found: its name as given, its configuration, and its weights' directory (None: random
    weights).
    """

    name: str
    config: "PretrainedConfig"
    directory: Path | None


def find_model(name: str, *, with_weights: bool = True) -> ModelSource:
    """Find a model and read its configuration.

    Args:
        name: a directory in Hugging Face's layout, a hub id ("org/name"), "tiny" for the built-in model (a directory
        of that name is "./tiny"), "dummy:<preset>", or "dummy:<path to a config.json>".
        with_weights: whether a hub model's weights are fetched too, or only its configuration.

    Raises:
        UnknownModelError: nothing is there. UnsupportedModelError: the family is not one of ours, or the weights are
        quantised.
    """
    if name.startswith(_DUMMY):
        return ModelSource(name=name, config=_dummy_config(name.removeprefix(_DUMMY)), directory=None)
    directory = _TINY_DIRECTORY if name == TINY else Path(name)
    if not name or not _is(Path.is_dir, directory):
        if not name or _is(Path.exists, directory) or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UnknownModelError(
                f"{name!r} is not a directory; give one that holds config.json and *.safetensors, or the name {TINY}"
            )
        directory = _fetch(name, with_weights)
    return ModelSource(name=name, config=_read_config(directory / "config.json"), directory=directory)


def _dummy_config(name: str) -> "PretrainedConfig":
    from transformers import AutoConfig

    if name in PRESETS:
        return AutoConfig.for_model(**PRESETS[name])
    path = Path(name)
    path = path / "config.json" if _is(Path.is_dir, path) else path
    if not _is(Path.is_file, path):
        raise UnknownModelError(f"no preset or config.json {name!r}; presets: {', '.join(PRESETS)}")
    return _read_config(path)


def _is(question: Callable[[Path], bool], path: Path) -> bool:
    """Ask about a path that may be no path at all (too long for the file system)."""
    try:
        return question(path)
    except OSError:
        return False


def _read_config(path: Path) -> "PretrainedConfig":
    from transformers import AutoConfig

    if not path.is_file():
        raise UnknownModelError(f"{path.parent} has no config.json; give a directory in Hugging Face's layout")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    require_family(raw.get("model_type"))
    if raw.get("quantization_config"):
        raise UnsupportedModelError(
            f"{path} describes quantised weights; give the model in float32, float16 or bfloat16"
        )
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers validates with many error types; all of them mean a bad file
        raise ModelError(f"{path} is not a usable configuration: {' '.join(str(error).split())}") from error


def _fetch(name: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "tokenizer*", "*.jinja"] + ["model*.safetensors"] * with_weights
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # network, authorisation, no such repository: the hub client's message says which
        reason = " ".join(str(error).split())[:300]
        raise UnknownModelError(
            f"{name!r} is neither a directory, nor {TINY}, nor a model that the hub gives: {reason}"
        ) from error
