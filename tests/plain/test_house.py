"""The architecture, as tests: imports point downward only, and importing the package costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import coserve

ROOT = Path(coserve.__file__).parent
# From the top of the house to the ground; a room may import from rooms below it, and from itself.
ROOMS = [
    *(
        "cli",
        "bench",
        "workloads",
        "client",
        "cluster",
        "server",
        "worker",
        "jobs",
        "simulate",
        "engine",
        "devices",
        "scheduling",
    ),
    *("tuning", "memory", "adapters", "models", "graph", "kernels", "errors", "settings"),
]


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
    return names


def test_imports_point_downward_only():
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in _imports(path):
            parts = name.split(".")
            if room in ROOMS and parts[0] == "coserve" and len(parts) > 1 and ROOMS.index(parts[1]) < ROOMS.index(room):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_every_folder_is_a_room_of_the_house():
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} <= set(ROOMS)


def test_importing_coserve_imports_nothing_heavy():
    code = "import sys, coserve; print(sorted({'torch', 'transformers', 'typer', 'rich'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_commands_that_ask_a_server_start_without_torch():
    code = (
        "import sys, coserve.cli.main, coserve.bench.demo; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_engine_needs_none_of_the_servers_packages():
    banned = {"fastapi", "uvicorn", "pydantic", "sqlalchemy", "zmq", "typer", "rich", "ray"}
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        if room in ROOMS[ROOMS.index("engine") :]:
            assert not {name.split(".")[0] for name in _imports(path)} & banned, path


def test_kernels_and_triton_stay_behind_the_seam():
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] != "kernels":
            assert "triton" not in {name.split(".")[0] for name in _imports(path)}, path
