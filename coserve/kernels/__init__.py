"""Kernels: what may have a fast version on some device, one folder per backend (see `base.py`).

Every backend is tested against `plain/`. Which one runs is decided once per model, by `find_backend`.
"""

import os
from importlib import import_module
from pkgutil import iter_modules

import torch

from coserve.errors import ModelError
from coserve.kernels.base import Backend

# Modules of this folder that are no backends.
_SHARED = frozenset({"attention", "base", "bits", "dropout", "transfer", "weights"})


def backend_names() -> list[str]:
    """The folders (and modules) that are backends."""
    return sorted(module.name for module in iter_modules(__path__) if module.name not in _SHARED)


def find_backend(device: torch.device, name: str | None = None) -> Backend:
    """The backend for a device: the one that is named, or `$COSERVE_KERNELS`, or the best that is available there.

    ModelError for a name that there is none of, or that cannot run on this device.
    """
    name = name or os.environ.get("COSERVE_KERNELS") or None
    if name is None:
        classes = [found for each in backend_names() if (found := _backend(each)).is_available(device)]
        return max(classes, key=lambda found: found.priority)(device)
    if name not in backend_names():
        raise ModelError(f"no kernels {name!r}; known: {', '.join(backend_names())}")
    if not (found := _backend(name)).is_available(device):
        raise ModelError(f"the kernels {name!r} cannot run on {device}")
    return found(device)


def _backend(name: str) -> type[Backend]:
    found: type[Backend] = import_module(f"{__name__}.{name}").BACKEND
    return found
