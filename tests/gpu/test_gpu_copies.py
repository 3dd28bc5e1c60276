"""Exchanges by copy engines: right under stress, straight from GPU to GPU and through host memory."""

import gc
import os
import random

import pytest
import torch
import torch.distributed as dist

from fodit.ops import Communicator
from fodit.ops.connect import connect
from fodit.ops.copies import SLOT_BYTES
from fodit.parallel import initialise, nccl_options, rank_device

pytestmark = pytest.mark.gpu
CALLS, QUEUED = 400, 10
KINDS = ("direct", "staged")


def start(kind):
    device = rank_device("cuda")
    control = initialise(device, 120)
    comm = Communicator(dist.new_group(backend="nccl", pg_options=nccl_options()), device)
    os.environ["FODIT_EXCHANGE"] = kind
    comm.copies, notes = connect(comm.group, device, control, timeout_s=60)
    assert comm.copies is not None, notes
    assert comm.copies.direct == (kind == "direct"), notes
    return device, comm


def sizes_of(choose, ranks):
    """`sizes[p][q]` elements go from p to q; often none, sometimes more than a ring holds."""
    scale = choose.choice([1, 100, 10_000, 1_000_000, 12 * SLOT_BYTES // 2])
    return [[choose.randint(0, scale) if choose.random() < 0.9 else 0 for _ in range(ranks)] for _ in range(ranks)]


def numbers(seed, source, target, count, device):
    return (
        torch.arange(count, device=device, dtype=torch.int32).mul_(7).add_(1000 * seed + 10 * source + target).short()
    )


def exchange(comm, seed, device):
    """One exchange of numbers that its seed tells; what arrives, and what should."""
    choose = random.Random(seed)
    sizes = sizes_of(choose, comm.size)
    recv = [sizes[other][comm.rank] for other in range(comm.size)]
    sent = torch.cat([numbers(seed, comm.rank, q, n, device) for q, n in enumerate(sizes[comm.rank])])
    received = comm.empty(sum(recv), sent).fill_(-1)
    stall = random.Random(f"{seed} {comm.rank}")
    if stall.random() < 0.3:
        torch.cuda._sleep(stall.randint(10_000, 5_000_000))
    pending = comm.all_to_all(received, sent, recv, sizes[comm.rank])
    wanted = [numbers(seed, p, comm.rank, n, device) for p, n in enumerate(recv)]
    wanted[comm.rank].fill_(-1)  # the own part is neither sent nor written
    return pending, received, torch.cat(wanted)


def stress(kind, calls):
    device, comm = start(kind)
    for first in range(0, calls, QUEUED):
        started = [exchange(comm, first + index, device) for index in range(QUEUED)]
        for index, (pending, received, wanted) in enumerate(started):
            pending.wait()
            assert torch.equal(received, wanted), f"call {first + index}"
        del started, pending, received, wanted  # the next ones get their memory
    return str(comm.copies)


@pytest.mark.parametrize(("ranks", "calls"), [(2, CALLS), (4, CALLS // 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_stress(pool, kind, ranks, calls):
    print(pool.run(ranks, stress, kind, calls))


def side_by_side(kind):
    device, first = start(kind)
    _, second = start(kind)
    for seed in range(20):
        both = [exchange(comm, 500 + seed, device) for comm in (first, second)]
        for pending, received, wanted in reversed(both):
            pending.wait()
            assert torch.equal(received, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_two_groups_at_once(pool, kind):
    pool.run(2, side_by_side, kind)


def closed(kind):
    device, comm = start(kind)
    pending, received, wanted = exchange(comm, 1, device)
    pending.wait()
    assert torch.equal(received, wanted)
    closer = comm.copies._closer
    del comm, pending, received
    gc.collect()
    return closer.alive


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_given_back(pool, kind):
    assert pool.run(2, closed, kind) == [False, False]


def late(kind):
    """Rank 1 never starts its exchange."""
    device, comm = start(kind)
    comm.copies.timeout_s = 1.0
    if comm.rank == 0:
        with pytest.raises(TimeoutError, match="another rank did not start exchange"):
            exchange(comm, 2, device)
        comm.copies.give_up()


def test_a_rank_that_stays_away_is_an_error(pool):
    pool.run(2, late, "direct")


def given_up(kind):
    """Rank 1 gives up after a few exchanges; rank 0 goes on, learns of it, and both start anew."""
    device, comm = start(kind)
    for seed in range(3):
        exchange(comm, seed, device)[0].wait()
    if comm.rank == 1:
        torch.cuda.synchronize()
        comm.copies.give_up()
    else:
        with pytest.raises(ConnectionError, match="gave up"):
            for seed in range(3, 30):
                exchange(comm, seed, device)[0].wait()
                torch.cuda.synchronize()
        comm.copies.give_up()
    torch.cuda.synchronize()
    dist.barrier()
    comm.copies.reset()
    dist.barrier()
    for seed in range(40, 60):
        pending, received, wanted = exchange(comm, seed, device)
        pending.wait()
        assert torch.equal(received, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_gives_up_lets_the_others_go(pool, kind):
    pool.run(2, given_up, kind)
