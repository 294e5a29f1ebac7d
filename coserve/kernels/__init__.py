"""Kernels: everything that may have a fast version on some device, one folder per backend
(`base.py`).

Every backend is tested against `plain/`. Which one runs is decided once per model, by
`find_backend`. The folder `groups/` is not a backend: it has the collectives between ranks.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from coserve.discovery import variant_module, variant_names
from coserve.errors import ModelError

if TYPE_CHECKING:  # `coserve.kernels.cpu_library` runs before PyTorch is imported
    import torch

    from coserve.kernels.base import Backend


def backend_names() -> tuple[str, ...]:
    """Return the backends: the folders here but for `groups`. Files are what backends share."""
    return tuple(name for name in variant_names(__path__, folders_only=True) if name != "groups")


def names_for(device: "torch.device") -> tuple[str, ...]:
    """Return the backends that run on a device."""
    return tuple(name for name in backend_names() if _backend(name).is_available(device))


def find_backend(device: "torch.device", name: str | None = None) -> "Backend":
    """Return the backend for a device: the one that is named, or `$COSERVE_KERNELS`, or the best
    that is available there.

    Raises:
        ModelError: there is no backend of this name, or it cannot run on this device.
    """
    name = name or os.environ.get("COSERVE_KERNELS") or None
    if name is None:
        return max(map(_backend, names_for(device)), key=lambda found: found.priority)(device)
    if name not in backend_names():
        raise ModelError(f"no kernels {name!r}; known: {', '.join(backend_names())}")
    if not (found := _backend(name)).is_available(device):
        raise ModelError(
            f"the kernels {name!r} cannot run on {device}; these can: "
            f"{', '.join(names_for(device))}"
        )
    return found(device)


def prepare_backends(
    device: "torch.device", progress: Callable[[int, int], None] | None = None
) -> None:
    """Prepare the backends of a device, which compile their kernels once.

    `find_backend` would do the same without reporting progress.

    Args:
        progress: called with the number of finished parts, and of all.
    """
    for name in (
        [os.environ["COSERVE_KERNELS"]] if os.environ.get("COSERVE_KERNELS") else backend_names()
    ):
        if name in backend_names():
            _backend(name).prepare(device, progress)


def why_slow(backend: "Backend") -> str:
    """Return why a faster backend of this device does not run, as one line for users; "" if none is
    missing.
    """
    if os.environ.get("COSERVE_KERNELS"):
        return ""
    faster = (each for each in map(_backend, backend_names()) if each.priority > backend.priority)
    return next((reason for each in faster if (reason := each.why_unavailable(backend.device))), "")


def _backend(name: str) -> "type[Backend]":
    found: type[Backend] = variant_module(__name__, name).BACKEND
    return found
