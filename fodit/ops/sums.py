"""Sums over ranks by exchanges. `fodit.plan.sums` says how."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from fodit.ops.communicator import Communicator, Pending
from fodit.ops.executor import Executor
from fodit.ops.slabs import send_slabs
from fodit.plan import Plan, SumPlan

# Starts the product of a plan into a flat buffer; each addend, a row of a matrix, is added to it.
Product = Callable[[Plan, torch.Tensor, torch.Tensor | None], Executor]


def sum_over_ranks(plan: SumPlan, product: Product, like: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The rows `plan.kept` of the sum of all ranks' products, flat, for use on the current stream.

    Args:
        product: of this rank's operands. What it starts for the plan's `others` has no addends; to each of the plan's
            `own` what the other ranks sent is added.
        like: of the type and on the device of the product.
    """
    others, width = plan.others, plan.width
    buffer = comm.empty(others.size, like)
    first, last = plan.kept
    size = (last - first) * width
    gathered = plan.op == "all_reduce"
    result = comm.empty(size, like) if gathered else like.new_empty(size)
    rows = [[result[start * width : stop * width] for start, stop in parts] for parts in _shifted(plan, first)]
    streams = _Turns(comm, len(plan.own))
    arriving = send_slabs(product(others, buffer, None), others, comm, buffer, buffer)
    pending: list[Pending] = []
    for index, (own, slab) in enumerate(zip(plan.own, others.slabs, strict=True)):
        addends = buffer[slab.recv_start : slab.recv_stop].view(plan.ranks - 1, own.size)
        mine = rows[plan.rank][index]
        with streams.turn(index):
            arriving[index].wait()
            ready = product(own, mine, addends).fill(0)
        if gathered:
            pending.append(comm.exchange([one[index] for one in rows], [mine] * plan.ranks, ready))
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
        self._pieces, self._second = pieces, comm.second_stream if pieces > 1 else None
        if self._second is not None:
            self._current = torch.cuda.current_stream(comm.device.index)
            self._second.wait_stream(self._current)

    def turn(self, index: int) -> AbstractContextManager:
        """In which the current stream is that of a piece."""
        if self._second is None or (self._pieces - index) % 2:
            return nullcontext()
        return torch.cuda.stream(self._second)

    def join(self) -> None:
        """The current stream goes on when both are done."""
        if self._second is not None:
            self._current.wait_stream(self._second)


def _shifted(plan: SumPlan, first: int) -> list[list[tuple[int, int]]]:
    """The plan's parts in the result, which begins with row `first`; only this rank's unless all are gathered."""
    return [
        [
            (start - first, stop - first) if plan.op == "all_reduce" or rank == plan.rank else (0, 0)
            for start, stop in one
        ]
        for rank, one in enumerate(plan.parts)
    ]
