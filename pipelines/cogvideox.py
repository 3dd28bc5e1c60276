"""CogVideoX text-to-video."""

from functools import wraps
from typing import Any

from diffusers import CogVideoXPipeline

from fodit.pipelines.base import FoPipeline


class FoCogVideoXPipeline(FoPipeline, CogVideoXPipeline):
    """`CogVideoXPipeline` on several ranks; see `FoPipeline` for what it adds."""

    @wraps(CogVideoXPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(*args, **kwargs)

    def _check_size(self, height: int, width: int) -> None:
        unit = self.vae_scale_factor_spatial * self.transformer.config.patch_size
        if height % unit or width % unit:
            down = (max(height // unit, 1) * unit, max(width // unit, 1) * unit)
            raise ValueError(
                f"height and width must be divisible by {unit} for this model, got {height} x {width}; "
                f"{down[0]} x {down[1]} would work"
            )

    def _default_frames(self) -> int:
        return self.transformer.config.sample_frames

    # diffusers' own switch replaces the attention processors, which would undo the sharding without a word.
    def fuse_qkv_projections(self) -> Any:
        raise NotImplementedError(
            "fuse_qkv_projections() is not available: the attention projections are one overlapped operation already"
        )
