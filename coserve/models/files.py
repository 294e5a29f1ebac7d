"""Files of a model in Hugging Face's layout: what can be read, and refused, by their names and
`config.json` alone.

Nothing heavy is imported here: `coserve up` refuses a model as soon as its configuration is read.
"""

import json
from pathlib import Path
from typing import Any

from coserve.errors import ModelError, UnknownModelError, UnsupportedModelError, WeightsError
from coserve.models.families import require_family
from coserve.models.quantised import quantisation_of

_INDEX = "model.safetensors.index.json"
# An index of a hundred thousand tensors has some ten megabytes.
_MAX_JSON_BYTES = 64 << 20
# Ends of the names of classes that generate text, the usual one first: `architectures` in
# config.json names the class that was saved.
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def check_config(path: Path) -> None:
    """Check a config.json.

    Raises:
        UnknownModelError: there is none.
        ModelError: it is damaged.
        UnsupportedModelError: it describes a model that is not supported.
    """
    if not path.is_file():
        if found := sorted(path.parent.glob("*.gguf")):
            raise gguf_error(found[0])
        raise UnknownModelError(
            f"{path.parent} has no config.json; give a directory in Hugging Face's layout"
        )
    try:
        config = _read_json(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(config).__name__}")
    require_family(config.get("model_type"))
    _require_generation(path, config.get("architectures"))
    try:
        quantisation_of(config.get("quantization_config"))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ModelError(f"{path}: quantization_config cannot be used: {error!r}") from None


def _read_json(path: Path) -> Any:
    """Read a small JSON file of a model.

    Raises:
        ValueError: it is not JSON, nested too deeply or far too long.
    """
    with path.open("rb") as file:
        content = file.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        raise ValueError(f"it is longer than {_MAX_JSON_BYTES:,} bytes")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _require_generation(path: Path, architectures: Any) -> None:
    if not architectures:  # not every file has the field
        return
    names = (
        [str(name) for name in architectures]
        if isinstance(architectures, list)
        else [str(architectures)]
    )
    if not any(name.endswith(_GENERATES) for name in names):
        raise UnsupportedModelError(
            f"{path} describes {', '.join(names)}, which does not generate text; give a model "
            f"whose class ends with "
            f"{_GENERATES[0]}"
        )


def gguf_error(path: Path) -> UnsupportedModelError:
    """Return the error for a GGUF file."""
    return UnsupportedModelError(
        f"{path} is a GGUF file, which is not read here; give the directory, or the hub's name, of "
        f"the model that it "
        "was made from, with config.json and *.safetensors"
    )


def weight_files(directory: Path) -> list[Path]:
    """Return the files that transformers would read: one whole, or the shards of an index.

    Raises:
        WeightsError: they are not all there.
    """
    whole, index = directory / "model.safetensors", directory / _INDEX
    if whole.exists():
        return [whole]
    if index.is_file():
        try:
            names = sorted(set(_read_json(index)["weight_map"].values()))
            if outside := [
                name for name in names if not name or Path(name).name != name or name == ".."
            ]:
                raise ValueError(f"{outside[0]!r} is not the name of a file beside it")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is not a safetensors index: {error!r}") from None
        files = [directory / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise WeightsError(f"{directory} lacks {some_of(missing)}, which its index names")
        return files
    if files := sorted(directory.glob("model-*-of-*.safetensors")):
        return files
    others = [
        path.name
        for pattern in ("*.safetensors", "*.bin", "*.pth")
        for path in sorted(directory.glob(pattern))
    ]
    found = f" (found {some_of(others)}); {_conversion(directory)}" if others else ""
    raise WeightsError(f"{directory} has no model.safetensors, and no shards of one{found}")


def _conversion(directory: Path) -> str:
    """Return the command that writes other files' weights as safetensors beside them."""
    name = repr(str(directory))
    code = (
        "from transformers import AutoModelForCausalLM as M; "
        f"M.from_pretrained({name}).save_pretrained({name})"
    )
    return f'convert it by: python -c "{code}"'


def some_of(names: list[str]) -> str:
    """Return a few names, and how many more there are, as text."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
