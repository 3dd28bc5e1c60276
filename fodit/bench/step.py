"""Time per denoising step, and per layer, of whole pipelines with random weights, all ways in one process.

A layer's time has both passes of guidance. The outputs are compared with each other before the times count: latents
after all steps, relative to plain diffusers on one GPU. With --numerics also relative to plain diffusers in fp32.

The run ends when diffusers on one GPU or a way of fodit's fails. When another one fails, or does not fit the model,
the table and the file have the reason in its place.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from fodit.agreement import describe, everyone, together
from fodit.bench.blocks import BlockClock
from fodit.bench.floor import Floor, Operation, layer_floor, layer_work
from fodit.bench.model import DTYPE, Model, is_wan, make_model, transformers
from fodit.bench.numerics import BAR, Comparison, call_in_fp32, in_fp32
from fodit.bench.predicted import layer_ms
from fodit.bench.ways import Fodit, Way, all_ways, chosen_ways
from fodit.models.sequence import HeadGroups
from fodit.parallel import world_size
from fodit.testing import dummy
from fodit.tune.planner import planner_named
from fodit.tune.profile import Profile
from fodit.tune.setting import Setting, check_gpus

COMPILE_STEPS = 2  # of the call in which blocks compile
REASON_LENGTH = 300
COLUMNS = {  # key of a row: title, width, format
    "step_s": ("s a step", 10, ".3f"),
    "of_floor": ("/ floor", 9, ".2f"),
    "of_sustained_floor": ("/ sust.", 9, ".2f"),
    "layer_ms": ("ms a layer", 12, ".3f"),
    "predicted_layer_ms": ("predicted", 11, ".3f"),
    "layer_of_floor": ("/ floor", 9, ".2f"),
    "layer_of_sustained_floor": ("/ sust.", 9, ".2f"),
    "error": ("error", 10, ".1e"),
    "error_fp32": ("to fp32", 10, ".1e"),
    "ratio": ("ratio", 8, ".3f"),
    "exposed_s": ("exposed", 9, ".3f"),
    "communication_s": ("comm.", 9, ".3f"),
    "peak_gib": ("GiB", 8, ".1f"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"one or several, comma-separated, of {', '.join(dummy.MODELS)}")
    parser.add_argument("--steps", type=int, help="denoising steps; the first is not counted (default: 3)")
    parser.add_argument("--ways", default="", help="only ways whose names contain one of these texts, a|b|c")
    parser.add_argument("--head-groups", help="a number, or relative sizes such as 1,3,3,1 (default: chosen)")
    parser.add_argument(
        "--predict-from",
        help="also predict fodit's layers, from a profile: a file, or one that is shipped, such as h200-x2-nvlink; "
        "its number of ranks may be another",
    )
    parser.add_argument("--layers", type=int, help="shorten the transformer to this many layers")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--num-frames", type=int)
    parser.add_argument(
        "--numerics",
        action="store_true",
        help="compare with plain diffusers in fp32, which runs first and is slow; 10 steps unless --steps is given",
    )


def check(given: argparse.Namespace) -> None:
    """Before anything starts.

    Raises:
        ValueError: arguments that cannot be measured.
        RuntimeError: there are no GPUs.
    """
    names = given.model.split(",")
    unknown = [name for name in names if name not in dummy.MODELS]
    if unknown:
        raise ValueError(f"no model {', '.join(unknown)}; there are {', '.join(dummy.MODELS)}")
    if len(names) > 1 and given.save and "{model}" not in given.save:
        raise ValueError(f"--save {given.save} is one file for {len(names)} models: put {{model}} into its name")
    if given.steps is not None and given.steps < 2:
        raise ValueError(f"--steps {given.steps}: at least 2, for the first one is not counted")
    if given.layers is not None:
        for name in names:
            dummy.shortened(name, dummy.config(name)["components"]["transformer"], given.layers)
    _head_groups(given)
    if given.predict_from is not None:
        planner_named(given.predict_from)
    wan = [is_wan(name) for name in names]
    if not any(chosen_ways(given.ways, world_size(), one) for one in wan):
        known = ", ".join(way.name for way in all_ways(world_size(), any(wan), True))
        raise ValueError(f"--ways {given.ways}: in no name of {known}")
    check_gpus()


def run(setting: Setting, given: argparse.Namespace) -> None:
    """Measure model after model. Of several, each has a file of its own, named by `{model}` in `--save`."""
    for name in given.model.split(","):
        save = given.save and given.save.replace("{model}", name)
        _run_model(setting, argparse.Namespace(**vars(given) | {"model": name, "save": save}))
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def _run_model(setting: Setting, given: argparse.Namespace) -> None:
    """Measure, and save what is measured after each way of running."""
    if given.steps is None:
        given.steps = 10 if given.numerics else 3
    model = make_model(given, setting.device)
    profile = None if given.predict_from is None else planner_named(given.predict_from).profile
    call = model.call
    comparison = Comparison(_exact(setting, model) if given.numerics else None)
    ways = chosen_ways(given.ways, setting.ranks, model.wan, given.numerics)
    floors = _floors(setting, model, ways)
    setting.say(f"{given.model}, {call['height']} x {call['width']} x {call['num_frames']}, {setting.profile}")
    setting.say(f"{'':40}" + "".join(f"{title:>{width}}" for title, width, _ in COLUMNS.values()))
    rows: list[dict[str, Any]] = []
    measured = {"model": given.model, "layers": given.layers, "head_groups": given.head_groups}
    measured |= {"predict_from": given.predict_from, "call": _plain_values(call), "rows": rows}
    if given.numerics:
        measured["numerics_bar"] = BAR
    for way in ways:
        row: dict[str, Any] = {"way": way.name}
        reason = way.unfit(setting.ranks, model)
        if reason is None and way.required:
            row |= _measure(setting, way, model, floors, comparison, _head_groups(given))
            if profile is not None and isinstance(way, Fodit):
                row["predicted_layer_ms"] = _predicted_layer_ms(profile, model, way)
        elif reason is None:
            found, reason = _attempt(setting, way, model, floors, comparison)
            row |= found
        if reason is not None:
            row["not_run"] = reason
        rows.append(row)
        setting.say(_line(row))
        setting.save(given.save, measured)


def _measure(
    setting: Setting,
    way: Way,
    model: Model,
    floors: dict[int, Floor],
    comparison: Comparison,
    head_groups: HeadGroups = None,
) -> dict[str, Any]:
    """What goes into the way's row."""
    with ExitStack() as stack:
        with together(setting.control, f"preparing {way.name}"):  # else one rank's failure leaves the others waiting
            pipe = stack.enter_context(way.pipeline(setting, model, head_groups))
        if way.compiled:
            _generate(setting, pipe, model.call | {"num_inference_steps": COMPILE_STEPS})
        on_gpu = setting.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(setting.device)
        latents, taken, blocks = _generate(setting, pipe, model.call)
        peak = torch.cuda.max_memory_allocated(setting.device) if on_gpu else 0
        floor = floors[way.ulysses] * (1 / way.cfg)
        row: dict[str, Any] = {"step_s": taken, "floor_s": floor.alone, "sustained_floor_s": floor.sustained}
        row |= {"of_floor": taken / floor.alone, "of_sustained_floor": taken / floor.sustained}
        if blocks is not None:  # both passes of guidance in all layers
            row["layer_ms"] = blocks * 1e3 / model.layers
            row |= {"layer_of_floor": blocks / floor.alone, "layer_of_sustained_floor": blocks / floor.sustained}
        if on_gpu:
            row["peak_gib"] = setting.slowest([peak / 2**30])[0]  # of the rank that needs most; all the weights count
        try:
            row |= comparison.errors(latents)
        except RuntimeError as error:
            raise RuntimeError(f"{way.name} {error}") from None
        if isinstance(way, Fodit):
            row |= {"notes": pipe.report.notes, "plans": pipe.report.plans}
            if (step := pipe.report.ranks[0].median_step) is not None:
                row |= {"exposed_s": step.exposed_s, "communication_s": step.communication_s}
        return row


def _attempt(
    setting: Setting, way: Way, model: Model, floors: dict[int, Floor], comparison: Comparison
) -> tuple[dict[str, Any], str | None]:
    """The row of a peer, or why there is none: on any rank, the same on all."""
    row: dict[str, Any] = {}
    reason = None
    try:
        row = _measure(setting, way, model, floors, comparison)
    except Exception as error:  # noqa: BLE001 - whatever it is, the peer did not run, and the table says why
        reason = " ".join(describe(error).split())[:REASON_LENGTH]
    reasons = [one for one in everyone(setting.control, reason) if one is not None]
    if not reasons:
        return row, None
    gc.collect()  # what it had on the device
    torch.cuda.empty_cache()
    return {}, reasons[0]


def _line(row: dict[str, Any]) -> str:
    """A line of the table: the numbers, or the reason why there are none."""
    if "not_run" in row:
        return f"{row['way']:40}  not run: {row['not_run']}"
    cells = [
        f"{row[key]:{width}{form}}" if key in row else f"{'-':>{width}}" for key, (_, width, form) in COLUMNS.items()
    ]
    return f"{row['way']:40}" + "".join(cells) + (f"  above {BAR}" if row.get("ratio", 0) > BAR else "")


def _head_groups(given: argparse.Namespace) -> HeadGroups:
    if not given.head_groups:
        return None
    try:
        shares = tuple(int(share) for share in given.head_groups.split(","))
    except ValueError:
        shares = (0,)
    if min(shares) < 1:
        raise ValueError(f"--head-groups {given.head_groups}: give a number, or relative sizes such as 1,3,3,1")
    return shares if len(shares) > 1 else shares[0]


def _floors(setting: Setting, model: Model, ways: Sequence[Way]) -> dict[int, Floor]:
    """Seconds a step at each Ulysses degree of these ways, both passes of guidance on one rank."""
    found = {}
    for ulysses in sorted({way.ulysses for way in ways}):
        work, calls = _layer(model, ulysses, 1)
        found[ulysses] = layer_floor(setting, work, DTYPE) * (model.layers * calls / 1e3)
    return found


def _layer(model: Model, ulysses: int, cfg: int) -> tuple[list[Operation], int]:
    """The operations of a call of a layer on one rank, and its calls in a step."""
    passes = 2 // cfg if model.guided else 1
    batch, calls = (1, passes) if model.wan else (passes, 1)
    return layer_work(model.plain.transformer, batch, model.video_tokens, model.text_tokens, ulysses), calls


def _predicted_layer_ms(profile: Profile, model: Model, way: Fodit) -> float:
    """Of all its calls in a step."""
    work, calls = _layer(model, way.ulysses, way.cfg)
    return calls * layer_ms(profile, work, model.heads, way.ulysses)


def _exact(setting: Setting, model: Model) -> torch.Tensor:
    """The latents of plain diffusers in fp32, on each rank for itself."""
    setting.say(f"{model.call['num_inference_steps']} steps in fp32 ...")
    with in_fp32(transformers(model.plain)):
        latents, taken, _ = _generate(setting, model.plain, call_in_fp32(model.call))
    torch.cuda.empty_cache()  # NCCL does not allocate from torch's memory
    setting.say(f"{taken:.1f} s a step")
    return latents


def _generate(setting: Setting, pipe: Any, call: dict[str, Any]) -> tuple[torch.Tensor, float, float | None]:
    """The latents, and seconds of a step and of the blocks in it: medians without the first step, of the slowest rank.

    The blocks' is None for a peer whose transformer is built otherwise.
    """
    marks: list[float] = []

    def mark(_pipe: Any, _index: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        clock.end_step()
        return tensors

    setting.barrier()
    with setting.compute(), BlockClock(transformers(pipe)) as clock:
        generator = torch.Generator().manual_seed(0)
        latents = pipe(**call, generator=generator, callback_on_step_end=mark).frames.float()
    steps = setting.slowest([after - before for before, after in zip(marks, marks[1:], strict=False)])
    blocks = setting.slowest(clock.seconds())
    return latents, median(steps), median(blocks) if blocks else None


def _plain_values(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if isinstance(value, int | float | str)}
