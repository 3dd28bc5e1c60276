"""The published models at full size with seeded random weights: latency can be measured without a download.

    pipe = dummy.pipeline("CogVideoX-5b", CogVideoXPipeline, device="cuda", dtype=torch.bfloat16)
    pipe(**dummy.prompt_embeds("CogVideoX-5b", device="cuda", dtype=torch.bfloat16),
         **dummy.call_arguments("CogVideoX-5b"))

The time of a step does not depend on the values of the weights, only on their shapes and types, and those are
the real ones. The pictures are noise. The text encoder and the tokenizer are left out.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, TypeVar

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, ModelMixin

MODELS = (
    "CogVideoX-2b",
    "CogVideoX-5b",
    "CogVideoX1.5-5b",
    "Wan2.1-T2V-1.3B",
    "Wan2.1-T2V-14B",
    "Wan2.2-T2V-A14B",
    "Wan2.2-TI2V-5B",
)

Pipeline = TypeVar("Pipeline", bound=DiffusionPipeline)


def config(name: str) -> dict[str, Any]:
    """Everything known about a model: the contents of its file in `fodit/testing/configs`.

    Keys: `repository` (where the real weights are), `pipeline` (diffusers class), `pipeline_arguments`,
    `dtype` (of the published weights), `components` (role -> `_class_name` and constructor arguments, as in a
    diffusers `config.json`), `call` (default call arguments), `fps`, `text_embedding` (tokens, channels).

    Upper and lower case do not matter, and `Wan-AI/Wan2.1-T2V-14B-Diffusers` and `wan2.1-14b` name the same
    model. Raises `ValueError` with the list of names if there is no such model.
    """
    known = {_key(model): model for model in MODELS}
    if _key(name) not in known:
        raise ValueError(f"no configuration for {name!r}; there are configurations for {', '.join(MODELS)}")
    file = resources.files(__package__) / "configs" / f"{known[_key(name)]}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _key(name: str) -> str:
    return name.lower().rpartition("/")[2].removesuffix("-diffusers").replace("-t2v-", "-")


def call_arguments(name: str) -> dict[str, Any]:
    """The model's usual arguments of a pipeline call: height, width, frames, steps and guidance."""
    return config(name)["call"]


def prompt_embeds(
    name: str, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Synthetic `prompt_embeds` and `negative_prompt_embeds` for a call, [1, tokens, channels] each."""
    where = _where(device, dtype, seed)
    shape = (1, *config(name)["text_embedding"])
    return {key: torch.randn(shape, **where) for key in ("prompt_embeds", "negative_prompt_embeds")}


def pipeline(
    name: str,
    pipeline_class: type[Pipeline],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    num_layers: int | None = None,
) -> Pipeline:
    """Build the named model with random weights, each drawn on `device` in its final type.

    Args:
        name: one of `MODELS`.
        pipeline_class: the model's diffusers pipeline class or a subclass of it; the result is an instance.
        device: where the weights are drawn; `"meta"` gives a pipeline without storage, to count parameters.
        dtype: type of the weights, except of those that diffusers keeps in fp32 when it loads this model.
        seed: the same seed on the same kind of device gives the same weights, on every rank.
        num_layers: shorten each transformer to this many layers.

    Raises:
        ValueError: unknown name, a class of another model family, `num_layers` out of range.
    """
    spec = config(name)
    family = getattr(diffusers, spec["pipeline"])
    if not issubclass(pipeline_class, family):
        raise ValueError(f"{name} needs {family.__name__} or a subclass of it, not {pipeline_class.__name__}")

    parts: dict[str, Any] = {"tokenizer": None, "text_encoder": None}
    for index, (role, settings) in enumerate(spec["components"].items()):
        component_class = getattr(diffusers, settings["_class_name"])
        if role == "scheduler":
            parts[role] = component_class.from_config(settings)
            continue
        if role.startswith("transformer") and num_layers is not None:
            settings = shortened(name, settings, num_layers)
        # A seed of its own for each component: the VAE is the same whatever the number of layers.
        parts[role] = _model(component_class, settings, torch.device(device), dtype, seed + index)
    return pipeline_class(**parts, **spec["pipeline_arguments"])


def shortened(name: str, settings: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The transformer's settings with `num_layers` layers, at least one and at most as many as it has."""
    if not 1 <= num_layers <= settings["num_layers"]:
        raise ValueError(f"num_layers is {num_layers}; {name} can have 1 to {settings['num_layers']}")
    return settings | {"num_layers": num_layers}


def _model(
    model_class: type[ModelMixin],
    settings: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> ModelMixin:
    # Parameters start without storage. Buffers are computed as usual: they are tables of positions, which no
    # checkpoint holds. Some constructors draw initial values, which must not move the caller's random state.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = model_class.from_config(settings)

    where = _where(device, dtype, seed)
    keep_in_fp32 = set(model._keep_in_fp32_modules or [])
    for name, parameter in list(model.named_parameters()):
        kind = torch.float32 if keep_in_fp32.intersection(name.split(".")) else dtype
        value = random_weight(name, parameter.shape, linear_std=0.02, spread=0.02, **where | {"dtype": kind})
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value, parameter.requires_grad))
    return model.to(device).eval()  # moves the buffers


def random_weight(
    name: str, shape: torch.Size, *, spread: float, linear_std: float | None = None, **where: Any
) -> torch.Tensor:
    """Draw one parameter, its distribution chosen by name and shape.

    Scales of norms come from N(1, spread), biases from N(0, spread), linear weights from N(0, linear_std).
    Convolutions, and linear weights without `linear_std`, are scaled by their fan-in, so that they preserve
    the variance of their input. `where` holds `generator`, `device` and `dtype`, passed on to `torch.randn`.
    """
    value = torch.randn(shape, **where)
    leaf = name.rpartition(".")[2]
    if leaf == "gamma" or (leaf == "weight" and len(shape) == 1):
        return value.mul_(spread).add_(1)
    if len(shape) == 1:
        return value.mul_(spread)
    if len(shape) == 2 and linear_std is not None:
        return value.mul_(linear_std)
    return value.mul_(shape[1:].numel() ** -0.5)


def _where(device: str | torch.device, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Keyword arguments of `torch.randn`. The meta device draws nothing and has no generator."""
    device = torch.device(device)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    return {"generator": generator, "device": device, "dtype": dtype}
