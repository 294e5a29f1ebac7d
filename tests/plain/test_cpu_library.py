"""The library of CPU kernels is compiled once for a user and a machine, and any process may be the
first to need it.

A script stands for the compiler: it notes its calls, and takes as long and fails as a test says.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coserve.errors import KernelError
from coserve.home import cache_directory
from coserve.kernels import cpu_library
from coserve.kernels.cpu_library import find_library, start_compiling, why_none

COMPILER = """#!/bin/sh
if [ "$1" = -dumpfullversion ]; then echo 12.2.0; exit 0; fi
{work}
while [ $# -gt 0 ]; do
  if [ "$1" = -shared ]; then echo linked >> {calls}; fi
  if [ "$1" = -o ]; then echo made > "$2"; fi
  shift
done
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A file with one line for each library that was linked."""
    return tmp_path / "calls"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: Path):
    """Write the script that stands for g++; work: shell commands of each call."""

    def write(work: str = "") -> None:
        place = tmp_path / "bin"
        place.mkdir(exist_ok=True)
        (place / "g++").write_text(COMPILER.format(work=work, calls=calls))
        (place / "g++").chmod(0o755)

    write()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("COSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COSERVE_CXXFLAGS", raising=False)
    cpu_library._compiler.cache_clear()
    yield write
    cpu_library._compiler.cache_clear()


def in_another_process(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


FIND = """
from coserve.kernels.cpu_library import find_library
shown = []
print(find_library(lambda done, total: shown.append((done, total))).path)
print(max(shown, default=None))
"""


def test_homes_of_a_user_share_one_library(compiler, calls, monkeypatch, tmp_path):
    found = set()
    for home in ("a", "b"):
        monkeypatch.setenv("COSERVE_HOME", str(tmp_path / home))
        found.add(find_library().path)
    assert len(found) == 1 and calls.read_text().count("linked") == 1
    assert not (tmp_path / "a").exists(), "nothing of it lies in a home"


def test_two_processes_at_once_compile_once_and_both_tell_how_far_it_is(compiler, calls):
    compiler("sleep 0.02")
    processes = [in_another_process(FIND) for _ in range(2)]
    told = [process.communicate(timeout=60)[0].split("\n") for process in processes]
    assert calls.read_text().count("linked") == 1
    assert told[0][0] == told[1][0]
    assert all(each[1] != "None" for each in told), (
        "who waits for the other's compiler is shown its progress"
    )


def test_progress_counts_files(compiler):
    shown: list[tuple[int, int]] = []
    find_library(lambda done, total: shown.append((done, total)))
    total = len(cpu_library.source_files()) + 1
    assert shown[0] == (0, total)
    assert sorted(shown) == shown and shown[-1] == (total - 1, total)
    shown.clear()
    find_library(lambda done, total: shown.append((done, total)))
    assert not shown, "it is there"


def test_a_compiler_that_fails_is_told_by_its_first_error(compiler):
    compiler('echo "note: see here" >&2; echo "rows.cpp:1: error: no such thing" >&2; exit 1')
    with pytest.raises(KernelError, match=r"^rows.cpp:1: error: no such thing$"):
        find_library()
    assert why_none().endswith("so the slower plain ones ran: rows.cpp:1: error: no such thing"), (
        "doctor shows it"
    )
    compiler()
    find_library()
    assert why_none() == ""


def test_the_limit_is_on_time_of_the_processor_and_not_of_the_clock(compiler, monkeypatch):
    """On a busy machine a compiler waits for its turn for minutes, and is not at fault."""
    monkeypatch.setattr(cpu_library, "_MAX_CPU_S", 1)
    compiler('case "$*" in *rows.cpp*) sleep 1.5;; esac')
    assert find_library().path.exists()
    compiler('case "$*" in *rows.cpp*) while :; do :; done;; esac')
    monkeypatch.setenv("COSERVE_CXXFLAGS", "-DANOTHER")
    with pytest.raises(KernelError, match="its limit is 1 s of the processor"):
        find_library()


def test_another_compiler_and_no_compiler(compiler, calls, monkeypatch, tmp_path):
    first = find_library().path
    cpu_library._compiler.cache_clear()
    script = tmp_path / "bin" / "g++"
    script.write_text(script.read_text().replace("12.2.0", "13.1.0"))
    assert find_library().path != first and calls.read_text().count("linked") == 2
    script.unlink()
    cpu_library._compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_library().path.exists(), "what was compiled once needs no compiler"
    monkeypatch.setenv("COSERVE_CACHE", str(tmp_path / "another"))
    assert why_none().endswith("install g++")


def test_it_compiles_in_the_background(compiler, calls):
    compiler("sleep 0.01")
    start_compiling()
    assert not calls.exists()
    assert find_library().path.exists(), "who needs it waits for it"
    assert calls.read_text().count("linked") == 1


def test_a_failure_in_the_background_is_tried_again_while_the_starter_lives(
    compiler, calls, monkeypatch, tmp_path
):
    compiler(f'[ -e {tmp_path}/works ] || {{ echo "error: busy" >&2; exit 1; }}')
    code = "import sys; from coserve.kernels import cpu_library; cpu_library._RETRY_S = (1.0, 1.0); cpu_library.main()"
    subprocess.run([sys.executable, "-c", code, str(os.getpid())], check=True, timeout=60)
    (tmp_path / "works").touch()
    until_s = time.monotonic() + 30
    while not calls.exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert calls.read_text().count("linked") == 1


def test_the_fastest_prebuilt_variant_that_the_processor_runs_is_taken(
    compiler, calls, monkeypatch, tmp_path
):
    monkeypatch.setattr(cpu_library, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "prebuilt").mkdir()
    for variant in cpu_library.VARIANTS:
        cpu_library.prebuilt_path(variant).touch()
    for variant in cpu_library.VARIANTS:
        flags = "flags : fpu sse2 " + " ".join(variant.features)
        monkeypatch.setattr(cpu_library, "_processor_flags", lambda flags=flags: flags)
        found = find_library()
        assert (found.build, found.path) == (variant.name, cpu_library.prebuilt_path(variant))
    monkeypatch.setattr(cpu_library, "_processor_flags", lambda: "flags : fpu sse2")
    assert find_library().build == "native", "an older processor has none"
    monkeypatch.setattr(cpu_library, "_processor_flags", lambda: flags)
    assert find_library(may_be_prebuilt=False).build == "native"
    monkeypatch.setenv("COSERVE_CXXFLAGS", "-DOWN")
    assert find_library().build == "native", "flags of one's own ask for a build of one's own"


def test_the_compiler_is_started_without_waiting_for_pytorch():
    code = "import sys, coserve.cli.commands.up; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("COSERVE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("COSERVE_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "coserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == tmp_path / "user" / ".cache" / "coserve"
    assert cache_directory().stat().st_mode & 0o077 == 0
    monkeypatch.setenv("HOME", "/proc/nobody")
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / "cache", "a user of a service has no home"
