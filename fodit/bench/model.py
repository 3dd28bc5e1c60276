"""What is measured: a model with random weights, in fodit's pipeline and in diffusers' own, and the call they get."""

from argparse import Namespace
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import CogVideoXPipeline, WanPipeline

from fodit.pipelines import FoCogVideoXPipeline, FoWanPipeline
from fodit.pipelines.checkpoint import TRANSFORMERS
from fodit.testing import dummy

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        fodit: fodit's pipeline.
        plain: diffusers' own pipeline around the same modules.
        call: the arguments of a call of either.
    """

    fodit: Any
    plain: Any
    call: dict[str, Any]

    @property
    def wan(self) -> bool:
        return isinstance(self.plain, WanPipeline)

    @property
    def heads(self) -> int:
        return self.plain.transformer.config.num_attention_heads

    @property
    def layers(self) -> int:
        return self.plain.transformer.config.num_layers

    @property
    def guided(self) -> bool:
        return self.call["guidance_scale"] > 1

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents that are one token."""
        config = self.plain.transformer.config
        return config.patch_size if self.wan else (config.patch_size_t or 1, config.patch_size, config.patch_size)

    @property
    def latent_size(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents."""
        frames = (self.call["num_frames"] - 1) // self.plain.vae_scale_factor_temporal + 1
        frames = -(-frames // self.patch[0]) * self.patch[0]
        scale = self.plain.vae_scale_factor_spatial
        return frames, self.call["height"] // scale, self.call["width"] // scale

    @property
    def video_tokens(self) -> int:
        return prod(size // patch for size, patch in zip(self.latent_size, self.patch, strict=True))

    @property
    def text_tokens(self) -> int:
        return self.call["prompt_embeds"].shape[1]


def is_wan(name: str) -> bool:
    """Whether a model that `dummy` knows is one of Wan's, else of CogVideoX'."""
    return dummy.config(name)["pipeline"] == "WanPipeline"


def make_model(given: Namespace, device: torch.device) -> Model:
    """The model and the call that the command line names."""
    wan = is_wan(given.model)
    made: Any = dummy.pipeline(
        given.model, FoWanPipeline if wan else FoCogVideoXPipeline, device=device, dtype=DTYPE, num_layers=given.layers
    )
    plain = (WanPipeline if wan else CogVideoXPipeline)(
        **made.components, **dummy.config(given.model)["pipeline_arguments"]
    )
    for pipe in (made, plain):
        pipe.set_progress_bar_config(disable=True)
    chosen = {"height": given.height, "width": given.width, "num_frames": given.num_frames}
    call = dummy.call_arguments(given.model) | {k: v for k, v in chosen.items() if v is not None}
    call |= dummy.prompt_embeds(given.model, device=device, dtype=DTYPE)
    call |= {"num_inference_steps": given.steps, "output_type": "latent"}
    model = Model(made, plain, call)
    call["latents"] = _noise(model).to(device)
    return model


def transformers(pipe: Any) -> list[Any]:
    return [found for name in TRANSFORMERS if (found := getattr(pipe, name, None)) is not None]


def twin(pipe: Any, transformer_class: type | None = None) -> Any:
    """Another pipeline whose transformers are new modules with the same weights, not copies of the weights.

    Whatever is done to it, compiled blocks or hooks that cannot be removed, the first pipeline knows nothing of.

    Args:
        pipe: a pipeline of diffusers.
        transformer_class: a subclass of the transformers', None for their own.
    """
    parts = dict(pipe.components)
    settings = {name: value for name, value in pipe.config.items() if not name.startswith("_") and name not in parts}
    for name in TRANSFORMERS:
        if parts.get(name) is not None:
            parts[name] = _twin_module(parts[name], transformer_class)
    made = type(pipe)(**parts, **settings)
    made.set_progress_bar_config(disable=True)
    return made


def _twin_module(model: Any, model_class: type | None) -> Any:
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        other = (model_class or type(model)).from_config(model.config)  # type: ignore[attr-defined]
    other.load_state_dict(model.state_dict(), assign=True)
    return other.to(model.device).eval()  # moves the buffers


def _noise(model: Model) -> torch.Tensor:
    """The same for runs in every type: a generator's numbers depend on the type they are drawn in."""
    channels, (frames, height, width) = model.plain.transformer.config.in_channels, model.latent_size
    generator = torch.Generator().manual_seed(0)
    if model.wan:  # keeps latents in fp32
        return torch.randn(1, channels, frames, height, width, generator=generator)
    return torch.randn(1, frames, channels, height, width, generator=generator, dtype=DTYPE)
