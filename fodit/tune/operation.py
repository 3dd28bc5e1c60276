"""One operation on random data, in every way there is, to be measured."""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from fodit.agreement import everyone
from fodit.kernels import gemm
from fodit.kernels.binding import Kernel
from fodit.kernels.selftest import failure
from fodit.models.returns import project
from fodit.models.ulysses import attend_groups
from fodit.ops.communicator import Communicator, Pending, all_gather_single
from fodit.ops.executor import CudaExecutor, Executor, TorchExecutor, linear_segments
from fodit.ops.gemm import Arrivals
from fodit.ops.ready import Ready
from fodit.ops.slabs import send_slabs, start_collective
from fodit.ops.sums import sum_over_ranks
from fodit.plan import Plan, SumPlan, UlyssesLayout
from fodit.tune.predict import MLP_RATIO
from fodit.tune.search import Shape

WEIGHT_STD = 0.02


def collective(
    comm: Communicator, op: str, received: torch.Tensor, sent: torch.Tensor, ready: Ready | None = None
) -> Pending:
    """Start a collective over all of two flat buffers of one length; the all-reduce is done in place.

    An all-to-all leaves out this rank's own part, as it does in an operation, whose product stores it in place.
    """
    part = sent.numel() // comm.size
    if op == "all_gather":
        return comm.start(all_gather_single, received, sent[:part], ready=ready)
    target, sizes = received[:part] if op == "reduce_scatter" else received, (part,) * comm.size
    return start_collective(comm, op, target, sent, sizes, sizes, ready)


def product(
    kernel: Kernel | None,
    plan: Plan,
    out: torch.Tensor,
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    sms: int,
    addends: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> Executor:
    """Start a product into a flat buffer; by cuBLAS, slab by slab, without a kernel."""
    if kernel is None:
        return TorchExecutor(plan, out, linear_segments(a, weights, biases, "none", addends))
    return CudaExecutor(kernel, plan, out, a, weights, biases, "none", sms, addends, counters)


class Operation:
    """The operands of a shape.

    Args:
        shape: what is computed.
        comm: of the ranks that communicate.
    """

    def __init__(self, shape: Shape, comm: Communicator) -> None:
        self.shape, self.comm = shape, comm
        dtype, device = getattr(torch, shape.dtype), comm.device
        self.a = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
        widths = [shape.n // shape.projections] * shape.projections
        self.weights = [torch.randn(n, shape.k, device=device, dtype=dtype).mul_(WEIGHT_STD) for n in widths]
        self.biases: list[torch.Tensor | None] = [None] * shape.projections

    @cached_property
    def _together(self) -> torch.Tensor:
        return torch.cat(self.weights)

    @cached_property
    def _out(self) -> torch.Tensor:
        return self.a.new_empty(self.shape.m, self.shape.n)

    @cached_property
    def _received(self) -> torch.Tensor:
        return self.comm.empty(self.shape.m * self.shape.n, self.a)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        """Start the collective of one part of the product."""
        return collective(self.comm, self.shape.op, received, sent)

    def product(self) -> None:
        """By cuBLAS."""
        torch.mm(self.a, self._together.t(), out=self._out)

    def collective(self, share: int = 1) -> None:
        """Of all of the product, or of one of `share` parts."""
        unit = 8 * self.comm.size
        size = self._out.numel() // share // unit * unit
        self.exchange(self._received[:size], self._out.view(-1)[:size]).wait()

    def serial(self) -> None:
        self.product()
        self.collective()

    def decomposed(self, chunks: int) -> None:
        """Chunks of rows by cuBLAS, each one's collective beside the product of the next."""
        rows = self.shape.m
        step = max(-(-rows // chunks) // self.comm.size, 1) * self.comm.size
        started = []
        for start in range(0, rows, step):
            out = self._out[start : start + step]
            torch.mm(self.a[start : start + step], self._together.t(), out=out)
            received = self._received[start * self.shape.n :][: out.numel()]
            started.append(self.exchange(received, out.view(-1)))
        for pending in started:
            pending.wait()

    def wanted(self) -> torch.Tensor:
        """What this rank receives, by cuBLAS and one collective: all rows, its part of them, or its columns of all.

        Raises:
            ValueError: rows or columns do not divide by the ranks.
        """
        ranks, (m, n) = self.comm.size, (self.shape.m, self.shape.n)
        if m % ranks or n % ranks:
            raise ValueError(f"M={m} and N={n} must divide by {ranks} ranks")
        self.serial()
        if self.shape.op == "all_reduce":
            return self._out.clone()
        if self.shape.op == "reduce_scatter":
            return self._received[: m * n // ranks].view(-1, n).clone()
        everyone = self.comm.gather_rows(self._out, (m,) * ranks).wait()
        return everyone.view(ranks * m, ranks, -1)[:, self.comm.rank]

    def overlapped(self, plan: Plan | SumPlan, kernel: Kernel | None, sms: int) -> torch.Tensor:
        """As the operation does it with this plan. What is received, flat."""
        if isinstance(plan, SumPlan):

            def part(one: Plan, buffer: torch.Tensor, addends: torch.Tensor | None, counters: torch.Tensor) -> Executor:
                return product(kernel, one, buffer, self.a, self.weights, self.biases, sms, addends, counters)

            return sum_over_ranks(plan, part, self.a, self.comm)
        buffer = self.comm.empty(plan.size, self.a)
        received = self.a.new_empty(plan.recv_size) if plan.op == "reduce_scatter" else buffer
        for pending in self.start(plan, kernel, sms, buffer, received):
            pending.wait()
        return received[: plan.recv_size]

    def start(
        self, plan: Plan, kernel: Kernel | None, sms: int, buffer: torch.Tensor, received: torch.Tensor
    ) -> list[Pending]:
        """The collective of every slab, under way."""
        executor = product(kernel, plan, buffer, self.a, self.weights, self.biases, sms)
        return send_slabs(executor, plan, self.comm, buffer, received)


class Segment(Operation):
    """A layer's attention under Ulysses, as `predict.segment_ms` has it. Norm and rotation of q and k are a copy."""

    def __init__(self, shape: Shape, comm: Communicator, parts: int = 1) -> None:
        super().__init__(shape, comm)
        self.parts = parts
        self.out = nn.Linear(shape.k, len(self.weights[0]), bias=False, device="meta")
        self.out.weight = nn.Parameter(self.weights[0], requires_grad=False)
        sizes = ((MLP_RATIO * shape.k, shape.k), (shape.k, MLP_RATIO * shape.k))
        self._mlp_weights = [self.a.new_empty(size).normal_(std=WEIGHT_STD) for size in sizes]

    def run(
        self, layout: UlyssesLayout, calls: Sequence[tuple[int, ...]], kernel: Kernel | None, sms: int
    ) -> torch.Tensor:
        plan, comm = layout.projection_plan, self.comm
        arrivals = []
        for part in range(self.parts):
            buffer = comm.empty(plan.size, self.a)
            arrivals.append(Arrivals(plan, buffer, self.start(plan, kernel, sms, buffer, buffer)))
            if part == 0 and self.parts > 1:
                self._mlp(self.a)
        returns = [attend_groups(one, _copied, layout, calls, comm, None) for one in arrivals]
        outputs = []
        for part, one in enumerate(returns):
            outputs.append(project(self.out, one, layout, comm, self.parts == 1))
            if part + 1 < self.parts:
                self._mlp(outputs[-1])
        return torch.cat(outputs)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self._mlp_weights
        return torch.mm(torch.mm(x, first.t()), second.t())


def _copied(query: torch.Tensor, key: torch.Tensor, heads: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return query.clone(), key.clone()


def _offered(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """The kernels that are made for this device and type."""
    found = gemm.kernels_for(device)
    return () if isinstance(found, str) or dtype not in gemm.DTYPES else found


def distrusted(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[str, ...]:
    """A sentence for each kernel that this device has and that failed its test."""
    reasons = ((one.name, failure(one, device, dtype)) for one in _offered(device, dtype))
    return tuple(f"the kernel {name} is not used: {reason}" for name, reason in reasons if reason is not None)


def shared_kernels(
    device: torch.device, control: dist.ProcessGroup | None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Kernel]:
    """The kernels that all ranks of a gloo group can trust, by name; empty where products run in torch."""
    mine = {one.name: one for one in _offered(device, dtype) if failure(one, device, dtype) is None}
    everywhere = set.intersection(*(set(names) for names in everyone(control, list(mine))))
    return {name: one for name, one in mine.items() if name in everywhere}
