"""Fused kernels for CPUs, in C++: compiled for this machine when they are first wanted, and kept on disk.

PyTorch runs a small operation of many passes as that many operations; here they are one, on the threads that PyTorch
has. Each kernel has a plain twin in PyTorch, which runs where these cannot: without g++, on other systems, or when the
environment says `COSERVE_KERNELS=plain`. Both give the same results, to rounding.

Callers (`coserve/kernels/*.py`) ask `compiled_kernels()`, and see to it that tensors are as a kernel wants them:
contiguous unless it says otherwise.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coserve.home import home_directory

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
# Sums may be made in any order, and nobody reads error numbers; infinities and NaN stay what they are.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)
_COMPILE_S = 120.0
# Arguments of each function: t a tensor's address, i an int64, d a double.
_SIGNATURES = {
    "attention_backward": "ttttttttt iiiiii d i",
    "attention_forward": "ttttt iiiiii d i",
    "product": "tittt iii i",
    "to_low_rank": "titit iii i",
    "from_low_rank": "titi ti iii i",
    "low_rank_gradient": "tititi iii i",
    "paged_attention_bfloat16": "tttttttt iiiiiii d i",
    "paged_attention_float32": "tttttttt iiiiiii d i",
    "rms_norm": "titt iii d ii",
    "rms_norm_gradient": "titittt iii d ii",
    "silu_mul": "titit ii ii",
    "silu_mul_gradient": "tititittt ii ii",
    "rope": "tititit iiii ii",
    "cross_entropy": "titttt ii ii",
    "cross_entropy_gradient": "titttt ii ii",
    "argmax": "tit ii ii",
}


class Library:
    """The compiled functions, by name; and what this CPU can do."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded."""
        found = ctypes.CDLL(str(path))
        kinds = {"t": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
        for name, arguments in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = [kinds[kind] for kind in arguments if kind != " "], None
            setattr(self, name, function)
        # Instructions for products of tiles of bfloat16 (AMX), which a process must ask the system for.
        self.has_tiles = bool(found.request_tiles())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no kernel {name}")


@cache
def compiled_kernels() -> Library | None:
    """The kernels of this machine, compiled when this is first called; None where the plain twins must run."""
    if os.environ.get("COSERVE_KERNELS") == "plain" or not sys.platform.startswith("linux"):
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


_ROW_DTYPES = frozenset({torch.float32, torch.bfloat16})


def kernels_for_rows(first: Tensor, *others: Tensor) -> Library | None:
    """The kernels, if they can work on these matrices (and vectors): float32 or bfloat16, all of one dtype, and no gaps
    within a row, however far apart rows lie.
    """
    dtype = first.dtype
    if dtype not in _ROW_DTYPES or not first.is_cpu or first.stride(-1) != 1:
        return None
    for tensor in others:
        if tensor.dtype != dtype or not tensor.is_cpu or tensor.stride(-1) != 1:
            return None
    return compiled_kernels()


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
