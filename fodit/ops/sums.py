"""Sums over ranks by exchanges. `fodit.plan.sums` says how."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from fodit.kernels.gemm import counters_of
from fodit.ops.communicator import Communicator, Pending
from fodit.ops.executor import Executor
from fodit.ops.ready import Ready
from fodit.ops.slabs import send_slabs
from fodit.plan import Plan, SumPlan

# Starts the product of a plan into a flat buffer; takes the addends and counters that `CudaExecutor` documents.
Product = Callable[[Plan, torch.Tensor, torch.Tensor | None, torch.Tensor], Executor]


def sum_over_ranks(plan: SumPlan, product: Product, like: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The rows `plan.kept` of the sum of all ranks' products, flat, for use on the current stream.

    Args:
        product: of this rank's operands. What it starts for the plan's `others` has no addends; to each of the plan's
            `own` what the other ranks sent is added.
        like: of the type and on the device of the product.
    """
    others, width = plan.others, plan.width
    buffer = comm.empty(others.size, like)
    start, stop = plan.kept
    size = (stop - start) * width
    result = comm.empty(size, like) if plan.op == "all_reduce" else like.new_empty(size)

    def rows(first: int, last: int) -> torch.Tensor:
        return result[(first - start) * width : (last - start) * width]

    counts = [counters_of(one) for one in (others, *plan.own)]
    counters = torch.zeros(sum(counts), dtype=torch.int32, device=like.device).split(counts)
    streams = _Turns(comm, len(plan.own))
    arriving = send_slabs(product(others, buffer, None, counters[0]), others, comm, buffer, buffer)
    pending: list[Pending] = []
    for index, (own, slab) in enumerate(zip(plan.own, others.slabs, strict=True)):
        addends = buffer[slab.recv_start : slab.recv_stop].view(plan.ranks - 1, own.size)
        mine = plan.parts[plan.rank][index]
        with streams.turn(index):
            arriving[index].wait(exposed=not streams.two)
            executor = product(own, rows(mine[0][0], mine[-1][1]), addends, counters[1 + index])
            ready = [executor.fill(part) for part in range(len(own.slabs))]
            streams.took(executor)
        if plan.op == "all_reduce":
            for part, condition in enumerate(ready):
                theirs = [rows(*one[index][part]) for one in plan.parts]
                pending.append(comm.exchange(theirs, [theirs[plan.rank]] * plan.ranks, condition))
    streams.join()
    for one in pending:
        one.wait()
    return result


class _Turns:
    """Two streams that take the pieces in turn, the current one the last piece.

    A kernel's last wave leaves SMs idle. On one stream the next kernel would wait for its end; on another one it takes
    them. The first piece follows the product of the other ranks' rows, which is on the current stream.
    """

    def __init__(self, comm: Communicator, pieces: int) -> None:
        self._last_wave: Ready | None = None
        self._pieces, self._second = pieces, comm.second_stream if pieces > 1 else None
        if self._second is not None:
            self._current = torch.cuda.current_stream(comm.device.index)
            self._second.wait_stream(self._current)

    @property
    def two(self) -> bool:
        return self._second is not None

    def turn(self, index: int) -> AbstractContextManager:
        """In which the current stream is that of a piece."""
        if self._second is None:
            return nullcontext()
        stream = self._current if (self._pieces - index) % 2 else self._second
        if self._last_wave is not None:
            self._last_wave.hold(stream)
        return torch.cuda.stream(stream)

    def took(self, executor: Executor) -> None:
        """The next piece must not get ahead of this one: it starts in its last wave."""
        if self._second is not None:
            self._last_wave = executor.last_wave()

    def join(self) -> None:
        """The current stream goes on when both are done."""
        if self._second is not None:
            self._current.wait_stream(self._second)
