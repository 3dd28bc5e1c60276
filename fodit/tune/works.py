"""Work for the compute stream, of a given length, beside which collectives can be measured."""

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F

from fodit.kernels import gemm
from fodit.kernels.binding import Kernel
from fodit.ops.communicator import Communicator
from fodit.ops.ready import Ready, StreamReached
from fodit.plan import Plan, all_reduce_plan
from fodit.tune.operation import product

COLUMNS = 12  # tile columns of a product
FIRST = 16  # collectives start after that part of the work, as in an operation
ATTENTION_TOKENS, ATTENTION_HEADS = 8192, 16

# Enqueues itself on the current stream when called, and says when collectives may start.
LongWork = Callable[[], Ready]


class Operands:
    """Of a product of `rows` x `columns` tiles."""

    def __init__(
        self, comm: Communicator, tile: tuple[int, int], k: int, rows: int, columns: int, dtype: torch.dtype
    ) -> None:
        where: dict[str, Any] = {"device": comm.device, "dtype": dtype}
        m, n = rows * tile[0], columns * tile[1]
        self.comm, self.tile, self.k, self.rows, self.tiles = comm, tile, k, rows, rows * columns
        self.a, self.weight = torch.randn(m, k, **where), torch.randn(n, k, **where)
        self.out = torch.empty(m, n, **where)

    def by_cublas(self) -> None:
        torch.mm(self.a, self.weight.t(), out=self.out)

    def by(self, kernel: Kernel, sms: int, plan: Plan | None = None) -> Ready:
        """By a signaling kernel; the signal of its first slab."""
        plan = plan or all_reduce_plan(*self.out.shape, 1, 1)
        return product(kernel, plan, self.out.view(-1), self.a, [self.weight], [None], sms).fill(0)

    def long(self, kernel: Kernel | None, sms: int) -> LongWork:
        """The product with a signal behind its first part; by cuBLAS without a kernel."""
        first = max(self.rows // FIRST, 1)
        if kernel is not None:
            plan = all_reduce_plan(*self.out.shape, 1, (first, self.rows - first), self.tile[0])
            return lambda: self.by(kernel, sms, plan)
        border = first * self.tile[0]

        def enqueue() -> Ready:
            torch.mm(self.a[:border], self.weight.t(), out=self.out[:border])
            ready = StreamReached(self.comm.device)
            torch.mm(self.a[border:], self.weight.t(), out=self.out[border:])
            return ready

        return enqueue


class Attention:
    """SDPA of a few heads, as a model calls it."""

    def __init__(self, dim: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (1, ATTENTION_HEADS, ATTENTION_TOKENS, dim)
        self.query, self.key, self.value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        self.pairs = ATTENTION_HEADS * ATTENTION_TOKENS**2  # query-key pairs of one head each

    def __call__(self) -> None:
        F.scaled_dot_product_attention(self.query, self.key, self.value)

    def long(self, length_ms: float, alone_ms: float) -> LongWork:
        """Attentions one after the other, about `length_ms` long."""

        def enqueue() -> Ready:
            ready = StreamReached(self.query.device)
            for _ in range(ceil(length_ms / alone_ms)):
                self()
            return ready

        return enqueue


class Started:
    """An event that was recorded before."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class Reached:
    """A counter that is there already: what a wait costs where there is nothing to wait for."""

    def __init__(self, comm: Communicator) -> None:
        self._counter = torch.ones(1, dtype=torch.int32, device=comm.device)

    def hold(self, stream: torch.cuda.Stream) -> None:
        gemm.binding().wait(stream.cuda_stream, self._counter.data_ptr(), 1)
