"""What `pip install` gets is whole: the wheel has the kernels' sources, the built-in model and all
code."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_the_whole_package(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("coserve-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if name.startswith("coserve/")}
    files = (
        path for path in (ROOT / "coserve").rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    there = {str(path.relative_to(ROOT)) for path in files}
    assert inside == there
    assert {
        "coserve/models/tiny/model.safetensors",
        "coserve/py.typed",
        "coserve/kernels/cpu/kernels.h",
    } <= inside
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    assert [line for line in lines if line.startswith("Requires-Dist: torch")] == [
        "Requires-Dist: torch>=2.11"
    ], "users choose their own build"
