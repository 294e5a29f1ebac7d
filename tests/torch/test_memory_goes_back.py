"""Many jobs take much memory; when they have ended it is there for others: pages, tensors, and what
the system sees."""

import json
import os
import subprocess
import sys
from pathlib import Path

import many_jobs
import pytest

# Where each thread has a heap of its own, the C library keeps the ends of those.
IN_THREADS = """
import threading, torch
from many_jobs import resident_bytes
from coserve.devices.torch.process_memory import keep_freed_memory

def work():
    tensors = [torch.ones(250_000) for _ in range(50)]
    there.wait()
    measured.wait()

keep_freed_memory()
there, measured = threading.Barrier(5), threading.Barrier(5)
before = resident_bytes()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
there.wait()
assert resident_bytes() > before + 190e6
measured.wait()
for thread in threads:
    thread.join()
print((resident_bytes() - before) / 1e6)
"""


def output_of(*command: str) -> str:
    tests = Path(many_jobs.__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}:{tests}"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_dozen_jobs_leave_no_pages_tensors_or_handles():
    left = json.loads(output_of(many_jobs.__file__, "left"))
    assert left["pages"] == {}
    assert left["tensor_bytes"] < 10_000
    for kind, (num_made, num_dropped) in left["made_and_dropped"].items():
        assert num_made == num_dropped > 0, kind


LARGE_TENSOR = """
import resource, torch
from coserve.devices.torch.process_memory import keep_freed_memory

keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(20_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(),
    reason="this system has no huge pages",
)
def test_a_large_tensor_lies_in_huge_pages():
    """80 MB are 19,532 small ones, each made and cleared in the middle of a step."""
    assert int(output_of("-c", LARGE_TENSOR)) < 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_what_threads_have_freed_goes_back_to_the_system():
    assert float(output_of("-c", IN_THREADS)) < 20


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_dozen_jobs_of_rank_64_leave_what_one_leaves():
    after_one, after_a_dozen = json.loads(output_of(many_jobs.__file__, "resident"))
    assert after_a_dozen - after_one < 80e6, "some 400 MB more while they run"
