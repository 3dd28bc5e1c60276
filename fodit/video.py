"""Writing a video to a file, once and whole."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from imageio_ffmpeg import get_ffmpeg_exe
from PIL.Image import Image

_SUFFIXES = (".mp4", ".mov", ".mkv")
_LAYOUTS = (
    "a list of PIL images or arrays [H, W, 3], a NumPy array [F, H, W, 3], "
    "or a tensor [F, 3, H, W] or [F, H, W, 3]; floats in [0, 1] or uint8"
)


def save_video(video: Any, path: str | Path, fps: float = 16) -> Path | None:
    """Write ``video`` to ``path`` as H.264 and return the path; in a process group only rank 0 writes.

    video: F frames of H x W pixels in RGB, one of

      - a list of PIL images of one size (what diffusers' pipelines return as ``frames[0]``), or of arrays,
      - a NumPy array [F, H, W, 3], floats in [0, 1] or uint8,
      - a torch tensor [F, 3, H, W] or [F, H, W, 3], floats in [0, 1] or uint8, on any device,
      - None on a rank other than 0, which does not hold the output.
    path: ends in .mp4, .mov or .mkv; its folder must exist. A file that is already there is replaced.
    fps: frames a second, a finite number above 0.

    The video keeps its exact size, also where it is no multiple of 16. An odd height or width is stored with
    full colour resolution (4:4:4), which some players do not show; crop it to even numbers for those. The
    file is written beside ``path`` under another name and moved there when it is complete.

    Other ranks return None at once: when rank 0 is done is not theirs to know.

    Raises ValueError for a video, a path or a rate that does not fit, OSError for a file that cannot be written there
    (FileNotFoundError for a missing folder), RuntimeError with ffmpeg's own words if the encoder fails.
    """
    if _rank() != 0:
        return None
    path = check_video(path, fps)
    frames = _frames(video)

    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        _encode(frames, partial, fps)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _rank() -> int:
    """This process's rank, also after its process group is gone; 0 for a process on its own."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))  # torchrun's


def check_video(path: str | Path, fps: float = 16) -> Path:
    """Raise what `save_video` would for this path and rate, so that it is known before the video is computed."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"cannot write a video to {path}: its name must end in {', '.join(_SUFFIXES)}")
    if not (isinstance(fps, Real) and 0 < fps < inf):  # NaN compares false
        raise ValueError(f"fps is {fps!r}, expected a finite number above 0")
    return check_file(path)


def check_file(path: str | Path) -> Path:
    """Raise OSError if no file can be written to `path`: its folder is missing or closed, or it is a folder itself."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {path}: the folder {path.parent} does not allow it")
    return path


def _frames(video: Any) -> np.ndarray:
    """The video as a contiguous uint8 array [F, H, W, 3]."""
    if video is None:
        raise ValueError(f"rank 0 has no video to save, got None; expected {_LAYOUTS}")
    frames = _array(video)
    if frames.ndim != 4 or 0 in frames.shape or frames.shape[-1] != 3:
        batch = "; this looks like a batch, save frames[0]" if frames.ndim == 5 else ""
        raise ValueError(f"cannot save a video of shape {list(frames.shape)}{batch}; expected {_LAYOUTS}")
    if frames.dtype != np.uint8:
        frames = _to_uint8(frames)
    return np.ascontiguousarray(frames)


def _array(video: Any) -> np.ndarray:
    """The video as a NumPy array with the channels last, whatever it came as."""
    if isinstance(video, torch.Tensor):
        video = video.detach().cpu()
        if video.is_floating_point():
            video = video.float()  # NumPy has no bfloat16
        channels_first = video.ndim == 4 and video.shape[1] == 3
        return (video.movedim(1, -1) if channels_first else video).numpy()
    if isinstance(video, np.ndarray):
        return video
    if isinstance(video, Sequence) and all(isinstance(frame, Image) for frame in video):
        if len({frame.size for frame in video}) > 1:
            raise ValueError(f"the frames differ in size: {sorted({frame.size for frame in video})}")
        return np.array([np.asarray(frame.convert("RGB")) for frame in video])
    if isinstance(video, Sequence) and video and all(isinstance(frame, np.ndarray) for frame in video):
        return np.stack(video)
    inner = f" of {type(video[0]).__name__}" if isinstance(video, Sequence) and video else ""
    batch = "; this looks like a batch, save frames[0]" if inner == " of list" else ""
    raise ValueError(f"cannot save a {type(video).__name__}{inner}{batch}; expected {_LAYOUTS}")


def _to_uint8(frames: np.ndarray) -> np.ndarray:
    if not np.issubdtype(frames.dtype, np.floating):
        raise ValueError(f"cannot save a video of {frames.dtype}; expected {_LAYOUTS}")
    low, high = float(frames.min()), float(frames.max())
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # NaN compares false
        raise ValueError(f"the video's values lie in [{low:.4g}, {high:.4g}], expected [0, 1] or uint8")
    return (frames.clip(0, 1) * 255).round().astype(np.uint8)


def _encode(frames: np.ndarray, path: Path, fps: float) -> None:
    """Run ffmpeg over the raw frames. Called directly, since imageio's writer does not look at its result."""
    _, height, width, _ = frames.shape
    layout = "yuv444p" if height % 2 or width % 2 else "yuv420p"
    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps} -i -"
    # Players take untagged colours for one or the other matrix, by size; so convert to one and say which.
    convert = "-vf scale=out_color_matrix=bt709:out_range=tv"
    tags = "-colorspace bt709 -color_primaries bt709 -color_trc bt709 -color_range tv"
    target = f"-an -c:v libx264 -crf 18 -pix_fmt {layout} {convert} {tags} -movflags +faststart"
    command = [get_ffmpeg_exe(), "-y", "-v", "error", *source.split(), *target.split(), f"file:{path}"]
    done = subprocess.run(command, input=frames.data.cast("B"), capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"ffmpeg could not write {frames.shape[0]} frames of {height} x {width}: {words}")
