"""The shared library of CPU kernels on disk: shipped with the package, compiled earlier, or
compiled now.

A library that was compiled here lies in the cache of this user and machine, which all homes share.
This module imports no PyTorch, so that the compiler can already run while a server still imports
it:

    # Compile in the background for a process; returns at once.
    python -m coserve.kernels.cpu_library PID
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coserve.errors import KernelError
from coserve.home import cache_directory, is_trusted, make_private

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
PREBUILT = SOURCES / "prebuilt"

# Sums may be made in any order, and nobody reads error numbers; infinities and NaN stay what they
# are.
FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)
_NATIVE = ("-march=native",)
# Seconds of the processor for one file: unlike seconds of the clock, a busy machine does not use
# them up. The largest file takes three on a Xeon of 2023.
_MAX_CPU_S = 300
# Guard against a compiler that hangs without computing.
_MAX_WALL_S = 3600
_POLL_S = 0.1
# Pauses before a compilation in the background that failed is tried again.
_RETRY_S = (60.0, 600.0)

# Called with the number of compiled files and the number of all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A build for one class of x86-64 processors."""

    name: str
    """Name of the variant, part of its file's name."""
    flags: tuple[str, ...]
    """Flags of the compiler beside `FLAGS`."""
    features: frozenset[str]
    """Names in the line of flags of /proc/cpuinfo that a processor must have."""


_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_FLAGS = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_BF16_FLAGS = (
    "-mavx512bf16",
    "-mavx512vnni",
    "-mavx512vbmi",
    "-mavx512vbmi2",
    "-mavx512bitalg",
    "-mavx512vpopcntdq",
)
_BF16 = _V4 | {
    "avx512_bf16",
    "avx512_vnni",
    "avx512vbmi",
    "avx512_vbmi2",
    "avx512_bitalg",
    "avx512_vpopcntdq",
}
_AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
# The fastest first.
VARIANTS = (
    Variant(
        name="amx",
        flags=(*_V4_FLAGS, *_BF16_FLAGS, *_AMX_FLAGS, "-mtune=sapphirerapids"),
        features=_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
    ),
    Variant(name="avx512-bf16", flags=(*_V4_FLAGS, *_BF16_FLAGS), features=_BF16),
    Variant(name="x86-64-v4", flags=_V4_FLAGS, features=_V4),
    Variant(name="x86-64-v3", flags=("-march=x86-64-v3",), features=_V3),
)


@dataclass(frozen=True, kw_only=True)
class BuiltLibrary:
    """A library that can be loaded on this machine."""

    path: Path
    """The library's file."""
    build: str
    """Name of the prebuilt variant, or "native" if it was compiled on this machine."""
    is_kept: bool = True
    """Whether the file stays; the loader removes one that cannot be kept safely."""


def find_library(progress: Progress | None = None, *, may_be_prebuilt: bool = True) -> BuiltLibrary:
    """Return the library for this machine; compile it if there is none.

    One process of this user compiles at a time, and the others wait for it.

    Args:
        progress: called while this process compiles, or waits for another one that does.
        may_be_prebuilt: whether one that comes with the package will do.

    Raises:
        KernelError: it cannot be compiled; the message has the compiler's first error.
        ValueError: COSERVE_CXXFLAGS cannot be split into words.
    """
    found = existing_library(may_be_prebuilt=may_be_prebuilt)
    if found is not None:
        return found
    directory, identity = library_directory(), _identity()
    if not _make_private(directory):
        _log.warning(
            "%s is not this user's alone, so the CPU kernels are compiled at every start", directory
        )
        path = _compile(Path(tempfile.mkdtemp(prefix="coserve-kernels-")), identity, progress)
        return BuiltLibrary(path=path, build="native", is_kept=False)
    failure = _failure_file(directory, identity)
    with _compiling_alone(directory, identity, progress):
        try:
            path = _kept(directory, identity) or _compile(directory, identity, progress)
        except KernelError as error:
            with suppress(OSError):
                failure.write_text(str(error))
            raise
        failure.unlink(missing_ok=True)
    return BuiltLibrary(path=path, build="native")


def existing_library(*, may_be_prebuilt: bool = True) -> BuiltLibrary | None:
    """Return the library for this machine if nothing has to be compiled for it."""
    if may_be_prebuilt and not own_flags() and (variant := _prebuilt_variant()) is not None:
        return BuiltLibrary(path=prebuilt_path(variant), build=variant.name)
    path = _kept(library_directory(), _identity())
    return None if path is None else BuiltLibrary(path=path, build="native")


def why_none() -> str:
    """Return why the plain kernels would run at the next start, as one line; "" if compiled ones
    would, or may.
    """
    if not sys.platform.startswith("linux") or existing_library() is not None:
        return ""
    if shutil.which("g++") is None:
        return (
            "there is no g++ to compile the CPU kernels with, so the slower plain ones run: "
            "install g++"
        )
    with suppress(OSError):
        reason = _failure_file(library_directory(), _identity()).read_text()
        return (
            "the CPU kernels could not be compiled at the last start, so the slower plain ones "
            f"ran: {reason}"
        )
    return ""


def start_compiling() -> None:
    """Start a process that compiles the library if there is none, and return without waiting for
    it.

    It is detached, and its result is kept even if the caller ends in the meantime. A failed
    compilation is tried again while the caller lives.
    """
    if not sys.platform.startswith("linux") or shutil.which("g++") is None:
        return
    with suppress(OSError, ValueError):
        if existing_library() is None:
            command = [sys.executable, "-m", __name__, str(os.getpid())]
            # Files of the caller's that stayed open would keep those waiting who read them to their
            # end.
            closed = subprocess.DEVNULL
            subprocess.run(command, check=False, stdin=closed, stdout=closed, stderr=closed)


def own_flags() -> list[str]:
    """Return the compiler flags of COSERVE_CXXFLAGS; ValueError if they cannot be split into
    words.
    """
    return shlex.split(os.environ.get("COSERVE_CXXFLAGS", ""))


def library_directory() -> Path:
    """Return where compiled libraries are kept: one directory for all homes of a user."""
    return cache_directory() / "kernels"


def source_files() -> list[Path]:
    """Return the C++ files that become the library, from the folders of all instruction sets."""
    return sorted(SOURCES.rglob("*.cpp"))


# -- builds that come with the package --------------------------------------------------------


def prebuilt_path(variant: Variant) -> Path:
    """Return where the package has a variant's library; its name changes with the sources and
    flags.
    """
    digest = hashlib.sha256(_sources_digest().encode() + repr((FLAGS, variant.flags)).encode())
    return PREBUILT / f"{variant.name}-{digest.hexdigest()[:16]}.so"


def build_variant(variant: Variant, path: Path) -> None:
    """Compile a variant into a file, for a wheel; KernelError if the compiler fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        _compile_into(Path(place), variant.flags, None).replace(path)


def _prebuilt_variant() -> Variant | None:
    """Return the fastest variant that the package has and this processor can run."""
    if platform.machine() != "x86_64":
        return None
    features = set(_processor_flags().split())
    return next(
        (each for each in VARIANTS if each.features <= features and prebuilt_path(each).is_file()),
        None,
    )


# -- libraries that were compiled earlier -----------------------------------------------------


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in [*source_files(), *sorted(SOURCES.rglob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _processor_flags() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return ""


def _identity() -> str:
    """Return a digest of what a compiled library depends on, apart from the compiler."""
    parts = (_sources_digest(), FLAGS, own_flags(), _processor_flags(), platform.libc_ver())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@cache
def _compiler(command: str | None) -> str:
    """Return the compiler's version, or "*" if there is no compiler: then the library of any
    version fits.
    """
    if command is None:
        return "*"
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            [command, "-dumpfullversion"], check=True, capture_output=True, text=True, timeout=60
        )
        return f"gcc{found.stdout.strip()}"
    return "*"


def _kept(directory: Path, identity: str) -> Path | None:
    """Return the library that was compiled earlier, if it is intact and only this user or root can
    have written it.

    Its name ends with a digest of its content, because loading a damaged library would kill the
    process.
    """
    for path in directory.glob(f"{identity}-{_compiler(shutil.which('g++'))}-*.so"):
        if not is_trusted(path):
            _log.warning(
                "another user can write %s, so it is not loaded: the CPU kernels are compiled anew",
                path,
            )
        elif path.stem.rpartition("-")[2] == _digest(path):
            return path
    return None


def _make_private(directory: Path) -> bool:
    """Close the directory to other users, and remove the libraries that others may have put there
    while it was open.

    Returns:
        Whether nobody but this user can put files there now.
    """
    was_open = directory.is_dir() and bool(directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if not make_private(directory):
        return False
    for path in directory.glob("*.so") if was_open else ():
        path.unlink()
    return True


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


# -- compiling --------------------------------------------------------------------------------


@contextmanager
def _compiling_alone(directory: Path, identity: str, progress: Progress | None) -> Iterator[None]:
    """Hold the lock of one library; until then report the progress of the process that has it."""
    with (directory / f"{identity}.lock").open("a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if (
                    progress is not None
                    and (shown := _read_progress(directory, identity)) is not None
                ):
                    progress(*shown)
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            _progress_file(directory, identity).unlink(missing_ok=True)


def _progress_file(directory: Path, identity: str) -> Path:
    return directory / f"{identity}.progress"


def _failure_file(directory: Path, identity: str) -> Path:
    return directory / f"{identity}.failed"


def _read_progress(directory: Path, identity: str) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        done, total = _progress_file(directory, identity).read_text().split()
        return int(done), int(total)
    return None


def _compile(directory: Path, identity: str, progress: Progress | None) -> Path:
    """Compile for this processor and keep the result under a name that says what it was made
    from.
    """

    def report(done: int, total: int) -> None:
        with suppress(OSError):
            _progress_file(directory, identity).write_text(f"{done} {total}")
        if progress is not None:
            progress(done, total)

    with tempfile.TemporaryDirectory(dir=directory) as place:
        made = _compile_into(Path(place), (*_NATIVE, *own_flags()), report)
        made.chmod(0o600)
        version = _compiler(shutil.which("g++")).replace("*", "unknown")
        return made.replace(directory / f"{identity}-{version}-{_digest(made)}.so")


def _compile_into(place: Path, flags: tuple[str, ...], progress: Progress | None) -> Path:
    """Compile all sources, the largest first, as many at a time as there are processors; return the
    library.
    """
    sources = sorted(source_files(), key=lambda path: path.stat().st_size, reverse=True)
    total = len(sources) + 1
    if progress is not None:
        progress(0, total)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = [place / f"{number}.o" for number in range(len(sources))]
        tasks = [
            pool.submit(
                _run_compiler, *FLAGS, *flags, f"-I{SOURCES}", "-c", str(source), "-o", str(made)
            )
            for source, made in zip(sources, objects, strict=True)
        ]
        try:
            for done, task in enumerate(as_completed(tasks), 1):
                task.result()
                if progress is not None:
                    progress(done, total)
        except KernelError:
            pool.shutdown(cancel_futures=True)
            raise
    made = place / "kernels.so"
    # Without OpenMP's library: the process that loads this one has PyTorch's, and two would compete
    # for cores.
    _run_compiler("-shared", *map(str, objects), "-o", str(made))
    return made


def _run_compiler(*arguments: str) -> None:
    """Run g++ with a limit on its processor time; KernelError says why it failed."""
    limited = ["/bin/sh", "-c", f'ulimit -t {_MAX_CPU_S}; exec "$@"', "sh", "g++", *arguments]
    try:
        done = subprocess.run(
            limited, check=False, capture_output=True, text=True, timeout=_MAX_WALL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"g++ could not be run: {error}") from None
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = next(
        (line for line in lines if "error" in line or "not found" in line), "".join(lines[:1])
    )
    raise KernelError(
        said
        or f"g++ ended with status {done.returncode} (its limit is {_MAX_CPU_S} s of the processor)"
    )


def main() -> None:
    """Compile as a process that is nobody's child, again after a pause if it fails and the starter
    still lives.
    """
    if os.fork() != 0:
        os._exit(0)
    starter = int(sys.argv[1])
    for pause_s in (*_RETRY_S, 0.0):
        with suppress(
            KernelError, OSError, ValueError
        ):  # which the process that needs the kernels reports
            find_library()
            return
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s:
            if not Path(f"/proc/{starter}").exists():
                return
            time.sleep(1)


if __name__ == "__main__":
    main()
