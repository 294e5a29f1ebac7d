"""Results of full fine-tuning, read where the model that they were made from serves."""

import json
from pathlib import Path

from coserve.adapters.base import Adapter
from coserve.adapters.file_names import FULL_FILE
from coserve.adapters.full_weights import FullWeights
from coserve.adapters.peft_directory import Taking, adapter_config
from coserve.errors import AdapterError
from coserve.models.backbone import Backbone


def serve_full_model(backbone: Backbone, directory: Path, taking: Taking) -> Adapter:
    """Overwrite the weights that serve with those in a directory of `FullWeights.save`, and return
    the adapter that names them.

    Args:
        taking: see `load_adapter`.

    Raises:
        AdapterError: there are none, or they are of another model.
        ModelError: the files cannot be read.
    """
    try:
        config = adapter_config(json.loads((directory / FULL_FILE).read_text()))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{directory} is not what full fine-tuning has made: {error}") from None
    with taking(str(directory), config.sizes(backbone.architecture)):
        adapter = config.create(backbone, seed=0)
        if not isinstance(adapter, FullWeights):
            raise AdapterError(f"{directory} is not what full fine-tuning has made, but an adapter")
        adapter.restore(directory)
        return adapter.snapshot()
