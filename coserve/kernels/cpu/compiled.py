"""The C++ kernels as functions, of the library that `coserve.kernels.cpu_library` finds or
compiles.

`kernels.h` declares every kernel, once: the compiler compares the definitions with it, and the
arguments that Python may pass are read from it when the library is loaded.
"""

import ctypes
import logging
import re
import shutil
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from coserve.errors import KernelError
from coserve.kernels.cpu.processor import multiplies_bfloat16
from coserve.kernels.cpu_library import PREBUILT, SOURCES, BuiltLibrary, Progress, find_library

_log = logging.getLogger(__name__)


class _Tiles(IntEnum):
    """Results of `request_tiles` (see the header)."""

    NONE = 0
    BY_PAIRS = 1
    BY_AMX = 2


class Library:
    """The compiled functions, by name; and the abilities of this CPU."""

    def __init__(self, built: BuiltLibrary, openmp: Path) -> None:
        """Load a library, whose calls to OpenMP go to the given one, which is PyTorch's.

        Raises:
            OSError: it cannot be loaded.
            RuntimeError: it lacks a kernel that this processor can run.
        """
        self.build = built.build
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        found = ctypes.CDLL(str(built.path))
        # Products of tiles of bfloat16: by AMX, which a process must ask the system for, or by
        # pairs.
        tiles = _Tiles(found.request_tiles())
        self.has_amx = tiles is _Tiles.BY_AMX
        # Whether instructions for pairs of bfloat16 (AVX-512's) are the fastest; and whether there
        # are products of tiles, by either kind of instructions.
        self.has_pairs = tiles is _Tiles.BY_PAIRS and multiplies_bfloat16()
        self.has_tiles = self.has_amx or self.has_pairs
        missing_on_some = set[str]()
        for instructions, are_there in (
            ("AMX", self.has_amx),
            ("tiles", tiles is not _Tiles.NONE),
            ("pairs", tiles is _Tiles.BY_PAIRS),
        ):
            missing_on_some |= set() if are_there else kernels_for(instructions)
        for name, arguments in signatures().items():
            function = getattr(found, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, None
                setattr(self, name, function)
            elif name not in missing_on_some:
                raise RuntimeError(
                    f"error: {built.path.name} lacks the kernel {name}, which kernels.h declares"
                )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no kernel {name}")


def signatures() -> dict[str, list[Any]]:
    """Return the types of the arguments of every kernel, as its header declares them: addresses,
    int64 and doubles.
    """
    found = _declarations((SOURCES / "kernels.h").read_text())
    return {
        name: [_type(argument) for argument in arguments.split(",")] for name, arguments in found
    }


def kernels_for(instructions: str) -> set[str]:
    """Return the kernels that are only compiled for processors with such instructions: AMX, pairs
    or tiles. The comment of their group in the header names these in brackets.
    """
    groups = (SOURCES / "kernels.h").read_text().split("\n\n")
    said = f"({instructions})"
    return {
        name
        for group in groups
        if said in group.partition("\n")[0]
        for name, _ in _declarations(group)
    }


def _declarations(header: str) -> list[tuple[str, str]]:
    """Return names and arguments of the declared functions."""
    return re.findall(r"^void (\w+)\(([^)]*)\);", re.sub(r"//.*", "", header), re.MULTILINE)


def _type(argument: str) -> Any:
    if "*" in argument:
        return ctypes.c_void_p
    return {"i64": ctypes.c_int64, "double": ctypes.c_double}[argument.split()[0]]


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """The outcome of loading the kernels."""

    library: Library | None
    """The kernels; None: there are none."""
    why_not: str = ""
    """Why there is no library, as one line; "" where none is expected."""


_loaded: _Loaded | None = None


def compiled_kernels(progress: Progress | None = None) -> Library | None:
    """Return the kernels of this machine, loaded or compiled at the first call; None where they
    cannot be.

    Args:
        progress: called with the number of compiled files and of all, if this call compiles or
            waits for a compiler.
    """
    global _loaded
    if _loaded is None:
        _loaded = _load(progress)
        if _loaded.why_not:
            _log.warning("%s", _loaded.why_not)
    return _loaded.library


def why_not_compiled() -> str:
    """Return why the plain kernels run in place of these, as one line; "" if these run, or cannot
    run here at all.
    """
    compiled_kernels()
    assert _loaded is not None
    return _loaded.why_not


def forget_kernels() -> None:
    """Make the next `compiled_kernels` load them again."""
    global _loaded
    _loaded = None


def _load(progress: Progress | None) -> _Loaded:
    if not sys.platform.startswith("linux"):
        return _Loaded(library=None)
    openmp = _openmp()
    if openmp is None:
        return _Loaded(
            library=None, why_not="PyTorch has no GNU OpenMP here, so the slower plain kernels run"
        )
    try:
        return _Loaded(library=_load_from(find_library(progress), openmp))
    except (KernelError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return _Loaded(
            library=None,
            why_not=f"the CPU kernels could not be compiled, so the slower plain ones run: {error}",
        )


def _load_from(built: BuiltLibrary, openmp: Path) -> Library:
    try:
        return Library(built, openmp)
    except OSError:
        if built.path.parent != PREBUILT:
            raise
        # Built on a machine with a newer C library than this one's.
        _log.info("%s cannot be loaded here, so the CPU kernels are compiled", built.path.name)
        return Library(find_library(may_be_prebuilt=False), openmp)
    finally:
        if not built.is_kept:
            shutil.rmtree(built.path.parent, ignore_errors=True)


def _openmp() -> Path | None:
    """Return PyTorch's own OpenMP library: with another one, threads of both would wait for each
    other's cores.
    """
    package = Path(torch.__file__).parent
    found = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    return found[0] if found else None
