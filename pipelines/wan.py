"""Wan text-to-video: Wan2.1, and Wan2.2 with its two transformers."""

from functools import wraps
from typing import Any

from diffusers import WanPipeline

from fodit.pipelines.base import FoPipeline


class FoWanPipeline(FoPipeline, WanPipeline):
    """`WanPipeline` on several ranks; see `FoPipeline` for what it adds."""

    @wraps(WanPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(*args, **kwargs)

    def _check_size(self, height: int, width: int) -> None:
        if min(height, width) < 16:
            raise ValueError(f"height and width must be at least 16, got {height} x {width}")
