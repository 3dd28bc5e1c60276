"""save_video: every input it takes, read back from the file; what it refuses; who writes."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image

import fodit.video
from fodit.video import check_file, check_video, save_video

FRAMES = 5


def pattern(height: int, width: int) -> np.ndarray:
    """Smooth coloured frames that differ from each other, floats in [0, 1], [F, H, W, 3]."""
    frame, row, column = np.meshgrid(
        np.linspace(0, 1, FRAMES), np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij"
    )
    return np.stack([row, 0.2 + 0.6 * column, 0.1 + 0.8 * frame], axis=-1).astype(np.float32)


def read(path: Path) -> np.ndarray:
    """The file's frames as floats in [0, 1], [F, H, W, 3]."""
    with imageio.get_reader(path, "ffmpeg") as reader:  # type: ignore[arg-type]
        return np.stack([frame for frame in reader]) / 255  # noqa: C416 (its length is infinite)


def as_uint8(video: np.ndarray) -> np.ndarray:
    return (video * 255).round().astype(np.uint8)


INPUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "PIL": lambda video: [Image.fromarray(frame) for frame in as_uint8(video)],
    "PIL with alpha": lambda video: [Image.fromarray(frame).convert("RGBA") for frame in as_uint8(video)],
    "list of arrays": list,
    "float32": lambda video: video,
    "float16": lambda video: video.astype(np.float16),
    "uint8": as_uint8,
    "not contiguous": lambda video: np.asfortranarray(as_uint8(video)),
    "tensor FHWC": torch.from_numpy,
    "tensor FCHW": lambda video: torch.from_numpy(video).movedim(-1, 1),
    "tensor FCHW bfloat16": lambda video: torch.from_numpy(video).movedim(-1, 1).bfloat16(),
    "tensor FCHW uint8": lambda video: torch.from_numpy(as_uint8(video)).movedim(-1, 1),
    "tensor with a gradient": lambda video: torch.from_numpy(video).requires_grad_(),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_the_file_shows_the_video(tmp_path: Path, kind: str) -> None:
    video = pattern(48, 64)
    path = save_video(INPUTS[kind](video), tmp_path / "video.mp4")
    assert path == tmp_path / "video.mp4"
    found = read(path)
    assert found.shape == video.shape
    assert np.abs(found - video).mean() < 0.01
    assert np.abs(found - video).max() < 0.08
    assert os.listdir(tmp_path) == ["video.mp4"]  # nothing left beside it


@pytest.mark.parametrize("size", [(50, 70), (56, 90), (33, 48), (48, 33), (31, 47), (16, 18)])
def test_any_size_is_kept_exactly(tmp_path: Path, size: tuple[int, int]) -> None:
    video = pattern(*size)
    path = save_video(video, tmp_path / "video.mp4")
    assert path is not None
    found = read(path)
    assert found.shape == video.shape
    assert np.abs(found - video).mean() < 0.02


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".MP4"])
def test_containers(tmp_path: Path, suffix: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = save_video(pattern(48, 64), tmp_path / f"video{suffix}")
    assert path is not None
    assert read(path).shape == (FRAMES, 48, 64, 3)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("fps", [8, 16, 23.976])
def test_frame_rate(tmp_path: Path, fps: float) -> None:
    path = save_video(pattern(48, 64), tmp_path / "video.mp4", fps=fps)
    with imageio.get_reader(path, "ffmpeg") as reader:  # type: ignore[arg-type]
        assert reader.get_meta_data()["fps"] == pytest.approx(fps, abs=0.01)


def test_a_file_that_is_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    path.write_text("an older video")
    save_video(pattern(48, 64), path)
    assert read(path).shape == (FRAMES, 48, 64, 3)


def test_names_with_spaces_colons_and_per_cent(tmp_path: Path) -> None:
    path = save_video(pattern(48, 64), str(tmp_path / "a: 100 % -video.mp4"))
    assert path is not None
    assert read(path).shape == (FRAMES, 48, 64, 3)


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert save_video(pattern(48, 64), "-video.mp4") == Path("-video.mp4")
    assert read(tmp_path / "-video.mp4").shape == (FRAMES, 48, 64, 3)


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    path = save_video(pattern(48, 64), tmp_path / "video.mp4")
    (tmp_path / "other").touch()
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


# What is refused


@pytest.mark.parametrize(
    ("video", "words"),
    [
        (None, "rank 0 has no video"),
        ("video.mp4", "cannot save a str"),
        ([], r"shape \[0\]"),
        ([[Image.new("RGB", (8, 8))]], r"list of list; this looks like a batch, save frames\[0\]"),
        ([Image.new("RGB", (8, 8)), Image.new("RGB", (8, 6))], r"differ in size: \[\(8, 6\), \(8, 8\)\]"),
        (np.zeros((1, 2, 8, 8, 3)), r"\[1, 2, 8, 8, 3\]; this looks like a batch"),
        (torch.zeros(1, 2, 3, 8, 8), r"\[1, 2, 3, 8, 8\]; this looks like a batch"),
        (np.zeros((2, 8, 8)), r"shape \[2, 8, 8\]"),
        (np.zeros((2, 3, 8, 8)), r"shape \[2, 3, 8, 8\]"),
        (np.zeros((0, 8, 8, 3)), r"shape \[0, 8, 8, 3\]"),
        (np.zeros((2, 8, 8, 3), dtype=np.int64), "video of int64"),
        (np.full((2, 8, 8, 3), -1.0), r"values lie in \[-1, -1\]"),
        (np.full((2, 8, 8, 3), 255.0), r"values lie in \[255, 255\]"),
        (np.full((2, 8, 8, 3), np.nan), r"values lie in \[nan, nan\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_video_that_does_not_fit(tmp_path: Path, video: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        save_video(video, tmp_path / "video.mp4")
    assert os.listdir(tmp_path) == []


def test_rounding_errors_are_clipped(tmp_path: Path) -> None:
    path = save_video(pattern(48, 64) * 1.001 - 0.0005, tmp_path / "video.mp4")
    assert path is not None
    assert np.abs(read(path) - pattern(48, 64)).mean() < 0.01


@pytest.mark.parametrize("name", ["video", "video.gif", "video.avi"])
def test_a_container_that_does_not_fit(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"must end in \.mp4, \.mov, \.mkv"):
        save_video(pattern(48, 64), tmp_path / name)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        save_video(pattern(48, 64), tmp_path / "nowhere" / "video.mp4")


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), "8", None])
def test_a_rate_that_does_not_fit(tmp_path: Path, fps: Any) -> None:
    with pytest.raises(ValueError, match=f"fps is {fps!r}, expected a finite number above 0"):
        save_video(pattern(48, 64), tmp_path / "video.mp4", fps=fps)


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(IsADirectoryError, match=r"cannot write .*folder\.mp4: it is a folder"):
        save_video(pattern(48, 64), tmp_path / "folder.mp4")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(PermissionError, match=r"video\.mp4: the folder .* does not allow it"):
        save_video(pattern(48, 64), tmp_path / "video.mp4")
    assert os.listdir(tmp_path) == ["folder.mp4"]


@pytest.mark.parametrize(("name", "fps"), [("video.gif", 8), ("nowhere/video.mp4", 8), ("video.mp4", 0)])
def test_the_check_beforehand_says_what_saving_would(tmp_path: Path, name: str, fps: float) -> None:
    with pytest.raises((ValueError, OSError)) as saving:
        save_video(pattern(48, 64), tmp_path / name, fps=fps)
    with pytest.raises(saving.type, match=re.escape(str(saving.value))):
        check_video(tmp_path / name, fps)


def test_the_check_beforehand_passes_what_can_be_written(tmp_path: Path) -> None:
    assert check_video(str(tmp_path / "video.mp4"), 8) == tmp_path / "video.mp4"
    assert check_file(str(tmp_path / "report.json")) == tmp_path / "report.json"
    assert os.listdir(tmp_path) == []


def test_a_failing_encoder_leaves_the_old_file_and_no_half_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "ffmpeg"
    broken.write_text('#!/bin/sh\nfor last; do :; done\necho half > "${last#file:}"\necho disk full >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr(fodit.video, "get_ffmpeg_exe", lambda: str(broken))
    folder = tmp_path / "videos"
    folder.mkdir()
    path = folder / "video.mp4"
    path.write_text("an older video")
    with pytest.raises(RuntimeError, match="could not write 5 frames of 48 x 64: disk full"):
        save_video(pattern(48, 64), path)
    assert os.listdir(folder) == ["video.mp4"]
    assert path.read_text() == "an older video"


# Who writes


def _save_on_every_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    video = pattern(48, 64) if rank == 0 else None
    written = save_video(video, folder / "video.mp4")
    (folder / f"rank{rank}").write_text(str(written))
    everyone = save_video(pattern(48, 64), folder / f"by-rank{rank}.mp4")
    assert (everyone is None) == (rank != 0), everyone
    dist.destroy_process_group()


def test_only_rank_0_writes(tmp_path: Path) -> None:
    mp.spawn(_save_on_every_rank, (tmp_path,), nprocs=2)
    assert (tmp_path / "rank0").read_text() == str(tmp_path / "video.mp4")
    assert (tmp_path / "rank1").read_text() == "None"
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == ["by-rank0.mp4", "video.mp4"]
    assert read(tmp_path / "video.mp4").shape == (FRAMES, 48, 64, 3)


def test_only_rank_0_writes_after_the_group_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert save_video(None, tmp_path / "video.mp4") is None
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv("RANK", "0")
    assert save_video(pattern(48, 64), tmp_path / "video.mp4") is not None


def test_saturated_colours_come_back(tmp_path: Path) -> None:
    """Colour matrix and tag agree: one without the other shifts green and red visibly."""
    video = np.zeros((6, 32, 32, 3), dtype=np.float32)
    for frame, colour in enumerate([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)]):
        video[frame] = colour
    path = save_video(video, tmp_path / "video.mp4")
    assert path is not None
    assert np.abs(read(path) - video).max() < 0.03
    shown = subprocess.run([fodit.video.get_ffmpeg_exe(), "-i", str(path)], capture_output=True, text=True, check=False)
    assert "yuv420p(tv, bt709" in shown.stderr  # untagged, a player would choose by the size of the video
