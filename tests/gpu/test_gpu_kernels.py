"""Kernels on one GPU, each check in a process of its own; the scripts say what they check."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fodit.kernels.binding import Library, load

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
FAMILIES = ("hopper", "ampere")


@pytest.fixture(scope="module")
def library() -> Library:
    found = load()
    if isinstance(found, str):
        pytest.fail(f"no kernels to test: {found}")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def kernels_of(library: Library, family: str) -> None:
    """Skip where the library or the device has none."""
    capability = torch.cuda.get_device_capability()
    offered = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    if not any(kernel.name.startswith(family) for kernel in library.kernels_on(capability, offered)):
        pytest.skip(f"no {family} kernels for {capability} in {library.build_info}")


@pytest.mark.parametrize("what", ["check", "stress", "special"])
@pytest.mark.parametrize("family", FAMILIES)
def test_products(library, family, what):
    """Odd shapes, several weights, permuted storage, poison, repeats, counters; signals; graphs and green contexts."""
    kernels_of(library, family)
    run(sys.executable, str(HERE / "kernel_check.py"), what, str(library.path), "--kernel", family, "--seconds", "15")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sanitizer(library, family, tool):
    kernels_of(library, family)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    script = [sys.executable, str(HERE / "kernel_check.py"), "small", str(library.path), "--kernel", family]
    found = run(sanitizer, "--tool", tool, "--error-exitcode", "1", "--kernel-name", "kns=fodit", *script)
    assert "0 errors" in found or "0 hazards" in found


@pytest.mark.parametrize("what", ["rows", "heads"])
def test_rows(what):
    """Row kernels against their formulas in fp64."""
    run(sys.executable, str(HERE / "rows_check.py"), what)
