"""The package as installed: its version, its folders, and that importing it has no side effects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fodit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules() -> list[str]:
    """Every module of the library by its name, from the source tree."""
    places = [(ROOT / "fodit", "fodit"), (ROOT / "pipelines", "fodit.pipelines")]
    names = []
    for folder, package in places:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join([package, *parts]).removesuffix(".__init__"))
    return names


def run(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a fresh interpreter prints for ``code``. Of this one's environment, where fodit may have left its
    marks already, it gets only what it needs to find its libraries."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=kept)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_is_the_same_everywhere() -> None:
    assert fodit.__version__ == metadata.version("fodit") == PYPROJECT["project"]["version"]


def test_the_licence_goes_along() -> None:
    for pattern in PYPROJECT["project"]["license-files"]:
        assert [path.name for path in ROOT.glob(pattern)] == ["LICENSE"]


def test_every_folder_of_the_library_is_a_package() -> None:
    folders = {path.parent for place in ("fodit", "pipelines") for path in (ROOT / place).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("cwd", [ROOT, Path("/")], ids=["repository", "elsewhere"])
def test_public_names_are_there(cwd: Path) -> None:
    code = "import fodit, fodit.pipelines; print(*(getattr(fodit, name).__name__ for name in fodit.__all__))"
    assert run(code, cwd=cwd).split() == fodit.__all__


def test_public_names_are_listed() -> None:
    wanted = {"FoCogVideoXPipeline", "FoWanPipeline", "ParallelConfig", "Report", "save_video"}
    assert wanted <= set(fodit.__all__)
    with pytest.raises(AttributeError, match="'fodit' has no attribute 'FoFluxPipeline'"):
        _ = fodit.FoFluxPipeline


IMPORT_AND_WATCH = """
import importlib, json, os, sys, warnings

# What the dependencies do when they are imported is theirs: import them first.
import diffusers, numpy, torch, torch.distributed as dist, transformers
from diffusers import CogVideoXPipeline, WanPipeline
import imageio_ffmpeg, PIL.Image

defaults = lambda: {
    "environment": dict(os.environ),
    "process group": dist.is_initialized(),
    "CUDA": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads(),
    "dtype": str(torch.get_default_dtype()),
    "grad": torch.is_grad_enabled(),
    "seed": torch.initial_seed(),
    "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
    "warning filters": list(map(str, warnings.filters)),
    "CogVideoX": str(CogVideoXPipeline.__call__),
    "Wan": str(WanPipeline.__call__),
}
torch.cuda.device_count = torch.cuda.is_available = lambda: sys.exit("a module asked for CUDA devices")
before = defaults()
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # comes with torch for GPUs only
            raise
after = defaults()
print(json.dumps([what for what in before if before[what] != after[what]]))
"""


def test_importing_changes_nothing() -> None:
    names = modules()
    assert {"fodit", "fodit.report", "fodit.video", "fodit.pipelines"} <= set(names)
    assert json.loads(run(IMPORT_AND_WATCH, *names).splitlines()[-1]) == []


def test_import_fodit_does_not_import_diffusers() -> None:
    """``import fodit`` is quick; the pipelines are imported when they are used."""
    code = "import sys, fodit; print([name for name in ('diffusers', 'transformers') if name in sys.modules])"
    assert run(code) == "[]\n"


def test_constraints_pin_every_direct_dependency_within_its_range() -> None:
    packaging = pytest.importorskip("packaging.requirements")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = PYPROJECT["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        wanted = packaging.Requirement(text)
        assert pins[wanted.name] in wanted.specifier, text
    assert [version for version in pins.values() if "+" in version] == []  # the same on every platform
