"""A small data set, settings, and what the tests of jobs ask of results."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

LINES = [
    {"text": "one copy of the weights"},
    {"prompt": "say ", "completion": "it now"},
    {"text": "hello you"},
    {"prompt": "a", "completion": "b c d e"},
    {"text": "learn while you serve"},
    {"text": "x"},
    {"prompt": "what is left over ", "completion": "is enough"},
]
DATA = "".join(json.dumps(line) + "\n" for line in LINES).encode()
# Seven examples in batches of three: nine steps.
QUICK: dict[str, Any] = {
    "hyperparameters": {"n_epochs": 3, "batch_size": 3},
    "extension": {
        "adapter": {"r": 3, "alpha": 6, "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "checkpoint_every_steps": 4,
    },
}
# Long enough to be met while it runs.
LONG: dict[str, Any] = {**QUICK, "hyperparameters": {"n_epochs": 50, "batch_size": 1}}


def steps_of(events: Iterable[Any], kind: str = "step") -> list[int]:
    return [event.data["step"] for event in events if event.kind == kind]


def adapter_in(directory: str | Path) -> dict[str, Tensor]:
    return load_file(Path(directory) / "adapter_model.safetensors")


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of any parameter; both must have the same."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
