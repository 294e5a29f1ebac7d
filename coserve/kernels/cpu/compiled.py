"""The C++ kernels as functions: compiled for this machine when they are first wanted, and kept on disk.

`kernels.h` declares every kernel, once: the compiler holds the definitions against it, and the arguments that Python
may give are read from it when the library is loaded.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch

from coserve.home import home_directory, is_trusted, make_private
from coserve.kernels.cpu.processor import multiplies_bfloat16

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
# Sums may be made in any order, and nobody reads error numbers; infinities and NaN stay what they are.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)
_COMPILE_S = 120.0


class _Tiles(IntEnum):
    """See `request_tiles` in the header."""

    NONE = 0
    BY_PAIRS = 1
    BY_AMX = 2


class Library:
    """The compiled functions, by name; and what this CPU can do."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded, RuntimeError if it lacks a kernel that this processor can run."""
        found = ctypes.CDLL(str(path))
        # Products of tiles of bfloat16: by AMX, which a process must ask the system for, or by pairs.
        tiles = _Tiles(found.request_tiles())
        self.has_amx = tiles is _Tiles.BY_AMX
        # Whether instructions for pairs of bfloat16 (AVX-512's) are the fastest; and products of tiles by whichever.
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
                raise RuntimeError(f"error: {path.name} lacks the kernel {name}, which kernels.h declares")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no kernel {name}")


def signatures() -> dict[str, list[Any]]:
    """The types of the arguments of every kernel, as its header declares them: addresses, int64 and doubles."""
    found = _declarations((_SOURCES / "kernels.h").read_text())
    return {name: [_type(argument) for argument in arguments.split(",")] for name, arguments in found}


def kernels_for(instructions: str) -> set[str]:
    """Those that are compiled for processors with such instructions alone, AMX, pairs or tiles: of groups whose comment
    in the header says so in brackets.
    """
    groups = (_SOURCES / "kernels.h").read_text().split("\n\n")
    said = f"({instructions})"
    return {name for group in groups if said in group.partition("\n")[0] for name, _ in _declarations(group)}


def _declarations(header: str) -> list[tuple[str, str]]:
    """Names and arguments."""
    return re.findall(r"^void (\w+)\(([^)]*)\);", re.sub(r"//.*", "", header), re.MULTILINE)


def _type(argument: str) -> Any:
    if "*" in argument:
        return ctypes.c_void_p
    return {"i64": ctypes.c_int64, "double": ctypes.c_double}[argument.split()[0]]


@cache
def compiled_kernels() -> Library | None:
    """The kernels of this machine, compiled when this is first called; None where they cannot be."""
    if not sys.platform.startswith("linux"):
        return None
    openmp = _openmp()
    if openmp is None:
        _log.info("PyTorch has no OpenMP of GNU's here: the plain kernels run")
        return None
    try:
        return _library(_directory(), _identity(openmp), openmp)
    except (OSError, RuntimeError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        lines = [line for line in said if "error" in line] or said or [repr(error)]
        _log.warning("the CPU kernels could not be compiled, so the slower plain ones run: %s", lines[0])
        return None


def own_flags() -> list[str]:
    """Flags of the compiler that somebody has asked for. Raises ValueError if they cannot be told apart."""
    return shlex.split(os.environ.get("COSERVE_CXXFLAGS", ""))


def _directory() -> Path:
    return home_directory() / "kernels"


def _openmp() -> Path | None:
    """PyTorch's own OpenMP library: with another one, threads of both would wait for each other's cores."""
    package = Path(torch.__file__).parent
    found = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    return found[0] if found else None


def _identity(openmp: Path) -> str:
    """What the compiled kernels depend on."""
    digest = hashlib.sha256()
    for path in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(path.read_bytes())
    processor = ""
    with suppress(OSError):  # a home may be shared by machines
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest.update(repr((_FLAGS, *own_flags(), str(openmp), processor, platform.libc_ver())).encode())
    return digest.hexdigest()[:24]


def _library(directory: Path, identity: str, openmp: Path) -> Library:
    """From what was compiled before, or compiled now; kept where no other user can put code."""
    if (kept := _kept(directory, identity)) is not None:
        return Library(kept)
    if make_private(directory):
        return Library(_compile(directory, identity, openmp))
    _log.warning("%s is not this user's alone, so the CPU kernels are compiled at every start", directory)
    with tempfile.TemporaryDirectory(prefix="coserve-kernels-") as place:
        return Library(_compile(Path(place), identity, openmp))


def _kept(directory: Path, identity: str) -> Path | None:
    """What was compiled before. Its name ends with a digest of it, since a damaged library would kill the process; and
    nobody else may have written it, since it runs as this user.
    """
    for path in directory.glob(f"{identity}-*.so"):
        if not is_trusted(path):
            _log.warning("another user can write %s, so it is not loaded: the CPU kernels are compiled anew", path)
        elif path.stem == f"{identity}-{_digest(path)}":
            return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _compile(directory: Path, identity: str, openmp: Path) -> Path:
    _log.info("compiling the CPU kernels, once")

    def run(*arguments: str | Path) -> None:
        command = ["g++", *_FLAGS, *own_flags(), *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)

    with tempfile.TemporaryDirectory(dir=directory) as place, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {source: Path(place) / f"{source.stem}.o" for source in sorted(_SOURCES.glob("*.cpp"))}
        for compiled in [pool.submit(run, "-c", source, "-o", made) for source, made in objects.items()]:
            compiled.result()
        made = Path(place) / "kernels.so"
        # Of two OpenMP libraries only the one named here.
        run("-shared", "-Wl,--as-needed", *objects.values(), openmp, "-o", made)
        made.chmod(0o600)
        # At once: another process may be doing the same.
        return made.replace(directory / f"{identity}-{_digest(made)}.so")
