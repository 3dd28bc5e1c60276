"""Diffusers pipelines on several ranks."""

from fodit.pipelines.cogvideox import FoCogVideoXPipeline
from fodit.pipelines.wan import FoWanPipeline

__all__ = ["FoCogVideoXPipeline", "FoWanPipeline"]
