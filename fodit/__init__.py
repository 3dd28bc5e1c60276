"""Video generation with diffusers' CogVideoX and Wan on several GPUs, communication hidden behind computation."""

from typing import TYPE_CHECKING, Any

from fodit.doctor import doctor
from fodit.parallel import ParallelConfig
from fodit.report import Report
from fodit.video import save_video

if TYPE_CHECKING:
    from fodit.pipelines import FoCogVideoXPipeline, FoWanPipeline
    from fodit.tune.explain import explain

__version__ = "0.1.0"
__all__ = ["FoCogVideoXPipeline", "FoWanPipeline", "ParallelConfig", "Report", "doctor", "explain", "save_video"]


def __getattr__(name: str) -> Any:
    """Pipelines import diffusers, so they are imported when they are first used; the planner is, too."""
    if name in ("FoCogVideoXPipeline", "FoWanPipeline"):
        from fodit import pipelines

        return getattr(pipelines, name)
    if name == "explain":
        from fodit.tune.explain import explain

        return explain
    raise AttributeError(f"module 'fodit' has no attribute {name!r}")
