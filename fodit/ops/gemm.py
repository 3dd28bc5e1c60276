"""Matrix products whose result is communicated while it is computed.

All take row-major matrices: `a` [M, K] and weights [N, K] of one dtype on one device, as `torch.nn.Linear` has them.
"""

from collections.abc import Callable, Sequence

import torch

from fodit.ops.communicator import Communicator, Pending
from fodit.ops.executor import Activation, Executor, TorchExecutor, copied_segments, make_executor
from fodit.ops.planning import Choice
from fodit.ops.slabs import send_slabs
from fodit.ops.sums import sum_over_ranks
from fodit.plan import Plan, SumPlan, all_reduce_plan, reduce_scatter_plan, split_sizes, sum_plan

DEFAULT_SLABS, DEFAULT_PARTS = 8, (4, 2, 1)  # without a planner: of collectives, and of sums by exchanges
ROW_ALIGN = 128  # slab borders on tile borders of every kernel


def gemm_all_reduce(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    comm: Communicator,
    plan: Plan | SumPlan | None = None,
) -> torch.Tensor:
    """The sum over ranks of `a @ weight.T`, plus `bias` once: [M, N] on every rank.

    Each rank has its own part of K: `a` [M, K_rank], `weight` [N, K_rank]. Equivalent unfused code::

        out = a @ weight.T
        dist.all_reduce(out)
        out += bias

    Streams, with three slabs of rows::

        compute   [ slab 0 ][ slab 1 ][ slab 2 ]
        comm                [ all-reduce 0 ][ all-reduce 1 ][ all-reduce 2 ]

    Copy engines cannot add. Where they do the exchanges every rank sums up its own rows, and sends the sums to the
    others; see `fodit.plan.sums`.

    Args:
        bias: [N], the same on all ranks.
        comm: the group's communicator.
        plan: from `fodit.plan.all_reduce_plan`, or for sums by exchanges from `fodit.plan.sum_plan`; None takes the
            communicator's planner's, or a fixed default.

    Raises:
        ValueError: shapes, dtypes, devices or the plan do not fit each other.
    """
    rows, width = _check(a, [weight], [bias], plan, "all_reduce", comm)
    plan, choice = _planned("all_reduce", plan, a, rows, width, comm)
    if isinstance(plan, SumPlan):
        return _sum(plan, a, weight, bias, comm, choice)
    buffer = a.new_empty(plan.size)
    # The sum takes the bias once if one rank adds it to its own part.
    once = bias if comm.rank == 0 else None
    executor = make_executor(plan, buffer, a, [weight], [once], "none", comm, choice)
    for pending in send_slabs(executor, plan, comm, buffer, buffer):
        pending.wait()
    return buffer.view(rows, width)


def gemm_reduce_scatter(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    comm: Communicator,
    plan: Plan | SumPlan | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of `a @ weight.T`, plus `bias` once: [M_rank, N].

    Rank p keeps the p-th of `split_ranges(M, size)`; M need not divide. Equivalent unfused code::

        out = a @ weight.T
        dist.reduce_scatter_tensor(mine, out)
        mine += bias

    Streams, with three slabs (slab j holds the j-th part of every rank's rows)::

        compute   [ slab 0 ][ slab 1 ][ slab 2 ]
        comm                [ reduce-scatter 0 ][ reduce-scatter 1 ][ reduce-scatter 2 ]

    Sums by exchanges, arguments and errors as in `gemm_all_reduce`; the plan of a collective comes from
    `fodit.plan.reduce_scatter_plan`.
    """
    rows, width = _check(a, [weight], [bias], plan, "reduce_scatter", comm)
    plan, choice = _planned("reduce_scatter", plan, a, rows, width, comm)
    if isinstance(plan, SumPlan):
        return _sum(plan, a, weight, bias, comm, choice)
    mine = split_sizes(rows, comm.size)[comm.rank]
    buffer = a.new_empty(plan.size)
    if rows % comm.size:
        buffer[plan.slabs[-1].start :].zero_()  # the unused rows of shorter ranks are summed too: keep them finite
    once = bias if comm.rank == 0 else None
    executor = make_executor(plan, buffer, a, [weight], [once], "none", comm, choice)
    received = a.new_empty(plan.recv_size) if comm.size > 1 else buffer
    for pending in send_slabs(executor, plan, comm, buffer, received):
        pending.wait()
    return received.view(-1, width)[:mine]


class Arrivals:
    """The slabs of a product on their way to this rank."""

    def __init__(self, plan: Plan, buffer: torch.Tensor, pending: list[Pending]) -> None:
        self.plan, self._buffer, self._pending = plan, buffer, pending

    def wait(self, index: int) -> torch.Tensor:
        """Slab `index` as it was received (flat), for use on the current stream."""
        if self._pending:
            self._pending[index].wait()
        slab = self.plan.slabs[index]
        return self._buffer[slab.recv_start : slab.recv_stop]


def gemm_all_to_all(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    comm: Communicator,
    plan: Plan,
    act: Activation = "none",
    between: Callable[[torch.Tensor], None] | None = None,
) -> Arrivals:
    """`act(a @ weight.T + bias)` for several weights, column parts of it exchanged between all ranks.

    Which columns go where is the plan's (`UlyssesLayout.projection_plan`). Equivalent unfused code, for q, k and v::

        q, k, v = (act(F.linear(a, w, b)) for w, b in zip(weights, biases))
        for g in groups:      # dim 0 of `sent`: the heads of group g of each destination rank
            dist.all_to_all_single(received[g], torch.cat([q[..., heads[g]], k[...], v[...]]))

    Streams, with three slabs; `between` starts a small collective of its own::

        compute   [ slab 0 ][ slab 1 ][ slab 2 ][between][ attention 0 ] ...
        comm                [ all-to-all 0 ] ... [between's][ all-to-all 1 ][ all-to-all 2 ]

    Args:
        a: [plan.rows, K].
        weights: [plan.widths[i], K] each.
        biases: [plan.widths[i]] or None each.
        between: called with the flat buffer of the product when every slab has been enqueued. A collective that it
            starts goes second in the queue, ahead of the other slabs: what the first consumer needs must not wait for
            the last slab. (By copy engines exchanges have queues of their own, and nothing has to go ahead of them.)

    Returns:
        `Arrivals`; `arrivals.wait(g)` gives slab g.

    Raises:
        ValueError: shapes, dtypes, devices or the plan do not fit each other.
    """
    _check(a, weights, biases, plan, "all_to_all", comm)
    buffer = comm.empty(plan.size, a)
    choice = None if comm.planner is None else comm.planner.product(plan, a.shape[1], a.dtype)
    executor = make_executor(plan, buffer, a, weights, biases, act, comm, choice)
    return Arrivals(plan, buffer, send_slabs(executor, plan, comm, buffer, buffer, between))


def all_to_all_products(
    products: Sequence[torch.Tensor],
    *,
    comm: Communicator,
    plan: Plan,
    between: Callable[[torch.Tensor], None] | None = None,
) -> Arrivals:
    """`gemm_all_to_all` of products [M, plan.widths[i]] that exist already."""
    for product, width in zip(products, plan.widths, strict=True):
        if product.shape != (plan.rows, width):
            raise ValueError(f"a product has shape {tuple(product.shape)}, the plan wants {(plan.rows, width)}")
    buffer = comm.empty(plan.size, products[0])
    executor = TorchExecutor(plan, buffer, copied_segments(products))
    return Arrivals(plan, buffer, send_slabs(executor, plan, comm, buffer, buffer, between))


def _sum(
    plan: SumPlan,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    comm: Communicator,
    choice: Choice | None,
) -> torch.Tensor:
    """By exchanges. Every rank adds the bias to the rows that it sums up."""

    def product(part: Plan, buffer: torch.Tensor, addends: torch.Tensor | None, counters: torch.Tensor) -> Executor:
        once = None if addends is None else bias
        return make_executor(part, buffer, a, [weight], [once], "none", comm, choice, addends, counters)

    return sum_over_ranks(plan, product, a, comm).view(-1, plan.width)


def _planned(
    op: str, plan: Plan | SumPlan | None, a: torch.Tensor, rows: int, width: int, comm: Communicator
) -> tuple[Plan | SumPlan, Choice | None]:
    """The plan that is given, or the planner's with what else it chose, or a fixed default."""
    if plan is not None:
        return plan, None
    # What is planned for copy engines is of no use while a graph is captured: then NCCL sums up.
    choice = None
    if comm.planner is not None and comm.uses_copies == (comm.copies is not None):
        choice = comm.planner.choice(op, rows, width, a.shape[1], a.dtype)
    if comm.uses_copies and (choice is None or choice.overlap):
        parts = DEFAULT_PARTS[: -(-rows // (comm.size * ROW_ALIGN))] if choice is None else choice.slabs
        return sum_plan(op, rows, width, comm.size, comm.rank, parts, ROW_ALIGN), choice
    make = all_reduce_plan if op == "all_reduce" else reduce_scatter_plan
    return make(rows, width, comm.size, DEFAULT_SLABS if choice is None else choice.slabs, ROW_ALIGN), choice


def _check(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    plan: Plan | SumPlan | None,
    op: str,
    comm: Communicator,
) -> tuple[int, int]:
    """Raise ValueError unless the operands fit each other and the plan. Returns M and the first weight's N."""
    if a.dim() != 2:
        raise ValueError(f"a must be a matrix [M, K], got shape {tuple(a.shape)}")
    if len(weights) != len(biases):
        raise ValueError(f"got {len(weights)} weights and {len(biases)} biases: give one bias or None per weight")
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.dim() != 2 or weight.shape[1] != a.shape[1]:
            raise ValueError(
                f"weight {index} has shape {tuple(weight.shape)}, a has {tuple(a.shape)}: weight must be [N, K] with "
                f"K={a.shape[1]}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {index} has shape {tuple(bias.shape)}, must be [{weight.shape[0]}]")
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and (tensor.dtype != a.dtype or tensor.device != a.device):
                raise ValueError(
                    f"{name} {index} is {tensor.dtype} on {tensor.device}, but a is {a.dtype} on {a.device}"
                )
    if plan is not None:
        widths = tuple(weight.shape[0] for weight in weights)
        wanted = (op, comm.size, a.shape[0], widths)
        given = (plan.op, plan.ranks, plan.rows, plan.widths)
        if wanted != given:
            raise ValueError(f"the plan is for (op, ranks, M, N) = {given}, the operands need {wanted}")
        if isinstance(plan, SumPlan) and plan.rank != comm.rank:
            raise ValueError(f"the plan is for rank {plan.rank}, this is rank {comm.rank}")
    return a.shape[0], weights[0].shape[0]
