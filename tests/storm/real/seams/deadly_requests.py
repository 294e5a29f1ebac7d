"""Makes one prompt deadly: the engine's process crashes as it takes it in, as by a fault in a
native library.

The module that takes requests in is changed as it is imported, since this one is imported by every
process of the server, and most of them never need it.
"""

import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Token ids that no other request of a storm has.
PROMPT = [1] * 77
# Names the file that has a byte for each process that died of the prompt.
DEATHS_VARIABLE = "STORM_DEATHS"
_TARGET = "coserve.engine.request_lifecycle"


class _Finder:
    """Finds the module that takes requests in, and has it changed once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load the module; None for every other one."""
        found = PathFinder.find_spec(name, path) if name == _TARGET else None
        if found is not None and found.loader is not None:
            loader, run = found.loader, found.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _make_deadly(module.RequestLifecycle)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def _make_deadly(serving: Any) -> None:
    add = serving.add

    def deadly(self: Any, name: str, prompt: Sequence[int], *arguments: Any, **more: Any) -> Any:
        if list(prompt) == PROMPT:
            with open(os.environ[DEATHS_VARIABLE], "ab") as file:
                file.write(b".")
            os.kill(os.getpid(), signal.SIGSEGV)
        return add(self, name, prompt, *arguments, **more)

    serving.add = deadly


def install() -> None:
    """Have the prompt be deadly in this process."""
    sys.meta_path.insert(0, _Finder())
