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
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from coserve.home import home_directory

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
# Sums may be made in any order, and nobody reads error numbers; infinities and NaN stay what they are.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)
_COMPILE_S = 120.0


class Library:
    """The compiled functions, by name; and what this CPU can do."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded."""
        found = ctypes.CDLL(str(path))
        for name, arguments in signatures().items():
            if (function := getattr(found, name, None)) is not None:  # some are for processors with AMX alone
                function.argtypes, function.restype = arguments, None
                setattr(self, name, function)
        # Instructions for products of tiles of bfloat16 (AMX), which a process must ask the system for.
        self.has_amx = bool(found.request_amx())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no kernel {name}")


def signatures() -> dict[str, list[Any]]:
    """The types of the arguments of every kernel, as its header declares them: addresses, int64 and doubles."""
    header = re.sub(r"//.*", "", (_SOURCES / "kernels.h").read_text())
    found = re.findall(r"^void (\w+)\(([^)]*)\);", header, re.MULTILINE)
    return {name: [_type(argument) for argument in arguments.split(",")] for name, arguments in found}


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
        directory, identity = _directory(), _identity(openmp)
        return Library(_kept(directory, identity) or _compile(directory, identity, openmp))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        lines = [line for line in said if "error" in line] or said or [repr(error)]
        _log.warning("the CPU kernels could not be compiled, so the slower plain ones run: %s", lines[0])
        return None


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
    digest.update(repr((_FLAGS, str(openmp), processor, platform.libc_ver())).encode())
    return digest.hexdigest()[:24]


def _kept(directory: Path, identity: str) -> Path | None:
    """What was compiled before. Its name ends with a digest of it, since a damaged library would kill the process."""
    whole = (path for path in directory.glob(f"{identity}-*.so") if path.stem == f"{identity}-{_digest(path)}")
    return next(whole, None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _compile(directory: Path, identity: str, openmp: Path) -> Path:
    _log.info("compiling the CPU kernels, once")
    directory.mkdir(parents=True, exist_ok=True)

    def run(*arguments: str | Path) -> None:
        command = ["g++", *_FLAGS, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)

    with tempfile.TemporaryDirectory(dir=directory) as place, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {source: Path(place) / f"{source.stem}.o" for source in sorted(_SOURCES.glob("*.cpp"))}
        for compiled in [pool.submit(run, "-c", source, "-o", made) for source, made in objects.items()]:
            compiled.result()
        made = Path(place) / "kernels.so"
        # Of two OpenMP libraries only the one named here.
        run("-shared", "-Wl,--as-needed", *objects.values(), openmp, "-o", made)
        # At once: another process may be doing the same.
        return made.replace(directory / f"{identity}-{_digest(made)}.so")
