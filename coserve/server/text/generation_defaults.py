"""A model's defaults for sampling, from `generation_config.json`."""

import json
import logging
from pathlib import Path
from typing import Any

from coserve.devices.sampling_params import SamplingParams
from coserve.errors import ModelError

_log = logging.getLogger(__name__)

FILE = "generation_config.json"
# Fields that vLLM takes, too; whether to sample at all (`do_sample`) is up to the request.
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_defaults(model: Path | None, choice: str) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the file sets.

    Errors in the model's own file are only logged.

    Args:
        model: Directory of the model.
        choice: "auto" for the model's own file, if it has one; "none"; or a directory with another.

    Raises:
        ModelError: The other file cannot be read, or has invalid values.
    """
    directory = {"auto": model, "none": None}.get(choice, Path(choice))
    if directory is None or (choice == "auto" and not (directory / FILE).exists()):
        return {}
    try:
        return _read(directory / FILE)
    except (OSError, ValueError, RecursionError) as error:
        message = f"{directory / FILE} cannot be used: {error}"
        if choice != "auto":
            raise ModelError(message) from None
        _log.warning("%s", message)
        return {}


def _read(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    if not isinstance(data, dict):
        raise ValueError("it must contain a JSON object")
    defaults = {name: data[name] for name in _NAMES if data.get(name) is not None}
    SamplingParams(**defaults)  # checks them
    return defaults
