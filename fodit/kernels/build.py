"""Builds the kernel library with nvcc.

    python -m fodit.kernels.build --out DIR

compiles ``csrc/`` into ``DIR/libfodit_kernels.so``: one object file per kernel family, in parallel, then one
link. The library needs neither torch nor a GPU to build or to load. ``FODIT_CUDA_ARCHS`` names the
architectures (default ``80,86,89,90a,120``): ``90a`` is the Hopper family, all others the Ampere family.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = "libfodit_kernels.so"
DEFAULT_ARCHS = "80,86,89,90a,120"
AMPERE_ARCHS = ("80", "86", "89", "90", "120")
HOPPER_ARCHS = ("90a",)
SERIALISED = "C7510"  # ptxas: wgmma instructions wait for each other, such as at a call of a function not inlined
HOST_FLAGS = "-Xcompiler=-fPIC,-fvisibility=hidden"
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", HOST_FLAGS, "-cudart=static")


class BuildError(RuntimeError):
    """The kernel library could not be built; the message says what is missing or what nvcc said."""


def find_nvcc() -> str:
    """Path of nvcc: in ``CUDA_HOME``, on ``PATH`` or in ``/usr/local/cuda``. Raises BuildError if nowhere."""
    home = os.environ.get("CUDA_HOME")
    candidates = [os.path.join(home, "bin", "nvcc")] if home else []
    candidates += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if path := shutil.which(candidate):
            return path
    raise BuildError(f"no nvcc: tried {', '.join(candidates)}. Install the CUDA toolkit or set CUDA_HOME.")


def find_cutlass() -> Path:
    """CUTLASS's include folder, from the nvidia-cutlass wheel or ``CUTLASS_INCLUDE``. Raises BuildError."""
    if given := os.environ.get("CUTLASS_INCLUDE"):
        include = Path(given)
    else:
        spec = importlib.util.find_spec("cutlass_library")  # found, not imported: its import is slow
        if spec is None or not spec.submodule_search_locations:
            raise BuildError("no CUTLASS headers: pip install nvidia-cutlass==4.2.0, or set CUTLASS_INCLUDE.")
        include = Path(next(iter(spec.submodule_search_locations))) / "source" / "include"
    if not (include / "cutlass" / "cutlass.h").is_file():
        raise BuildError(f"no CUTLASS headers: {include} holds no cutlass/cutlass.h.")
    return include


def requested_archs() -> list[str]:
    """The architectures in ``FODIT_CUDA_ARCHS``. Raises BuildError for one that no family is made for."""
    names = os.environ.get("FODIT_CUDA_ARCHS", DEFAULT_ARCHS).split(",")
    archs = [name.strip() for name in names if name.strip()]
    known = (*AMPERE_ARCHS, *HOPPER_ARCHS)
    unknown = [arch for arch in archs if arch not in known]
    if unknown or not archs:
        named = ", ".join(unknown) or "nothing"
        raise BuildError(f"FODIT_CUDA_ARCHS names {named}; known are {', '.join(known)}.")
    return list(dict.fromkeys(archs))


def object_commands(source: Path, work: Path, archs: Sequence[str], nvcc: str, cutlass: Path) -> dict[Path, list[str]]:
    """The nvcc command of every object file, slowest first."""
    common = [nvcc, *FLAGS, f"-I{cutlass}"]

    def compiled(name: str, *flags: str) -> tuple[Path, list[str]]:
        out = work / f"{name}.o"
        return out, [*common, *flags, "-c", str(source / f"{name}.cu"), "-o", str(out)]

    def targets(of_family: Sequence[str]) -> list[str]:
        return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs if arch in of_family]

    hopper, ampere = targets(HOPPER_ARCHS), targets(AMPERE_ARCHS)
    macros = [f"-DFODIT_ARCHS={' '.join(archs)}"]
    commands: dict[Path, list[str]] = {}
    if ampere:
        commands.update([compiled("ampere", "--threads=0", *ampere)])
        macros.append("-DFODIT_WITH_AMPERE")
    if hopper:
        commands.update([compiled("hopper", *hopper)])
        macros.append("-DFODIT_WITH_HOPPER")
    commands.update([compiled("interface", *macros), compiled("exchange")])
    return commands


def run(command: Sequence[str]) -> str:
    """The output of one compiler command, which is the message of the BuildError if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def build(out: Path, source: Path | None = None, jobs: int | None = None) -> Path:
    """Builds the library into folder ``out`` and returns its path.

    Args:
        out: folder of the library; made if it is not there.
        source: the ``csrc`` folder, by default the one next to the package.
        jobs: compilers at a time, by default the number of CPUs.

    Raises:
        BuildError: no nvcc, no CUTLASS headers, no sources, an unknown architecture, or a compiler error.
    """
    source = source or Path(__file__).resolve().parents[2] / "csrc"
    if not (source / "interface.cu").is_file():
        raise BuildError(f"no kernel sources in {source}: build from a source checkout.")
    archs, nvcc, cutlass = requested_archs(), find_nvcc(), find_cutlass()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fodit-build-") as folder:
        commands = object_commands(source, Path(folder), archs, nvcc, cutlass)
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            said = list(pool.map(run, commands.values()))
        if any(SERIALISED in one for one in said):
            warnings.warn("this nvcc makes the Hopper kernels wait for every product: they will be slow", stacklevel=2)
        fresh = Path(folder) / LIBRARY
        hidden = "-Xlinker=--exclude-libs,ALL"  # the static CUDA runtime's symbols stay inside
        run([nvcc, "-shared", "-cudart=static", hidden, *map(str, commands), "-o", str(fresh)])
        # Replaced at once: a process that has the old library loaded keeps it.
        staged = out / f".{LIBRARY}.{os.getpid()}"
        shutil.copy2(fresh, staged)
        staged.replace(out / LIBRARY)
    return out / LIBRARY


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the library")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: the number of CPUs)")
    arguments = parser.parse_args()
    start = time.perf_counter()
    try:
        archs = requested_archs()
        print(f"compiling for {', '.join(archs)}: a minute or two for each on one core ...", flush=True)
        library = build(arguments.out, jobs=arguments.jobs)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{library} ({library.stat().st_size / 2**20:.1f} MiB) in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
