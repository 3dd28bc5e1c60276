"""Signaling kernels next to cuBLAS, without any communication. Milliseconds on one GPU, medians, bf16.

Every shape is a round of one launch of each, in random order, over and over: clocks and power settle within a second
and are the same for all. `chosen` is the kernel that runs if nobody plans it. Results are checked before they count.
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import geometric_mean, median
from typing import Any

import torch

from fodit.bench.numerics import relative
from fodit.bench.ops import WORST_ERROR, parse_shapes
from fodit.kernels import gemm
from fodit.kernels.binding import Kernel
from fodit.ops.executor import CudaExecutor, choose_kernel
from fodit.parallel import rank_device
from fodit.plan import all_reduce_plan
from fodit.tune.profile import CUBLAS
from fodit.tune.setting import Setting, check_gpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", help="M,N,K/M,N,K/... (default: those of the models)")
    parser.add_argument("--names", default="", help="only kernels whose names contain one of these texts, a|b|c")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape; the first third is not counted")


def check(given: argparse.Namespace) -> None:
    """Before anything starts.

    Raises:
        ValueError: arguments that cannot be measured.
        RuntimeError: there are no GPUs, or no kernels for them.
    """
    parse_shapes(given.shapes)
    if not given.seconds > 0:
        raise ValueError(f"--seconds {given.seconds}: more than 0")
    check_gpus()
    _kernels(rank_device("cuda"), given.names)


def run(setting: Setting, given: argparse.Namespace) -> None:
    """Measure, and save what is measured after each shape.

    Raises:
        RuntimeError: a kernel computes something else than cuBLAS.
    """
    kernels = _kernels(setting.device, given.names)
    rows: list[dict[str, Any]] = []
    with setting.compute():
        for shape in parse_shapes(given.shapes):
            row = _measure(setting, kernels, shape, given.seconds)
            rows.append(row)
            setting.save(given.save, {"rows": rows})
            setting.say(
                f"{shape!s:>22}  cuBLAS {row[CUBLAS]:7.3f} ms, {row['tflops']:4.0f} TFLOP/s; over cuBLAS' time:"
            )
            for name, speed in sorted(row["speeds"].items(), key=lambda pair: -pair[1]):
                setting.say(f"{'':24}{speed:6.3f}  {name}{'  chosen' if name == row['chosen'] else ''}")
    for title, speeds in (
        ("chosen", [row["speeds"][row["chosen"]] for row in rows if row["chosen"] in row["speeds"]]),
        ("best", [max(row["speeds"].values()) for row in rows]),
    ):
        if speeds:
            setting.say(
                f"{title}: {geometric_mean(speeds):.3f} of cuBLAS' speed (geometric mean), worst {min(speeds):.3f}"
            )


def _kernels(device: torch.device, names: str) -> list[Kernel]:
    """Those whose name contains one of the texts a|b|c."""
    found = gemm.kernels_for(device)
    if isinstance(found, str):
        raise RuntimeError(f"no kernels to measure: {found}")
    named = [one for one in found if any(text in one.name for text in names.split("|"))]
    if not named:
        raise ValueError(f"--names {names}: no such kernel; there are {', '.join(one.name for one in found)}")
    return named


def _measure(setting: Setting, kernels: list[Kernel], shape: tuple[int, ...], seconds: float) -> dict[str, Any]:
    m, n, k = shape
    device, dtype = setting.device, torch.bfloat16
    a, weight = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    plan = all_reduce_plan(m, n, 1, 1)

    def launch(kernel: Kernel) -> Callable[[], Any]:
        return lambda: CudaExecutor(kernel, plan, out.view(-1), a, [weight], [None], "none", setting.sms)

    calls: dict[str, Callable[[], Any]] = {CUBLAS: lambda: torch.mm(a, weight.t(), out=out)}
    calls |= {one.name: launch(one) for one in kernels}
    _check(calls, out)
    taken = _rounds(calls, seconds)
    chosen, _ = choose_kernel(plan, device, dtype)
    return {
        **dict(zip("mnk", shape, strict=True)),
        CUBLAS: taken[CUBLAS],
        "tflops": 2e-9 * m * n * k / taken[CUBLAS],
        "chosen": None if chosen is None else chosen.name,
        "speeds": {one.name: taken[CUBLAS] / taken[one.name] for one in kernels},
    }


def _check(calls: dict[str, Callable[[], Any]], out: torch.Tensor) -> None:
    calls[CUBLAS]()
    wanted = out.float()
    for name, call in calls.items():
        out.fill_(torch.nan)
        call()
        error = relative(out.float(), wanted)
        if not error < WORST_ERROR:
            raise RuntimeError(f"{name} differs from cuBLAS by {error}")


def _rounds(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each call, after a third of the time."""
    order, shuffled = list(calls), random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < seconds:
        shuffled.shuffle(order)
        marks = []
        for name in order:
            marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            marks[-1][0].record()
            calls[name]()
            marks[-1][1].record()
        torch.cuda.synchronize()
        if elapsed > seconds / 3:
            for name, (before, after) in zip(order, marks, strict=True):
                taken[name].append(before.elapsed_time(after))
    return {name: median(times) for name, times in taken.items()}
