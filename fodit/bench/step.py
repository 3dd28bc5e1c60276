"""Time per denoising step of whole pipelines with random weights, all ways of running them in one process.

The outputs are compared with each other before the times count: latents after all steps, relative to plain diffusers
on one GPU.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from diffusers import CogVideoXPipeline, WanPipeline

from fodit.bench.floor import layer_floor_ms, layer_work
from fodit.bench.setting import Setting
from fodit.parallel import ParallelConfig
from fodit.testing import dummy

WORST_ERROR = 0.1  # relative, of bf16 runs with different summation orders; a wrong shard gives about 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"one of {', '.join(dummy.MODELS)}")
    parser.add_argument("--steps", type=int, default=3, help="denoising steps; the first is not counted (default: 3)")
    parser.add_argument("--ways", default="", help="only ways with one of these comma-separated texts in their names")
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
    pipe = dummy.pipeline(
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
    shares = tuple(int(share) for share in given.head_groups.split(",")) if given.head_groups else None
    head_groups = shares[0] if shares is not None and len(shares) == 1 else shares
    rows: list[dict[str, Any]] = []
    reference = None
    chosen_ways = [way for way in _ways(setting, wan) if any(text in way[0] for text in given.ways.split(","))]
    for name, degrees, overlap in chosen_ways:
        runner = plain
        if degrees is not None:
            groups = head_groups if overlap else None
            pipe.parallelize(ParallelConfig(**degrees), overlap=overlap, device=setting.device, head_groups=groups)
            runner = pipe
        elif "context parallel" in name:
            from diffusers import ContextParallelConfig

            plain.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=setting.ranks))
        latents, taken = _generate(setting, runner, call)
        if reference is None:
            reference = latents
        error = float((latents - reference).norm() / reference.norm())
        if not error < WORST_ERROR:
            raise RuntimeError(f"{name} differs from plain diffusers by {error:.3f}: its time does not count")
        least = floor[degrees["ulysses"] if degrees else (setting.ranks if "context" in name else 1)]
        least /= degrees["cfg"] if degrees else 1
        row = {"way": name, "step_s": taken, "floor_s": least, "error": error}
        if runner is pipe:
            step = pipe.report.ranks[0].median_step
            row |= {"exposed_s": step.exposed_s, "communication_s": step.communication_s, "notes": pipe.report.notes}
            pipe._session.detach()
        rows.append(row)
        timeline = f"{row['exposed_s']:9.3f}{row['communication_s']:8.3f}" if runner is pipe else ""
        setting.say(f"{name:34}{taken:10.3f}{taken / least:9.2f}{error:10.1e}{timeline}")
        measured = {"model": given.model, "layers": given.layers, "head_groups": given.head_groups}
        measured |= {"call": _plain_values(call), "rows": rows}
        setting.save(given.save, measured)


def _ways(setting: Setting, wan: bool) -> list[tuple[str, dict[str, int] | None, bool]]:
    """Name, fodit's degrees or None for diffusers, overlap."""
    n = setting.ranks
    found: list[tuple[str, dict[str, int] | None, bool]] = [
        ("diffusers, one GPU", None, True),
    ]
    if n == 1:
        return [*found, ("fodit, one GPU", {"cfg": 1, "ulysses": 1}, True)]
    found += [
        (f"fodit, ulysses {n}, no overlap", {"cfg": 1, "ulysses": n}, False),
        (f"fodit, ulysses {n}", {"cfg": 1, "ulysses": n}, True),
    ]
    if n % 2 == 0:
        found.append((f"fodit, cfg 2 x ulysses {n // 2}", {"cfg": 2, "ulysses": n // 2}, True))
    if wan:
        found.append((f"diffusers, context parallel {n}", None, True))  # last: diffusers cannot undo it
    return found


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
