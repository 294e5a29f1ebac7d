"""Shortens the imports of a process that starts: no garbage collection, and configurations without
models.

Reading a configuration with transformers imports its validators. They import
`transformers.activations` for the names of activation functions, and with it torch._dynamo,
torch.distributed.tensor and sympy: a second of computing. Few configurations are validated by these
names, so a mapping that imports the module when it is read takes its place.
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

_ACTIVATIONS = "transformers.activations"


@contextmanager
def without_collections() -> Iterator[None]:
    """Import without garbage collections, and leave out of later ones all objects that exist at the
    end.

    Modules stay for as long as the process lives. Collections during the imports take a third of a
    second and find nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def import_configurations() -> None:
    """Import what transformers needs to read configurations, without its activation functions.

    Call it before the process has threads: another thread could import the module that is replaced
    for this moment. A version of transformers that is built differently is imported as usual, by
    the code that reads a configuration.
    """
    transformers = import_module("transformers")
    if _ACTIVATIONS in sys.modules:
        return
    stand_in = ModuleType(_ACTIVATIONS)
    vars(stand_in)["ACT2FN"] = _Activations()
    sys.modules[_ACTIVATIONS] = stand_in
    try:
        with suppress(Exception):  # the usual import follows, and says what is wrong
            import_module("transformers.utils.type_validators")
    finally:
        del sys.modules[_ACTIVATIONS]
        if vars(transformers).get("activations") is stand_in:
            delattr(transformers, "activations")


class _Activations(Mapping[str, Any]):
    """Mapping of transformers from names to activation functions, imported when it is first
    read.
    """

    def __getitem__(self, name: str) -> Any:
        return _imported()[name]

    def __contains__(self, name: object) -> bool:
        return name in _imported()  # the inherited one would make the function

    def __iter__(self) -> Iterator[str]:
        return iter(_imported())

    def __len__(self) -> int:
        return len(_imported())


def _imported() -> Mapping[str, Any]:
    activations: Mapping[str, Any] = import_module(_ACTIVATIONS).ACT2FN
    return activations
