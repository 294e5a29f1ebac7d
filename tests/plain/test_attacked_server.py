"""The servers that benchmarks start leave no process."""

import signal
import subprocess
import sys
from pathlib import Path

from processes import is_alive

ROOT = Path(__file__).parents[2]
SERVER = """
import os, time
print(f"http://127.0.0.1:{os.getpid()}/v1", flush=True)
time.sleep(60)
"""
BENCHMARK = """
import sys, time
from pathlib import Path
from experiments.attacked_server import Place
with Place(code=Path(sys.argv[1]), directory=Path(sys.argv[1])).start() as server:
    print(server.process.pid, flush=True)
    time.sleep(60)
"""


def test_a_benchmark_that_is_told_to_end_ends_its_server(tmp_path: Path):
    (tmp_path / "coserve").mkdir()
    (tmp_path / "coserve" / "__init__.py").write_text("")
    (tmp_path / "coserve" / "__main__.py").write_text(SERVER)
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        assert is_alive(server)
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(30) == 128 + signal.SIGTERM
    assert not is_alive(server)
