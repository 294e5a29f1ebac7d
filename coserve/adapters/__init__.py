"""Adapters: PEFT methods as bypasses, one file per method, and PEFT's directory format.

Importing this package is cheap, so that what only names an adapter's files starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coserve.adapters.base import Adapter, AdapterConfig
    from coserve.adapters.methods.lora import LoraConfig
    from coserve.adapters.peft_directory import load_adapter, save_adapter

_MODULE = {
    **dict.fromkeys(("Adapter", "AdapterConfig"), "coserve.adapters.base"),
    "LoraConfig": "coserve.adapters.methods.lora",
    **dict.fromkeys(("load_adapter", "save_adapter"), "coserve.adapters.peft_directory"),
}
__all__ = ["Adapter", "AdapterConfig", "LoraConfig", "load_adapter", "save_adapter"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE[name]), name)
