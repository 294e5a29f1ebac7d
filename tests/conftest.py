"""Models in these tests are tiny: on one thread they run several times faster, and as many tests as cores can run
beside each other."""

import importlib.util
import os
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import settings

# The same examples every time; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# What is measured of devices is kept on disk: not where the user has it.
os.environ["COSERVE_HOME"] = mkdtemp(prefix="coserve-home-")
# Commands print into pipes here, as wide as they do there; not as wide as the terminal that the tests run in.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if GPU_TESTS in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
