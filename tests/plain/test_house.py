"""The architecture, as tests: imports point downward only, and importing the package costs
nothing."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

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
        "engine_client",
        "worker",
        "protocol",
    ),
    *("jobs", "simulate", "handover", "engine", "devices"),
    *("scheduling", "tuning", "memory", "adapters", "models", "graph", "kernels", "sandbox"),
    *("errors", "settings", "discovery", "home", "logs", "secret_variables", "version"),
]


@cache
def _imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it: in functions and for types alone, too."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path} imports relatively"
            # A name may be a module of the package.
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _module(path: Path) -> str:
    return ".".join(("coserve", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def _graph() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports. `from package import module` is an import of
    the module alone."""
    files = {_module(path): path for path in ROOT.rglob("*.py")}
    graph = {}
    for module, path in files.items():
        found = _imports(path) & files.keys()
        graph[module] = {
            name for name in found if not any(other.startswith(f"{name}.") for other in found)
        } - {module}
    return graph


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which can be reached from itself."""
    reached = {module: set(others) for module, others in graph.items()}
    for middle in graph:
        for module in graph:
            if middle in reached[module]:
                reached[module] |= reached[middle]
    groups = {tuple(sorted(m for m in reached[module] if module in reached[m])) for module in graph}
    return [list(group) for group in sorted(groups) if group]


def test_imports_point_downward_only():
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in _imports(path):
            parts = name.split(".")
            if room not in ROOMS or parts[0] != "coserve" or len(parts) == 1:
                continue
            if parts[1] in ROOMS and ROOMS.index(parts[1]) < ROOMS.index(room):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_package_needs_no_file_beside_it():
    """The wheel has the package alone."""
    beside = {"benchmarks", "examples", "experiments", "scripts", "tests"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in ROOT.rglob("*.py")
        for name in sorted(_imports(path))
        if name.split(".")[0] in beside
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others():
    assert _cycles(_graph()) == []


def test_a_cycle_of_imports_would_be_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert _cycles(graph) == [["b", "c"]]
    assert _graph()["coserve.worker.process"] >= {
        "coserve.engine.engine",
        "coserve.protocol.messages",
    }


def test_folders_of_the_server_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, others in _graph().items():
        if module.startswith("coserve.server."):
            folder = module.split(".")[2]
            inside = {name.split(".")[2] for name in others if name.startswith("coserve.server.")}
            graph[folder] = graph.get(folder, set()) | inside - {folder}
    assert _cycles(graph) == []


def test_every_folder_and_file_is_a_room_of_the_house():
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert folders | files <= set(ROOMS)


def test_importing_coserve_imports_nothing_heavy():
    code = "import sys, coserve; print(sorted({'torch', 'transformers', 'typer', 'rich'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_commands_that_ask_a_server_start_without_torch():
    code = (
        "import sys, coserve.cli.main, coserve.bench.demo; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_nodes_actor_starts_without_torch():
    """It passes on what a front and an engine say, and is there again soon when it has died."""
    banned = {"torch", "numpy", "transformers", "fastapi", "sqlalchemy"}
    code = f"import sys, coserve.cluster.nodes.node; print(sorted({banned} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_core_of_the_engine_is_plain_python():
    code = "import sys, coserve.engine.core; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_engine_needs_none_of_the_servers_packages():
    banned = {"fastapi", "uvicorn", "pydantic", "sqlalchemy", "zmq", "typer", "rich", "ray"}
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        if room in ROOMS[ROOMS.index("engine") :]:
            assert not {name.split(".")[0] for name in _imports(path)} & banned, path


def _users_of(package: str, root: Path) -> list[str]:
    """Files outside of kernels/ that import a package."""
    files = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] != "kernels"]
    return [
        str(path.relative_to(root))
        for path in files
        if package in {name.split(".")[0] for name in _imports(path)}
    ]


def test_triton_is_imported_in_kernels_alone(tmp_path):
    for name, content in (
        ("kernels/gpu.py", "import triton"),
        ("engine/fast.py", "import triton.language as tl"),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    assert _users_of("triton", tmp_path) == ["engine/fast.py"], "it would be found"
    assert _users_of("triton", ROOT) == []


_EXECUTED = {"graphs", "parts", "kv_layers", "kv_widths", "state_sizes", "place_runs"}
_EXECUTING = [
    "memory",
    "tuning",
    "devices",
    "models/batch.py",
    "models/sequence.py",
    "models/traced.py",
]


def _whole_model_uses(source: str) -> list[str]:
    """Return where code reads of an architecture what differs between ranks; the number of a part
    does not."""
    tree = ast.parse(source)
    names = {"architecture"}
    numbers = set[ast.AST]()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "architecture"
        ):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Attribute) and node.attr == "index":
            numbers.add(node.value)
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in _EXECUTED and node not in numbers
        if (isinstance(node.value, ast.Attribute) and node.value.attr == "architecture")
        or (isinstance(node.value, ast.Name) and node.value.id in names)
    ]


@pytest.mark.parametrize("place", _EXECUTING)
def test_what_executes_reads_the_local_model(place):
    """`Architecture` is the whole model; what runs on this rank is `Backbone.local`."""
    files = sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
    found = [
        f"{path.relative_to(ROOT)}:{use}"
        for path in files
        for use in _whole_model_uses(path.read_text())
    ]
    assert files and not found, "use backbone.local"


def test_uses_of_the_whole_model_are_found_under_any_name():
    assert _whole_model_uses("whole = backbone.architecture\nfor part in whole.parts: pass")
    assert _whole_model_uses("self.backbone.architecture.graphs[0]") == [
        "1: self.backbone.architecture.graphs"
    ]
    assert not _whole_model_uses(
        "architecture.parts.index(part); backbone.local.graphs  # not architecture.graphs"
    )
