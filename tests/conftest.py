"""Models in these tests are tiny: on one thread they run several times faster, and as many tests as
cores can run beside each other."""

import atexit
import importlib.util
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest
from hypothesis import settings
from lengths import place_of
from postgres import Postgres, postgres_server

# The same examples every time; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# What is measured of devices and compiled is kept on disk: not where the user has it, and once for
# all workers.
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Folders that tests, and processes they kill, leave there are gone with this one; pytest keeps
    # its own elsewhere.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = mkdtemp(prefix="coserve-tests-")
    os.chmod(
        os.environ["TMPDIR"], 0o1777
    )  # as /tmp itself: a database server may run as another user
    atexit.register(rmtree, os.environ["TMPDIR"], ignore_errors=True)
    os.environ["COSERVE_HOME"] = mkdtemp(prefix="coserve-home-")
    atexit.register(rmtree, os.environ["COSERVE_HOME"], ignore_errors=True)
    os.environ["COSERVE_RUN_DIR"] = ""  # commands find no servers of other tests, nor of the user
    # The names of compiled kernels and of profiles say what they were made of: those of the last
    # run serve again.
    os.environ["COSERVE_CACHE"] = str(Path(__file__).parents[1] / ".pytest_cache" / "coserve")
# Commands print into pipes here, as wide as they do there; not as wide as the terminal that the
# tests run in.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty one, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/coserve.db"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _threads_are_as_they_were() -> Iterator[None]:
    """What a test sets is a setting of the process, which the next file's tests run in."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    # Only for several processes: tests of clusters share one, and run in the order of their files.
    if hasattr(config, "workerinput"):
        nums = Counter(item.path for item in items)
        items.sort(key=lambda item: (place_of(item.path), -nums[item.path]))
    if not torch.cuda.is_available():
        for item in items:
            if GPU_TESTS in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
