"""The overlapped operations against their unfused code, on gloo ranks."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fodit.ops import Communicator, all_to_all_products, gemm_all_reduce, gemm_all_to_all, gemm_reduce_scatter
from fodit.parallel import initialise
from fodit.plan import UlyssesLayout, all_reduce_plan, reduce_scatter_plan, split_ranges, sum_plan
from fodit.timeline import Timeline

CPU = torch.device("cpu")


def communicator(overlap=True, timeline=None):
    initialise(CPU, 60)
    comm = Communicator(dist.group.WORLD if dist.is_initialized() else None, CPU, timeline, overlap)
    if PLAYED and comm.size > 1:
        comm.copies, comm.stream = PlayedCopies(), STREAM
    return comm


class PlayedCopies:
    """Copy engines, played by gloo. What is received arrives when it is waited for, and was 7 before."""

    def empty(self, count, like):
        return torch.full((count,), 7.0).to(like.dtype)

    def start(self, received, sent, ready, timeline):
        ready.hold(STREAM)
        received, sent = ([one.view(-1) for one in parts] for parts in (received, sent))
        packed = torch.cat(received)
        splits = {"output_split_sizes": [one.numel() for one in received]}
        splits |= {"input_split_sizes": [one.numel() for one in sent]}
        work = dist.all_to_all_single(packed, torch.cat(sent), async_op=True, **splits)

        def finish():
            work.wait()
            for target, part in zip(received, packed.split(splits["output_split_sizes"]), strict=True):
                target.copy_(part)

        return finish


STREAM = SimpleNamespace(wait_event=lambda _: None)
PLAYED = []


def by_copies(case, *arguments):
    """The case on communicators with copy engines."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "stream", lambda _: nullcontext()))
        stack.enter_context(patch.object(torch.cuda, "current_stream", lambda *_: STREAM))
        stack.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        PLAYED.append(True)
        stack.callback(PLAYED.clear)
        return case(*arguments)


def by_gloo(case, *arguments):
    return case(*arguments)


WAYS = (by_gloo, by_copies)


def parts(rows, k, width, ranks, dtype=torch.float32):
    """Each rank's [rows, k] of a and [width, k] of the weight, and the bias, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return [draw(rows, k) for _ in range(ranks)], [draw(width, k) for _ in range(ranks)], draw(width)


def reduce_case(rows, k, width, slabs, overlap, dtype, exchanges=False):
    comm = communicator(overlap)
    a, weight, bias = parts(rows, k, width, comm.size, dtype)
    wanted = sum(x.double() @ w.double().t() for x, w in zip(a, weight, strict=True)) + bias.double()
    plans = (None, None)
    if exchanges:
        sizes = (rows, width, comm.size, comm.rank, slabs)
        plans = tuple(sum_plan(op, *sizes) for op in ("all_reduce", "reduce_scatter"))
    elif slabs is not None:
        plans = (
            all_reduce_plan(rows, width, comm.size, slabs),
            reduce_scatter_plan(rows, width, comm.size, min(slabs, -(-rows // comm.size))),
        )
    reduced = gemm_all_reduce(a[comm.rank], weight[comm.rank], bias, comm=comm, plan=plans[0])
    mine = gemm_reduce_scatter(a[comm.rank], weight[comm.rank], bias, comm=comm, plan=plans[1])
    start, stop = split_ranges(rows, comm.size)[comm.rank]
    assert mine.shape == (stop - start, width)
    differences = (reduced - wanted).abs(), (mine - wanted[start:stop]).abs()
    return [float(one.max() / wanted.abs().max()) if one.numel() else 0.0 for one in differences]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_reducing_products(pool, ranks):
    for rows, k, width, slabs in [(64, 16, 24, 4), (129, 8, 72, 3), (511, 24, 5, None), (4, 8, 8, 1)]:
        for overlap in (True, False):
            for error in pool.run(ranks, reduce_case, rows, k, width, slabs, overlap, torch.float32):
                assert max(error) < 1e-5
    for error in pool.run(ranks, reduce_case, 130, 32, 40, 3, True, torch.bfloat16):
        assert max(error) < 2e-2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_by_exchanges(pool, ranks, way):
    for rows, k, width, slabs in [(64, 16, 24, 4), (129, 8, 72, (3, 1)), (511, 24, 5, 2), (2, 8, 8, 1), (1, 8, 8, 3)]:
        for overlap in (True, False):
            for error in pool.run(ranks, way, reduce_case, rows, k, width, slabs, overlap, torch.float32, True):
                assert max(error) < 1e-5
    for error in pool.run(ranks, way, reduce_case, 130, 32, 40, 3, True, torch.bfloat16, True):
        assert max(error) < 2e-2


@pytest.mark.parametrize("ranks", [2, 3])
def test_copy_engines_sum_by_exchanges(pool, ranks):
    for rows in (700, 300, 5):
        for error in pool.run(ranks, by_copies, reduce_case, rows, 8, 16, None, True, torch.float32):
            assert max(error) < 1e-5


def exchange_case(tokens, batch, heads, dim, groups, act, as_products):
    comm = communicator()
    layout = UlyssesLayout(comm.rank, comm.size, tokens, batch, heads, dim, groups)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(batch, tokens, 16, generator=generator)
    weights = [torch.randn(heads * dim, 16, generator=generator) for _ in range(3)]
    biases = [torch.randn(heads * dim, generator=generator), None, torch.randn(heads * dim, generator=generator)]
    products = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    if act == "gelu-tanh":
        products = [F.gelu(one, approximate="tanh") for one in products]

    start, stop = layout.token_ranges[comm.rank]
    rows = whole[:, start:stop].flatten(0, 1)
    seen = []
    between = seen.append if groups > 1 else None
    if as_products:
        local = [one[:, start:stop].flatten(0, 1) for one in products]
        arrivals = all_to_all_products(local, comm=comm, plan=layout.projection_plan, between=between)
    else:
        arrivals = gemm_all_to_all(
            rows, weights, biases, comm=comm, plan=layout.projection_plan, act=act, between=between
        )
    assert len(seen) == (groups > 1)
    worst = 0.0
    for group in range(groups):
        first, last = layout.head_ranges[comm.rank][group]
        got = arrivals.wait(group).view(tokens, batch, 3, last - first, dim)
        for index, product in enumerate(products):
            wanted = product.view(batch, tokens, heads, dim)[:, :, first:last].transpose(0, 1)
            worst = max(worst, float((got[:, :, index] - wanted).abs().max()))
    return worst


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_to_all(pool, ranks, way):
    for case in [
        (17, 2, 5, 4, 1, "none", False),
        (10, 1, 8, 2, 2, "gelu-tanh", False),
        (3, 2, 7, 4, 1, "none", True),  # fewer tokens than ranks: one has none
        (23, 3, 9, 4, 2, "none", True),
    ]:
        assert max(pool.run(ranks, way, exchange_case, *case)) < 1e-4


def unsent_case(recv_own, send_own):
    """What is received, when parts that this rank has for itself are there (so many elements) on either side."""
    comm = communicator()
    sizes = [[10 * source + target + 1 for target in range(comm.size)] for source in range(comm.size)]
    send_sizes, recv_sizes = sizes[comm.rank], [line[comm.rank] for line in sizes]
    send_sizes[comm.rank], recv_sizes[comm.rank] = send_own, recv_own
    sent = torch.cat([torch.full((size,), 10.0 * comm.rank + other) for other, size in enumerate(send_sizes)])
    received = torch.full((sum(recv_sizes),), -1.0)
    comm.all_to_all(received, sent, recv_sizes, send_sizes).wait()
    wanted = [-1.0 if other == comm.rank else 10.0 * other + comm.rank for other in range(comm.size)]
    return received.tolist() == [value for value, size in zip(wanted, recv_sizes, strict=True) for _ in range(size)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("own", [(0, 0), (4, 0), (0, 4), (4, 7)])
def test_a_rank_sends_itself_nothing(pool, ranks, own, way):
    assert all(pool.run(ranks, way, unsent_case, *own))


def gather_case(size):
    comm = communicator()
    sizes = tuple(size + (rank % 2) for rank in range(comm.size))
    rows = torch.full((sizes[comm.rank], 2), float(comm.rank))
    return comm.gather_rows(rows, sizes).wait()[:, 0].tolist(), sizes


@pytest.mark.parametrize("ranks", [1, 3])
def test_gather_rows(pool, ranks):
    for size in (0, 4):
        for rows, sizes in pool.run(ranks, gather_case, size):
            assert rows == [rank for rank, count in enumerate(sizes) for _ in range(count)]


def timed_case(overlap):
    timeline = Timeline(CPU)
    comm = communicator(overlap, timeline)
    a, weight, _ = parts(256, 64, 64, comm.size)
    timeline.begin_step()
    gemm_all_reduce(a[comm.rank], weight[comm.rank], comm=comm)
    timeline.end_step()
    return timeline.steps()


@pytest.mark.parametrize("overlap", [True, False])
def test_communication_is_booked(pool, overlap):
    for (step,) in pool.run(2, timed_case, overlap):
        assert 0 < step.communication_s <= step.wall_s
        assert 0 < step.exposed_s <= step.wall_s


@pytest.mark.parametrize(
    "change, words",
    [
        ({"a": torch.zeros(2, 3, 4)}, r"a must be a matrix \[M, K\], got shape \(2, 3, 4\)"),
        ({"weight": torch.zeros(4, 9)}, r"weight must be \[N, K\] with K=8"),
        ({"bias": torch.zeros(5)}, r"must be \[4\]"),
        ({"weight": torch.zeros(4, 8, dtype=torch.float64)}, "weight 0 is torch.float64 .* a is torch.float32"),
        ({"plan": all_reduce_plan(7, 4, 1)}, r"the plan is for .*7.* the operands need .*6"),
        ({"plan": reduce_scatter_plan(6, 4, 1)}, "the plan is for .*reduce_scatter"),
    ],
)
def test_bad_operands(change, words):
    given = {"a": torch.zeros(6, 8), "weight": torch.zeros(4, 8), "bias": None, "plan": None} | change
    with pytest.raises(ValueError, match=words):
        gemm_all_reduce(given["a"], given["weight"], given["bias"], comm=communicator(), plan=given["plan"])


def of_another_rank():
    comm = communicator()
    plan = sum_plan("all_reduce", 6, 4, comm.size, 1 - comm.rank)
    gemm_all_reduce(torch.zeros(6, 8), torch.zeros(4, 8), comm=comm, plan=plan)


def test_the_plan_of_another_rank_is_refused(pool):
    for rank, text in enumerate(pool.errors(2, of_another_rank)):
        assert f"the plan is for rank {1 - rank}, this is rank {rank}" in text
