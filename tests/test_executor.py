"""The CUDA executor's plans and programs, with the kernel played by torch: the same operations, tile by tile."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from test_ops import exchange_case, reduce_case

from fodit.kernels import gemm
from fodit.kernels.binding import Family, Kernel
from fodit.kernels.selftest import failure
from fodit.ops import Communicator, executor, gemm_all_reduce, gemm_all_to_all
from fodit.ops.executor import CudaExecutor
from fodit.plan import TILE_FIELDS, UlyssesLayout, all_reduce_plan, reduce_scatter_plan

CPU = torch.device("cpu")
TESTED = 3  # launches in a kernel's self-test: without addends, with one and with several
KERNELS = (
    Kernel(0, "wide", Family.AMPERE, 128, 256, 32, 4, 80, 90),
    Kernel(1, "small", Family.AMPERE, 16, 24, 32, 4, 80, 90),
)


def play(a, weights, biases, out, program, counters, kernel, act, sms, addends):
    """What the kernel does, after its description in csrc/fodit.h."""
    for row in program.tolist():
        tile = dict(zip(TILE_FIELDS, row, strict=False))
        rows = a[tile["m0"] : tile["m0"] + tile["rows"]].float()
        weight, bias = weights[tile["weight"]], biases[tile["weight"]]
        columns = slice(tile["n0"], tile["n0"] + tile["cols"])
        product = F.linear(rows, weight[columns].float(), None if bias is None else bias[columns].float())
        if act == gemm.ACTIVATIONS["gelu-tanh"]:
            product = F.gelu(product, approximate="tanh")
        offset = (tile["offset_high"] << 32) + (tile["offset_low"] & 0xFFFFFFFF)
        for one in addends if addends is not None else ():
            product += one.as_strided(product.shape, (tile["ld"], 1), one.storage_offset() + offset)
        out.as_strided(product.shape, (tile["ld"], 1), out.storage_offset() + offset).copy_(product)
        if tile["slab"] >= 0:
            counters[tile["slab"]] += 1


@contextmanager
def played_kernels(broken=(), deaf=()):
    """Kernels that run on the CPU; yields the names of those that ran. A broken one forgets its first tile, a deaf one
    what it should add."""
    runs = []

    def count(a, weights, biases, out, program, counters, kernel, act, sms, addends):
        runs.append(KERNELS[kernel].name)
        if kernel in broken:
            counters[0] += 1
            program = program[1:]
        play(a, weights, biases, out, program, counters, kernel, act, sms, None if kernel in deaf else addends)

    executor.choose_kernel.cache_clear()
    failure.cache_clear()
    with (
        patch.object(gemm, "kernels_for", lambda _: KERNELS),
        patch.object(gemm, "launch", count),
        patch.dict(gemm.DTYPES, {torch.float32: 2}),
    ):
        yield runs
    executor.choose_kernel.cache_clear()
    failure.cache_clear()


def played_reduce(*arguments):
    with played_kernels() as runs:
        return reduce_case(*arguments), runs


def played_exchange(*arguments):
    with played_kernels() as runs:
        return exchange_case(*arguments), runs


@pytest.mark.parametrize("ranks", [1, 3])
def test_reducing_products(pool, ranks):
    for rows, k, width, slabs in [(64, 16, 24, 4), (129, 8, 72, 3), (511, 24, 5, None)]:
        for error, runs in pool.run(ranks, played_reduce, rows, k, width, slabs, True, torch.float32):
            assert max(error) < 1e-5
            assert len(runs) in (TESTED + 2, 2 * TESTED + 2), "each kernel that is used was tested first"


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_by_exchanges(pool, ranks):
    for rows, k, width, slabs in [(64, 16, 24, 4), (129, 8, 72, (3, 1)), (1, 24, 5, 2)]:
        for error, _ in pool.run(ranks, played_reduce, rows, k, width, slabs, True, torch.float32, True):
            assert max(error) < 1e-5


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_to_all(pool, ranks):
    for case in [(17, 2, 5, 4, 1, "none", False), (40, 1, 8, 16, 2, "gelu-tanh", False)]:
        for error, runs in pool.run(ranks, played_exchange, *case):
            assert error < 1e-4 and len(runs) == TESTED + 1


class Planner:
    """Always the same answer."""

    def __init__(self, **answer):
        self.answer = SimpleNamespace(**answer)

    def choice(self, op, m, n, k, dtype):
        assert (op, m, n, k) == ("all_reduce", 300, 500, 16)
        return self.answer


@pytest.mark.parametrize(
    "answer, ran, sms",
    [
        ({"overlap": True, "slabs": (1, 2), "kernel": "small", "free_sms": 12}, "small", 120),
        ({"overlap": True, "slabs": (1, 2), "kernel": "small", "free_sms": 0}, "small", 132),
        # Another kernel than was planned must not take the SMs that the planned way needs none of.
        ({"overlap": True, "slabs": (1, 2), "kernel": None, "free_sms": 0}, "wide", 124),
        ({"overlap": True, "slabs": (1, 2), "kernel": "of another machine", "free_sms": 0}, "wide", 124),
        ({"overlap": False, "slabs": (1,), "kernel": None, "free_sms": 0}, None, None),
    ],
)
def test_a_plan_that_was_chosen(answer, ran, sms):
    generator = torch.Generator().manual_seed(0)
    a, weight = (torch.randn(*shape, generator=generator) for shape in [(300, 16), (500, 16)])
    comm = Communicator(None, CPU)
    comm.planner, comm.compute_sms, comm.gemm_sms = Planner(**answer), 132, lambda _: 124
    taken = []
    with (
        played_kernels() as runs,
        patch.object(executor, "CudaExecutor", lambda *given: taken.append(given[7]) or CudaExecutor(*given)),
    ):
        assert torch.allclose(gemm_all_reduce(a, weight, comm=comm), a @ weight.t(), atol=1e-4)
    assert runs == ([] if ran is None else [ran] * (TESTED + 1))
    assert taken == ([] if sms is None else [sms])


@pytest.mark.parametrize("slabs", [1, 2])
def test_permuted_storage_is_one_kernel(slabs):
    """Also where there is nothing to overlap: torch would take a product for every segment."""
    generator = torch.Generator().manual_seed(0)
    a, *weights = (torch.randn(*shape, generator=generator) for shape in [(20, 16), (64, 16), (64, 16), (64, 16)])
    comm = Communicator(None, CPU)
    comm.planner = Planner(overlap=slabs > 1, slabs=(1,) * slabs, kernel="small", free_sms=0)
    comm.planner.product = lambda plan, k, dtype: comm.planner.answer
    layout = UlyssesLayout(0, 1, 20, 1, 4, 16, slabs)
    with played_kernels() as runs:
        arrivals = gemm_all_to_all(a, weights, [None] * 3, comm=comm, plan=layout.projection_plan)
    assert runs == ["small"] * (TESTED + 1), "tested, then used"
    heads = torch.cat([arrivals.wait(group).view(20, 3, -1) for group in range(slabs)], dim=-1)
    assert torch.allclose(heads, torch.stack([a @ weight.t() for weight in weights], dim=1), atol=1e-4)
    assert not layout.projection_plan.by_rows
    assert all_reduce_plan(20, 16, 2, 2).by_rows and reduce_scatter_plan(20, 16, 2, 2).by_rows


def test_a_wrong_kernel_is_not_used():
    generator = torch.Generator().manual_seed(0)
    a, weight = (torch.randn(*shape, generator=generator) for shape in [(300, 16), (500, 16)])
    comm = Communicator(None, torch.device("cpu"))
    for broken, ran in [
        ((), ["wide"] * (TESTED + 1)),  # tested, then used
        ((0,), ["wide", *["small"] * (TESTED + 1)]),
        ((0, 1), ["wide", "small"]),
    ]:
        comm.fallbacks.clear()
        with played_kernels(broken) as runs:
            assert torch.allclose(gemm_all_reduce(a, weight, comm=comm), a @ weight.t(), atol=1e-4)
            assert runs == ran
        assert len(comm.fallbacks) == len(broken)
        for index in broken:
            name = KERNELS[index].name
            assert any(f"the kernel {name} is not used: its result is off by inf" in text for text in comm.fallbacks)


def test_a_kernel_that_does_not_add_is_not_used():
    generator = torch.Generator().manual_seed(0)
    a, weight = (torch.randn(*shape, generator=generator) for shape in [(300, 16), (500, 16)])
    comm = Communicator(None, CPU)
    with played_kernels(deaf=(0,)) as runs:
        assert torch.allclose(gemm_all_reduce(a, weight, comm=comm), a @ weight.t(), atol=1e-4)
    assert runs == ["wide"] * 2 + ["small"] * (TESTED + 1)
    (note,) = comm.fallbacks
    assert "the kernel wide is not used: its result is off by" in note
