"""Products with a collective: overlapped, in every other way there is, and the bound. Milliseconds, medians.

For each shape (M, N, K), operation and link profile, side by side in one run:

    gemm         the product alone, by cuBLAS
    kernel       the product alone, by fodit's kernel as one slab
    comm         the collective alone
    serial       cuBLAS, then NCCL
    decomposed   the best of 2, 4, 8, 16 row chunks on cuBLAS, each followed by its asynchronous collective
    async-tp     torch's fused matmul-reduce-scatter on symmetric memory, where peer access exists
    fodit        the best of a few plans
    bound        max(gemm + last slab's communication, first slab's gemm + comm), slabs of a sixteenth
    fraction     (serial / fodit) / (serial / bound): how much of the theoretical speed-up is reached
"""

import argparse
from collections.abc import Callable
from functools import cache, partial
from math import exp, log
from typing import Any

import torch
import torch.distributed as dist

from fodit.bench.setting import Setting
from fodit.kernels.gemm import kernels_for
from fodit.ops import Communicator, gemm_all_reduce, gemm_all_to_all, gemm_reduce_scatter
from fodit.ops.communicator import reduce_scatter_single
from fodit.ops.gemm import ROW_ALIGN
from fodit.parallel import nccl_options
from fodit.plan import Plan, UlyssesLayout, all_reduce_plan, reduce_scatter_plan

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
OPERATIONS = ("all_reduce", "reduce_scatter", "all_to_all")
HEAD_DIM = 128
Slabs = int | tuple[int, ...]
SMALLEST = 16  # the smallest useful slab is a sixteenth
COLUMNS = ("gemm", "kernel", "comm", "serial", "decomposed", "async_tp", "fodit", "bound")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default=",".join(OPERATIONS), help="comma-separated (default: all)")
    parser.add_argument("--shapes", help="M,N,K/M,N,K/... (default: those of the models)")
    slabs = "4,8,1-4-4-4-1,1-2-4-4-4-2-1"
    parser.add_argument("--slabs", default=slabs, help="numbers of slabs, or relative sizes, to try")
    parser.add_argument("--reserve", help="SMs left to NCCL to try (default: 4,8,12; 0 where NCCL has SMs of its own)")
    parser.add_argument("--repeats", type=int, default=15)


def run(setting: Setting, given: argparse.Namespace) -> None:
    """Measure, and save what is measured after each operation and shape."""
    shapes = parse_shapes(given.shapes) if given.shapes else SHAPES
    own = dist.new_group(backend="nccl", pg_options=nccl_options(setting.max_ctas))
    comm = Communicator(own, setting.device)
    kernels = kernels_for(setting.device)
    setting.say(f"{setting.profile}: {kernels if isinstance(kernels, str) else ', '.join(k.name for k in kernels)}")
    setting.say(f"{'M, N, K':>20} {'op':<15}" + "".join(f"{name:>11}" for name in COLUMNS) + f"{'fraction':>10}  plan")
    rows: list[dict[str, Any]] = []
    with setting.compute():
        for op in given.ops.split(","):
            for shape in shapes:
                row = _measure(setting, comm, op, shape, given)
                rows.append(row)
                setting.save(given.save, {"rows": rows, "fallbacks": sorted(comm.fallbacks)})
                times = "".join(f"{row[name]:11.3f}" if row.get(name) else f"{'-':>11}" for name in COLUMNS)
                plan = "serial" if row["plan"] is None else "slabs {}, {} SMs left".format(*row["plan"])
                setting.say(f"{shape!s:>20} {op:<15}{times}{row['fraction']:10.3f}  {plan}")
    for op in given.ops.split(","):
        mine = [row for row in rows if row["op"] == op]
        setting.say(
            f"{op}: fraction geometric mean {_mean(mine, 'bound', 'fodit'):.3f}, "
            f"worst {min(row['fraction'] for row in mine):.3f}; "
            f"over decomposed {_mean(mine, 'decomposed', 'fodit'):.3f}, "
            f"over serial {_mean(mine, 'serial', 'fodit'):.3f}, kernel / cuBLAS {_mean(mine, 'gemm', 'kernel'):.3f}"
        )


def parse_shapes(text: str) -> list[tuple[int, ...]]:
    """M,N,K/M,N,K/..."""
    return [tuple(int(n) for n in one.split(",")) for one in text.split("/")]


def _mean(rows: list[dict[str, Any]], above: str, below: str) -> float:
    return exp(sum(log(row[above] / row[below]) for row in rows) / len(rows))


def _measure(
    setting: Setting, comm: Communicator, op: str, shape: tuple[int, ...], given: argparse.Namespace
) -> dict[str, Any]:
    m, n, k = shape
    a = torch.randn(m, k, device=setting.device, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=setting.device, dtype=torch.bfloat16) * 0.02
    case = _CASES[op](comm, a, weight)

    def times(*works: Callable[[], Any]) -> list[float]:
        return setting.slowest(setting.compare(works, given.repeats))

    def time(work: Callable[[], Any]) -> float:
        return times(work)[0]

    row: dict[str, Any] = {"op": op, "m": m, "n": n, "k": k}
    alone = Communicator(None, setting.device)
    whole = all_reduce_plan(m, n, 1, 1)
    row["gemm"], row["kernel"] = times(
        lambda: case.product(0, m), lambda: gemm_all_reduce(a, weight, comm=alone, plan=whole)
    )
    row["comm"] = time(lambda: case.collective(0, m))
    row["serial"] = time(case.serial)
    row["decomposed"] = min(time(partial(case.decomposed, chunks)) for chunks in (2, 4, 8, 16))
    row["async_tp"] = _async_tp(setting, time, op, a, weight)

    wanted = case.reference()
    best, plan = row["serial"], None
    for text in given.slabs.split(","):
        shares = tuple(int(share) for share in text.split("-"))
        slabs = shares if len(shares) > 1 else shares[0]
        for reserve in (int(one) for one in (given.reserve or ("0" if setting.sms else "4,8,12")).split(",")):
            comm.gemm_sms = max(setting.compute_sms - reserve, 1)
            case.check(case.fodit(slabs), wanted)
            taken = time(partial(case.fodit, slabs))
            row[f"fodit_{text}_{reserve}"] = taken
            if taken < best:
                best, plan = taken, (text, reserve)
    row["fodit"], row["plan"] = best, plan

    last = time(lambda: case.collective(0, m // SMALLEST))
    row["bound"] = max(row["gemm"] + last, row["gemm"] / SMALLEST + row["comm"])
    row["fraction"] = row["bound"] / row["fodit"]
    return row


class _Case:
    """One operation in all its ways, on rows [start, stop) of the product."""

    def __init__(self, comm: Communicator, a: torch.Tensor, weight: torch.Tensor) -> None:
        self.comm, self.a, self.weight = comm, a, weight
        self.out = torch.empty(a.shape[0], weight.shape[0], device=a.device, dtype=a.dtype)
        self.received = torch.empty_like(self.out)

    def product(self, start: int, stop: int) -> None:
        torch.mm(self.a[start:stop], self.weight.t(), out=self.out[start:stop])

    def collective(self, start: int, stop: int, asynchronous: bool = False) -> Any:
        raise NotImplementedError

    def serial(self) -> None:
        self.product(0, self.a.shape[0])
        self.collective(0, self.a.shape[0])

    def decomposed(self, chunks: int) -> None:
        rows = self.a.shape[0]
        step = -(-rows // chunks) // self.comm.size * self.comm.size
        works = []
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            self.product(start, stop)
            works.append(self.collective(start, stop, asynchronous=True))
        for work in works:
            work.wait()

    def fodit(self, slabs: Slabs) -> torch.Tensor:
        raise NotImplementedError

    def reference(self) -> torch.Tensor:
        """The result, by the serial way."""
        raise NotImplementedError

    def check(self, result: torch.Tensor, wanted: torch.Tensor) -> None:
        error = float((result.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < 1e-2:
            raise RuntimeError(f"{type(self).__name__} differs from the serial result by {error}")


class _AllReduce(_Case):
    def collective(self, start: int, stop: int, asynchronous: bool = False) -> Any:
        return dist.all_reduce(self.out[start:stop], async_op=asynchronous)

    def fodit(self, slabs: Slabs) -> torch.Tensor:
        plan = all_reduce_plan(*self.out.shape, self.comm.size, slabs, ROW_ALIGN)
        return gemm_all_reduce(self.a, self.weight, comm=self.comm, plan=plan)

    def reference(self) -> torch.Tensor:
        self.serial()
        return self.out.clone()


class _ReduceScatter(_Case):
    def collective(self, start: int, stop: int, asynchronous: bool = False) -> Any:
        stop -= (stop - start) % self.comm.size
        target = self.received[: (stop - start) // self.comm.size]
        return reduce_scatter_single(target, self.out[start:stop], async_op=asynchronous)

    def fodit(self, slabs: Slabs) -> torch.Tensor:
        plan = reduce_scatter_plan(*self.out.shape, self.comm.size, slabs, ROW_ALIGN)
        return gemm_reduce_scatter(self.a, self.weight, comm=self.comm, plan=plan)

    def reference(self) -> torch.Tensor:
        self.serial()
        return self.received[: self.a.shape[0] // self.comm.size].clone()


class _AllToAll(_Case):
    """Columns are heads; every rank gets its half of the heads of all tokens."""

    def collective(self, start: int, stop: int, asynchronous: bool = False) -> Any:
        rows = (stop - start) // self.comm.size * self.comm.size
        source, target = self.out[start : start + rows].view(-1), self.received[start : start + rows].view(-1)
        return dist.all_to_all_single(target, source, async_op=asynchronous)

    def fodit(self, slabs: Slabs) -> torch.Tensor:
        plan = _column_plan(self.comm.rank, self.comm.size, *self.out.shape, slabs)
        arrivals = gemm_all_to_all(self.a, [self.weight], [None], comm=self.comm, plan=plan)
        received = [arrivals.wait(index) for index in range(len(plan.slabs))]
        return received[0]

    def check(self, result: torch.Tensor, wanted: torch.Tensor) -> None:
        heads = result.numel() // wanted.shape[0] // HEAD_DIM
        first = wanted.view(wanted.shape[0], -1, HEAD_DIM)[:, :heads]
        super().check(result.view(first.shape), first)

    def reference(self) -> torch.Tensor:
        """[all tokens, this rank's heads]"""
        self.product(0, self.a.shape[0])
        parts = [torch.empty_like(self.out) for _ in range(self.comm.size)]
        dist.all_gather(parts, self.out)
        width = self.out.shape[1] // self.comm.size
        return torch.cat([part[:, self.comm.rank * width :][:, :width] for part in parts])


_CASES = {"all_reduce": _AllReduce, "reduce_scatter": _ReduceScatter, "all_to_all": _AllToAll}


@cache
def _column_plan(rank: int, ranks: int, rows: int, width: int, groups: Slabs) -> Plan:
    """Made once, as a model does, not in the timed call."""
    heads = width // HEAD_DIM
    if isinstance(groups, int):
        groups = min(groups, heads // ranks)
    return UlyssesLayout(rank, ranks, rows * ranks, 1, heads, HEAD_DIM, groups).column_plan(1)


def _async_tp(
    setting: Setting, time: Callable[..., float], op: str, a: torch.Tensor, weight: torch.Tensor
) -> float | None:
    if op != "reduce_scatter" or setting.profile != "nvlink" or a.shape[0] % setting.ranks:
        return None
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    enable_symm_mem_for_group(name)
    return time(lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, weight.t(), "sum", 0, name))
