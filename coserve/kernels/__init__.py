"""Kernels: what may have a fast version on some device, one folder per backend (see `base.py`).

Every backend is tested against `plain/`. Which one runs is decided once per model, by `find_backend`.
"""

import os

import torch

from coserve.discovery import variant_module, variant_names
from coserve.errors import ModelError
from coserve.kernels.base import Backend


def backend_names() -> tuple[str, ...]:
    """The folders here: each is a backend, and files are what they share."""
    return variant_names(__path__, folders_only=True)


def names_for(device: torch.device) -> tuple[str, ...]:
    """The backends that run on a device."""
    return tuple(name for name in backend_names() if _backend(name).is_available(device))


def find_backend(device: torch.device, name: str | None = None) -> Backend:
    """The backend for a device: the one that is named, or `$COSERVE_KERNELS`, or the best that is available there.

    ModelError for a name that there is none of, or that cannot run on this device.
    """
    name = name or os.environ.get("COSERVE_KERNELS") or None
    if name is None:
        return max(map(_backend, names_for(device)), key=lambda found: found.priority)(device)
    if name not in backend_names():
        raise ModelError(f"no kernels {name!r}; known: {', '.join(backend_names())}")
    if not (found := _backend(name)).is_available(device):
        raise ModelError(f"the kernels {name!r} cannot run on {device}; these can: {', '.join(names_for(device))}")
    return found(device)


def _backend(name: str) -> type[Backend]:
    found: type[Backend] = variant_module(__name__, name).BACKEND
    return found
