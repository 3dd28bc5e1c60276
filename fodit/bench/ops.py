"""Products with a collective: overlapped, in every other way there is, and the bound. Milliseconds, medians.

A profile of the machine is taken first. Then for each shape (M, N, K) and operation, side by side in one run:

    gemm         the product alone, by cuBLAS
    kernel       the product alone, by fodit's kernel as one slab
    comm         the collective alone, by NCCL as torch sets it up
    serial       cuBLAS, then NCCL
    decomposed   the best of 2, 4, 8, 16 row chunks on cuBLAS, each followed by its asynchronous collective
    async-tp     torch's fused matmul-reduce-scatter on symmetric memory, where all GPUs have peer access
    untuned      fodit by the plan for a machine that nobody has measured: a shipped profile, scaled by a probe
    fodit        fodit tuned: the best of the few plans that are predicted best from the profile
    bound        max(gemm + last slab's communication, first slab's gemm + comm), slabs of a sixteenth
    fraction     (serial / fodit) / (serial / bound): how much of the theoretical speed-up is reached

Rows of an all-to-all are a rank's tokens, its columns heads of 128; every rank gets some heads of all tokens.
"""

import argparse
import socket
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist

from fodit.agreement import everyone
from fodit.bench.numerics import relative
from fodit.ops import Communicator, Pending, gemm_all_reduce
from fodit.ops.connect import connected
from fodit.parallel import nccl_options, world_size
from fodit.plan import all_reduce_plan
from fodit.tune.choice import Choice
from fodit.tune.clock import Clock, Work
from fodit.tune.measure import measure, this_machine
from fodit.tune.operation import Operation, shared_kernels
from fodit.tune.planner import Planner, untuned
from fodit.tune.predict import SMALLEST
from fodit.tune.profile import OPERATIONS
from fodit.tune.search import Shape
from fodit.tune.setting import Setting, check_gpus
from fodit.tune.store import Plans
from fodit.tune.tuner import Tuner

SHAPES = (
    (17776, 3072, 6144),
    (32760, 5120, 5120),
    (32760, 5120, 6912),
    (16380, 15360, 5120),
    (16380, 13824, 5120),
    (8192, 8192, 4096),
    (17776, 3072, 1536),
    (8888, 9216, 3072),
)
CHUNKS = (2, 4, 8, 16)
WORST_ERROR = 1e-2  # relative; bf16 rounds by 4e-3
COLUMNS = ("gemm", "kernel", "comm", "serial", "decomposed", "async_tp", "untuned", "fodit", "bound")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default=",".join(OPERATIONS), help="comma-separated (default: all: %(default)s)")
    parser.add_argument("--shapes", help="M,N,K/M,N,K/... (default: those of the models)")
    parser.add_argument("--repeats", type=int, default=15)


def check(given: argparse.Namespace) -> None:
    """Before anything starts.

    Raises:
        ValueError: arguments that cannot be measured.
        RuntimeError: there are no GPUs, or not several processes.
    """
    ops = given.ops.split(",")
    if unknown := [op for op in ops if op not in OPERATIONS]:
        raise ValueError(f"--ops {given.ops}: no operation {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    if given.repeats < 1:
        raise ValueError(f"--repeats {given.repeats}: at least 1")
    shapes = parse_shapes(given.shapes)
    check_gpus(2)
    ranks = world_size()
    columns = ranks * Shape.head_dim if "all_to_all" in ops else ranks
    if wrong := [shape for shape in shapes if shape[0] % ranks or shape[1] % columns]:
        raise ValueError(f"M, N, K = {wrong[0]}: on {ranks} ranks M must be a multiple of {ranks} and N of {columns}")


def run(setting: Setting, given: argparse.Namespace) -> None:
    """Measure, and save what is measured after each operation and shape."""
    shapes = parse_shapes(given.shapes)
    bench = Bench(setting, given.repeats)
    setting.say(f"{'M, N, K':>20} {'op':<15}" + "".join(f"{name:>11}" for name in COLUMNS) + f"{'fraction':>10}  plan")
    rows: list[dict[str, Any]] = []
    with setting.compute():
        for op in given.ops.split(","):
            for m, n, k in shapes:
                row = bench.measure(Shape(op, m, n, k, setting.ranks))
                rows.append(row)
                setting.save(given.save, {"untuned_profile": bench.untuned.profile.taken, "rows": rows})
                times = "".join(f"{row[name]:11.3f}" if row[name] else f"{'-':>11}" for name in COLUMNS)
                setting.say(f"{(m, n, k)!s:>20} {op:<15}{times}{row['fraction']:10.3f}  {row['plan']}")
    for op in given.ops.split(","):
        mine = [row for row in rows if row["op"] == op]
        gains = ", ".join(f"{_mean(mine, way, 'fodit'):.3f} over {way}" for way in ("serial", "decomposed", "untuned"))
        fraction, worst = _mean(mine, "bound", "fodit"), min(row["fraction"] for row in mine)
        kernel = _mean(mine, "gemm", "kernel")
        setting.say(f"{op}: fraction {fraction:.3f}, worst {worst:.3f}; {gains}; kernel {kernel:.3f} of cuBLAS (means)")


def parse_shapes(text: str | None) -> list[tuple[int, int, int]]:
    """M,N,K/M,N,K/..., or those of the models without a text."""
    if not text:
        return list(SHAPES)
    try:
        found = [(int(m), int(n), int(k)) for m, n, k in (one.split(",") for one in text.split("/"))]
    except ValueError:  # other things than numbers, or not three of them
        found = []
    if not found or min(map(min, found)) < 1:
        raise ValueError(f"--shapes {text}: give M,N,K/M,N,K/... such as 17776,3072,6144")
    return found


def _mean(rows: list[dict[str, Any]], above: str, below: str) -> float:
    return geometric_mean(row[above] / row[below] for row in rows)


class Unfused(Operation):
    """As it is written without fodit: a rank's own part goes through the collective, too."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        if self.shape.op != "all_to_all":
            return super().exchange(received, sent)
        return self.comm.start(dist.all_to_all_single, received, sent)


class Bench:
    """What is measured with: the machine's profile, and both planners.

    Attributes:
        symmetric: whether every GPU can read all others' memory, as torch's symmetric memory must.
    """

    def __init__(self, setting: Setting, repeats: int) -> None:
        self.setting, self.repeats = setting, repeats
        self.clock = Clock(setting.device, setting.control)
        own = dist.new_group(backend="nccl", pg_options=nccl_options(setting.max_ctas))
        self.comm = connected(own, setting.device, setting.control)
        self.plain = Communicator(dist.group.WORLD, setting.device)
        machine = this_machine(self.comm, setting.control, setting.compute_sms)
        one_host = len(set(everyone(setting.control, socket.gethostname()))) == 1
        self.symmetric = setting.profile == "nvlink" and machine.peer and one_host
        self.kernels = shared_kernels(setting.device, setting.control)
        profile = measure(machine, self.comm, self.clock, setting.compute(), setting.say)
        self.tuner = Tuner(profile, Plans(machine), self.comm, self.clock, self.kernels)
        with setting.compute():
            self.untuned: Planner = untuned(machine, self.comm, setting.control, self.kernels)

    def measure(self, shape: Shape) -> dict[str, Any]:
        plain = Unfused(shape, self.plain)
        row: dict[str, Any] = {"op": shape.op, "m": shape.m, "n": shape.n, "k": shape.k}
        row["gemm"], row["kernel"] = self._times(plain.product, self._kernel_alone(plain))
        row["comm"], last = self._times(plain.collective, partial(plain.collective, SMALLEST))
        row["decomposed"] = min(self._times(*(partial(plain.decomposed, chunks) for chunks in CHUNKS)))
        row["async_tp"] = self._async_tp(plain)
        tuned, first = self.tuner.shape(shape), self.untuned.choice(shape.op, shape.m, shape.n, shape.k)
        works = [self._checked(plain, choice) for choice in (first, tuned)]
        row["serial"], row["untuned"], row["fodit"] = self._times(plain.serial, *works)
        row |= {"plan": tuned.plan, "predicted": tuned.predicted_ms}
        row |= {"untuned_plan": first.plan, "untuned_predicted": first.predicted_ms}
        row["bound"] = max(row["gemm"] + last, row["gemm"] / SMALLEST + row["comm"])
        row["fraction"] = row["bound"] / row["fodit"]
        return row

    def _times(self, *works: Work) -> list[float]:
        """Of the slowest rank, all in turn."""
        return self.clock.compare(works, self.repeats)

    def _kernel_alone(self, operation: Operation) -> Work:
        shape = operation.shape
        alone, whole = Communicator(None, self.setting.device), all_reduce_plan(shape.m, shape.n, 1, 1)
        return lambda: gemm_all_reduce(operation.a, operation.weights[0], comm=alone, plan=whole)

    def _checked(self, plain: Operation, choice: Choice) -> Work:
        """The operation by this choice, which was found to give the right result.

        Raises:
            RuntimeError: it gives another one.
        """
        if not choice.overlap:
            return plain.serial
        shape, comm = plain.shape, self.comm
        plan = self.tuner.plan(shape, choice.slabs)
        kernel = None if choice.kernel is None else self.kernels[choice.kernel]
        sms = self.setting.compute_sms - choice.free_sms
        mine = Operation(shape, comm)
        mine.a, mine.weights = plain.a, plain.weights  # for the results to be compared
        work: Callable[[], torch.Tensor] = partial(mine.overlapped, plan, kernel, sms)
        wanted, found = plain.wanted(), work().view(-1)
        if shape.op == "all_to_all":
            ranges = shape.layout(choice.slabs, comm.rank).head_ranges[comm.rank]
            groups = wanted.split([(last - first) * shape.head_dim for first, last in ranges], dim=1)
            wanted = torch.cat([one.reshape(-1) for one in groups])
        error = relative(found.float(), wanted.view(-1).float())
        if not error < WORST_ERROR:
            raise RuntimeError(f"{shape} by {choice.plan} differs from the serial result by {error}")
        return work

    def _async_tp(self, plain: Operation) -> float | None:
        shape = plain.shape
        if shape.op != "reduce_scatter" or not self.symmetric or shape.m % self.setting.ranks:
            return None
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        assert dist.group.WORLD is not None
        name = dist.group.WORLD.group_name
        enable_symm_mem_for_group(name)
        a, weight = plain.a, plain.weights[0].t()
        return self._times(lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, weight, "sum", 0, name))[0]
