"""Builds the kernel library into the package where nvcc is there; without it the package installs without kernels.

FODIT_SKIP_KERNELS=1 leaves the kernels out in any case.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

# Loaded as a file: the package itself imports torch, which a build does not need.
_file = Path(__file__).parent / "fodit" / "kernels" / "build.py"
_spec = importlib.util.spec_from_file_location("build_kernels", _file)
kernels = importlib.util.module_from_spec(_spec)
sys.modules["build_kernels"] = kernels
_spec.loader.exec_module(kernels)


def wanted() -> bool:
    if os.environ.get("FODIT_SKIP_KERNELS") == "1":
        return False
    try:
        kernels.find_nvcc()
    except kernels.BuildError as error:
        print(f"fodit installs without its kernels: {error}", file=sys.stderr)
        return False
    return True


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if wanted() and not self.editable_mode:
            kernels.build(Path(self.build_lib) / "fodit" / "kernels", Path(__file__).parent / "csrc")


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        """A wheel with kernels is for one platform."""
        return wanted()


setup(
    cmdclass={"build_py": BuildWithKernels},
    distclass=WithKernels,
    setup_requires=["nvidia-cutlass==4.2.0"] if wanted() else [],
)
