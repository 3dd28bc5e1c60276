"""Fills the slabs of a plan one after the other, and starts each one's collective when it is ready."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fodit.ops.communicator import Communicator, Pending, reduce_scatter_single
from fodit.ops.executor import Executor
from fodit.ops.ready import Ready
from fodit.plan import Plan, Slab


def start_collective(
    comm: Communicator,
    op: str,
    target: torch.Tensor,
    source: torch.Tensor,
    recv_sizes: Sequence[int],
    send_sizes: Sequence[int],
    ready: Ready | None = None,
) -> Pending:
    """Start the collective of a plan's `op` on flat tensors; an all-reduce is done in place, on the source.

    Sizes, of each rank's part, are those of an all-to-all.
    """
    if op == "all_reduce":
        return comm.start(dist.all_reduce, source, ready=ready)
    if op == "reduce_scatter":
        return comm.start(reduce_scatter_single, target, source, ready=ready)
    return comm.all_to_all(target, source, recv_sizes, send_sizes, ready)


def send_slabs(
    executor: Executor,
    plan: Plan,
    comm: Communicator,
    buffer: torch.Tensor,
    received: torch.Tensor,
    between: Callable[[torch.Tensor], None] | None = None,
) -> list[Pending]:
    """Fill slab after slab, and start each one's collective; none where the rank is alone.

    `received` is the buffer itself, but for a reduce-scatter. `between` is called with the buffer when every slab has
    been enqueued. The other slabs' collectives start after it, so that one it starts goes second in the queue; but for
    exchanges by copy engines, which have queues of their own.
    """
    pending: list[Pending] = []
    waiting: list[tuple[Slab, Ready]] = []

    def started(slab: Slab, ready: Ready) -> Pending:
        source, target = buffer[slab.start : slab.stop], received[slab.recv_start : slab.recv_stop]
        return start_collective(comm, plan.op, target, source, slab.recv_sizes, slab.send_sizes, ready)

    def send_waiting() -> None:
        if comm.size > 1:
            pending.extend(started(slab, ready) for slab, ready in waiting)
        waiting.clear()

    for index, slab in enumerate(plan.slabs):
        waiting.append((slab, executor.fill(index)))
        if index == 0 or between is None or comm.uses_copies:
            send_waiting()
    if between is not None:
        between(buffer)
    send_waiting()
    return pending
