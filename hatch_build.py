"""Builds the CPU kernels into a wheel, so that its users need no compiler: `make wheel`.

Only with COSERVE_WHEEL_KERNELS=1: compiling all variants takes minutes, and the wheel then fits
Linux on x86-64 alone.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernels(BuildHookInterface[Any]):
    """Adds one shared library per variant of processor."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what is not there yet, and have it included."""
        is_wanted = os.environ.get("COSERVE_WHEEL_KERNELS") == "1" and version != "editable"
        if not is_wanted or platform.machine() != "x86_64":
            return
        sys.path.insert(0, self.root)
        from coserve.kernels.cpu_library import PREBUILT, VARIANTS, build_variant, prebuilt_path

        for variant in VARIANTS:
            name = prebuilt_path(variant).name
            made = Path(self.root) / "dist" / "kernels" / name
            if not made.is_file():
                build_variant(variant, made)
            build_data["force_include"][str(made)] = str((PREBUILT / name).relative_to(self.root))
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
