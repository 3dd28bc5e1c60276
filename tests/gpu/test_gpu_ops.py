"""The overlapped operations on two GPUs: right under stress, in repeats, in two groups at once and in graph replay."""

import os
import random

import pytest
import torch
import torch.distributed as dist

from fodit.environment import EXCHANGE
from fodit.kernels.gemm import kernels_for
from fodit.ops import gemm_all_reduce, gemm_all_to_all, gemm_reduce_scatter
from fodit.ops.connect import connected
from fodit.parallel import initialise, nccl_options, rank_device
from fodit.plan import UlyssesLayout, all_reduce_plan, reduce_scatter_plan, split_ranges, sum_plan

pytestmark = pytest.mark.gpu
CALLS = int(os.environ.get("FODIT_STRESS_CALLS", "1000"))
QUEUED = 10
OPS = ("all_reduce", "reduce_scatter", "all_to_all")


def start(kind):
    """This rank's device and a communicator whose exchanges go that way."""
    device = rank_device("cuda")
    control = initialise(device, 120)
    os.environ["FODIT_EXCHANGE"] = kind
    comm = connected(dist.new_group(backend="nccl", pg_options=nccl_options()), device, control)
    assert (comm.copies is None) == (kind == "nccl"), comm.notes
    return device, comm


def poison(device):
    """Fill free memory of the allocator with NaN, so that an element nobody writes shows."""
    blocks = [torch.full((2**shift,), torch.nan, device=device, dtype=torch.bfloat16) for shift in range(10, 25)]
    del blocks


def draw(seed, ranks, device):
    """A random call: operands of every rank, the same wherever they are drawn."""
    choose = random.Random(seed)
    op, dtype = choose.choice(OPS), choose.choice([torch.bfloat16, torch.float16])
    case = {"op": op, "slabs": choose.randint(1, 6), "bias": choose.random() < 0.5, "sum": choose.random() < 0.6}
    if op == "all_to_all":
        heads, dim = choose.randint(ranks, 12), choose.choice([8, 32, 64, 72, 128])
        case |= {"tokens": choose.randint(ranks, 1500), "batch": choose.randint(1, 2), "heads": heads, "dim": dim}
        case["groups"] = choose.randint(1, heads // ranks)
        start, stop = split_ranges(case["tokens"], ranks)[0]
        rows, width, weights = (stop - start) * case["batch"], heads * dim, 3
    else:
        rows, width, weights = choose.choice([1, 2, 129, 511, 513, choose.randint(2, 3000)]), choose.randint(1, 700), 1
        rows = max(rows, ranks)
    k = 8 * choose.randint(1, 100)
    generator = torch.Generator(device).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=generator, device=device).to(dtype)  # noqa: E731
    case["a"] = [new(rows, k) for _ in range(ranks)]
    case["w"] = [[new(width, k) for _ in range(weights)] for _ in range(ranks if op != "all_to_all" else 1)]
    case["b"] = [new(width) if case["bias"] else None for _ in range(weights)]
    case["rows"], case["width"] = rows, width
    return case


def call(case, comm):
    """The result of a drawn call and its layout; plans are made once, as a model does."""
    rank, op = comm.rank, case["op"]
    if op == "all_to_all":
        if "plan" not in case:
            sizes = (case[name] for name in ("tokens", "batch", "heads", "dim", "groups"))
            case["plan"] = UlyssesLayout(rank, comm.size, *sizes)
        layout = case["plan"]
        local = case["a"][rank][: layout.local_tokens * case["batch"]]
        arrivals = gemm_all_to_all(local, case["w"][0], case["b"], comm=comm, plan=layout.projection_plan)
        return [arrivals.wait(group) for group in range(case["groups"])], layout
    make, run = {
        "all_reduce": (all_reduce_plan, gemm_all_reduce),
        "reduce_scatter": (reduce_scatter_plan, gemm_reduce_scatter),
    }[op]
    slabs = min(case["slabs"], case["rows"] // comm.size)
    if case["sum"]:
        plan = sum_plan(op, case["rows"], case["width"], comm.size, comm.rank, slabs)
    else:
        plan = make(case["rows"], case["width"], comm.size, slabs)
    return run(case["a"][rank], case["w"][rank][0], case["b"][0], comm=comm, plan=plan), None


def error(case, result, layout, comm):
    """Worst error relative to the largest element of an fp32 reference; NaN counts as infinite."""
    bias = [0 if b is None else b.float() for b in case["b"]]
    if case["op"] == "all_to_all":
        worst = 0.0
        for group, got in enumerate(result):
            first, last = layout.head_ranges[comm.rank][group]
            columns = slice(first * case["dim"], last * case["dim"])
            got = got.view(case["tokens"], case["batch"], 3, -1)
            for source, (begin, end) in enumerate(layout.token_ranges):
                local = case["a"][source][: (end - begin) * case["batch"]].float()
                for index, weight in enumerate(case["w"][0]):
                    wanted = (local @ weight.float().t() + bias[index])[:, columns]
                    wanted = wanted.view(case["batch"], end - begin, -1).transpose(0, 1)
                    worst = max(worst, _difference(got[begin:end, :, index], wanted))
        return worst
    wanted = sum(a.float() @ w[0].float().t() for a, w in zip(case["a"], case["w"], strict=True)) + bias[0]
    if case["op"] == "reduce_scatter":
        begin, end = split_ranges(case["rows"], comm.size)[comm.rank]
        wanted = wanted[begin:end]
    return _difference(result, wanted)


def _difference(got, wanted):
    if wanted.numel() == 0:
        return 0.0
    found = float((got.float() - wanted).abs().max() / wanted.abs().max())
    return found if found == found else float("inf")


def stress(calls, seed, kind):
    torch.backends.cuda.matmul.allow_tf32 = False
    device, comm = start(kind)
    worst = 0.0
    for first in range(0, calls, QUEUED):
        cases = [draw(seed + first + index, comm.size, device) for index in range(QUEUED)]
        results = []
        poison(device)
        for index, case in enumerate(cases):
            stall = random.Random(f"{seed} {first + index} {comm.rank}")
            if stall.random() < 0.3:
                torch.cuda._sleep(stall.randint(10_000, 3_000_000))
            if stall.random() < 0.1:
                with torch.cuda.stream(comm.stream):
                    torch.cuda._sleep(stall.randint(10_000, 3_000_000))
            results.append(call(case, comm))
        for case, (result, layout) in zip(cases, results, strict=True):
            found = error(case, result, layout, comm)
            shown = {name: value for name, value in case.items() if name not in ("a", "w", "b", "plan")}
            assert found < 2e-2, f"error {found} in {shown}"
            worst = max(worst, found)
    return worst, sorted(comm.fallbacks)


@pytest.mark.parametrize(("ranks", "calls"), [(2, CALLS), (4, CALLS // 5)])
@pytest.mark.parametrize("kind", EXCHANGE.words)
def test_stress(pool, kind, ranks, calls):
    for worst, fallbacks in pool.run(ranks, stress, calls, 7, kind):
        assert worst < 2e-2
        print(f"{kind}: {ranks} ranks, {calls} calls, worst error {worst:.4f}; in torch: {fallbacks}")


def repeats(kind):
    device, comm = start(kind)
    for seed in range(100, 120):
        case = draw(seed, comm.size, device)
        found = []
        for _ in range(5):
            poison(device)
            result, _ = call(case, comm)
            found.append([one.clone() for one in (result if isinstance(result, list) else [result])])
        for other in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True)), case["op"]
    return kernels_for(device)


@pytest.mark.parametrize("kind", EXCHANGE.words)
def test_repeats_are_bitwise_equal(pool, kind):
    for kernels in pool.run(2, repeats, kind):
        assert not isinstance(kernels, str), kernels


def two_groups(kind):
    device, first = start(kind)
    _, second = start(kind)
    worst = 0.0
    for seed in range(200, 230, 2):
        cases = [draw(seed + index, first.size, device) for index in range(2)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        results = []
        for case, comm, stream in zip(cases, (first, second), streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(call(case, comm))
        torch.cuda.synchronize()
        for case, comm, (result, layout) in zip(cases, (first, second), results, strict=True):
            worst = max(worst, error(case, result, layout, comm))
    return worst


@pytest.mark.parametrize("kind", EXCHANGE.words)
def test_two_groups_at_once(pool, kind):
    assert max(pool.run(2, two_groups, kind)) < 2e-2


def graph(kind):
    device, comm = start(kind)
    worst = 0.0
    for seed in (301, 302, 303, 304):
        case = draw(seed, comm.size, device)
        for _ in range(2):
            call(case, comm)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            result, layout = call(case, comm)
        for _ in range(3):
            for own in case["a"]:
                own.mul_(-0.5)
            captured.replay()
            torch.cuda.synchronize()
            worst = max(worst, error(case, result, layout, comm))
    return worst


@pytest.mark.parametrize("kind", EXCHANGE.words)  # while a graph is captured NCCL does the exchanges
def test_graph_replay(pool, kind):
    assert max(pool.run(2, graph, kind)) < 2e-2
