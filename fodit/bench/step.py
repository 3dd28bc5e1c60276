"""Time per denoising step of whole pipelines with random weights, all ways of running them in one process.

The outputs are compared with each other before the times count: latents after all steps, relative to plain diffusers
on one GPU.
"""

import argparse
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from diffusers import CogVideoXPipeline, WanPipeline

from fodit.bench.floor import layer_floor_ms, layer_work
from fodit.bench.setting import Setting
from fodit.models.sequence import HeadGroups
from fodit.parallel import ParallelConfig
from fodit.testing import dummy

WORST_ERROR = 0.1  # relative, of bf16 runs with different summation orders; a wrong shard gives about 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"one of {', '.join(dummy.MODELS)}")
    parser.add_argument("--steps", type=int, default=3, help="denoising steps; the first is not counted (default: 3)")
    parser.add_argument("--ways", default="", help="only ways whose names contain one of these texts, a|b|c")
    parser.add_argument("--head-groups", help="a number, or relative sizes such as 1,3,3,1 (default: chosen)")
    parser.add_argument("--layers", type=int, help="shorten the transformer to this many layers")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--num-frames", type=int)


def run(setting: Setting, given: argparse.Namespace) -> None:
    """Measure, and save what is measured after each way of running."""
    from fodit.pipelines import FoCogVideoXPipeline, FoWanPipeline

    dtype = torch.bfloat16
    wan = dummy.config(given.model)["pipeline"] == "WanPipeline"
    pipe: Any = dummy.pipeline(
        given.model,
        FoWanPipeline if wan else FoCogVideoXPipeline,
        device=setting.device,
        dtype=dtype,
        num_layers=given.layers,
    )
    pipe.set_progress_bar_config(disable=True)
    plain_class = WanPipeline if wan else CogVideoXPipeline  # diffusers' own, around the same modules
    plain = plain_class(**pipe.components, **dummy.config(given.model)["pipeline_arguments"])
    plain.set_progress_bar_config(disable=True)
    chosen = {"height": given.height, "width": given.width, "num_frames": given.num_frames}
    call = dummy.call_arguments(given.model) | {k: v for k, v in chosen.items() if v is not None}
    call |= dummy.prompt_embeds(given.model, device=setting.device, dtype=dtype)
    call |= {"num_inference_steps": given.steps, "output_type": "latent"}

    floor = _floor(setting, pipe, call, dtype)
    setting.say(f"{given.model}, {call['height']} x {call['width']} x {call['num_frames']}, {setting.profile}")
    setting.say(f"{'':34}{'s a step':>10}{'/ floor':>9}{'error':>10}{'exposed':>9}{'comm.':>8}")
    rows: list[dict[str, Any]] = []
    measured = {"model": given.model, "layers": given.layers, "head_groups": given.head_groups}
    measured |= {"call": _plain_values(call), "rows": rows}
    reference: torch.Tensor | None = None
    for way in _ways(setting, wan):
        if not any(text in way.name for text in given.ways.split("|")):
            continue
        runner = plain if way.degrees is None else pipe
        way.prepare(setting, runner, _head_groups(given))
        latents, taken = _generate(setting, runner, call)
        reference = latents if reference is None else reference
        error = float((latents - reference).norm() / reference.norm())
        if not error < WORST_ERROR:
            raise RuntimeError(f"{way.name} differs from the first way by {error:.3f}: its time does not count")
        least = floor[way.ulysses] / way.cfg
        rows.append({"way": way.name, "step_s": taken, "floor_s": least, "error": error})
        timeline = ""
        if runner is pipe:
            rows[-1]["notes"] = pipe.report.notes
            if (step := pipe.report.ranks[0].median_step) is not None:
                rows[-1] |= {"exposed_s": step.exposed_s, "communication_s": step.communication_s}
                timeline = f"{step.exposed_s:9.3f}{step.communication_s:8.3f}"
            pipe._session.detach()
        setting.say(f"{way.name:34}{taken:10.3f}{taken / least:9.2f}{error:10.1e}{timeline}")
        setting.save(given.save, measured)


@dataclass(frozen=True)
class _Way:
    """How a step is run. Without degrees it is diffusers', on one GPU or with its context parallelism."""

    name: str
    degrees: dict[str, int] | None = None
    overlap: bool = True
    timed: bool = True
    context_parallel: int = 1

    @property
    def ulysses(self) -> int:
        return self.degrees["ulysses"] if self.degrees is not None else self.context_parallel

    @property
    def cfg(self) -> int:
        return self.degrees["cfg"] if self.degrees is not None else 1

    def prepare(self, setting: Setting, pipe: Any, head_groups: HeadGroups) -> None:
        if self.degrees is not None:
            pipe.parallelize(
                ParallelConfig(**self.degrees),
                overlap=self.overlap,
                device=setting.device,
                head_groups=head_groups if self.overlap else None,
            )
            pipe._session.timeline.enabled = self.timed
        elif self.context_parallel > 1:
            from diffusers import ContextParallelConfig

            pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=self.context_parallel))


def _ways(setting: Setting, wan: bool) -> list[_Way]:
    n = setting.ranks
    found = [_Way("diffusers, one GPU")]
    if n == 1:
        return [*found, _Way("fodit, one GPU", {"cfg": 1, "ulysses": 1})]
    whole = {"cfg": 1, "ulysses": n}
    found += [
        _Way(f"fodit, ulysses {n}, no overlap", whole, overlap=False),
        _Way(f"fodit, ulysses {n}", whole),
        _Way(f"fodit, ulysses {n}, untimed", whole, timed=False),  # what the report costs
    ]
    if n % 2 == 0:
        found.append(_Way(f"fodit, cfg 2 x ulysses {n // 2}", {"cfg": 2, "ulysses": n // 2}))
    if wan:
        found.append(_Way(f"diffusers, context parallel {n}", context_parallel=n))  # last: diffusers cannot undo it
    return found


def _head_groups(given: argparse.Namespace) -> HeadGroups:
    if not given.head_groups:
        return None
    shares = tuple(int(share) for share in given.head_groups.split(","))
    return shares if len(shares) > 1 else shares[0]


def _floor(setting: Setting, pipe: Any, call: dict[str, Any], dtype: torch.dtype) -> dict[int, float]:
    """Seconds a step at each Ulysses degree, both passes of guidance on one rank."""
    config, transformer = pipe.transformer.config, pipe.transformer
    frames = (call["num_frames"] - 1) // pipe.vae_scale_factor_temporal + 1
    wan = type(transformer).__name__.startswith("Wan")
    patch = config.patch_size if wan else (config.patch_size_t or 1, config.patch_size, config.patch_size)
    area = call["height"] * call["width"] // pipe.vae_scale_factor_spatial**2 // (patch[1] * patch[2])
    video, text = -(-frames // patch[0]) * area, call["prompt_embeds"].shape[1]
    batch, calls = (1, 2) if wan else (2, 1)
    found = {}
    for ulysses in {1, max(setting.ranks // 2, 1), setting.ranks}:
        work = layer_work(transformer, batch, video, text, ulysses)
        found[ulysses] = layer_floor_ms(setting, work, dtype) * config.num_layers * calls / 1e3
    return found


def _generate(setting: Setting, pipe: Any, call: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """The latents, and the median seconds of a step without the first one, the slowest rank counting."""
    marks: list[float] = []

    def mark(_pipe: Any, _index: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        return tensors

    setting.barrier()
    with setting.compute():
        generator = torch.Generator().manual_seed(0)
        latents = pipe(**call, generator=generator, callback_on_step_end=mark).frames.float()
    lasted = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    steps = torch.tensor(lasted, device=setting.device)
    if setting.ranks > 1:
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return latents, median(steps.tolist())


def _plain_values(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if isinstance(value, int | float | str)}
