"""Computes the slabs of a plan and says when each one is ready to be sent."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from fodit.kernels import gemm
from fodit.kernels.binding import Kernel
from fodit.kernels.modulation import wide
from fodit.kernels.selftest import failure
from fodit.ops.communicator import Communicator
from fodit.ops.planning import Choice
from fodit.ops.ready import Ready, StreamReached
from fodit.plan import Plan, Segment

Activation = Literal["none", "gelu-tanh"]
Producer = Callable[[Segment, torch.Tensor], None]  # writes one segment into the [rows, cols] view it is given


class Executor(Protocol):
    """Fills the plan's buffer, slab after slab."""

    def fill(self, index: int) -> Ready:
        """Say when slab `index` can be sent; slabs are asked for in order."""

    def last_wave(self) -> Ready:
        """Say when SMs become free; after all slabs were filled."""


def make_executor(
    plan: Plan,
    buffer: torch.Tensor,
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    act: Activation,
    comm: Communicator,
    choice: Choice | None = None,
    addends: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> Executor:
    """A signaling kernel where one takes these operands, else torch. The communicator keeps the reason for torch.

    A choice without overlap takes torch for rows as they lie: without slabs to send there is nothing to signal. (Other
    storage is one kernel all the same, and a call of torch for every segment.) Without a choice the kernel with least
    work runs on the communicator's SMs. For addends and counters see `CudaExecutor`.
    """
    torch_executor = TorchExecutor(plan, buffer, linear_segments(a, weights, biases, act, addends))
    if choice is not None and not choice.overlap and plan.by_rows:
        return torch_executor
    reason = gemm.refusal(a, weights)
    if reason is None:
        named = choice.kernel if choice is not None else None
        kernel, wrong = choose_kernel(plan, a.device, a.dtype, named)
        comm.fallbacks.update(wrong)
        if kernel is not None:
            sms = comm.gemm_sms(plan.op)  # also for another kernel than was planned, which may have needed no free SMs
            if choice is not None and choice.kernel == kernel.name:
                sms = max(comm.compute_sms - choice.free_sms, 1)
            return CudaExecutor(kernel, plan, buffer, a, weights, biases, act, sms, addends, counters)
        reason = "no kernel can be trusted"
    if a.is_cuda:
        comm.fallbacks.add(f"products ran in torch, slab by slab: {reason}")
    return torch_executor


def stored(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's place in a flat buffer, as a [rows, cols] view."""
    return buffer.as_strided((segment.rows, segment.cols), (segment.ld, 1), buffer.storage_offset() + segment.offset)


class TorchExecutor:
    """The reference: slab after slab, each segment by one torch call. Runs anywhere.

    Args:
        plan: what to compute.
        buffer: flat, of `plan.size` elements.
        produce: writes one segment into the view it is given.
    """

    def __init__(self, plan: Plan, buffer: torch.Tensor, produce: Producer) -> None:
        self.plan, self.buffer, self._produce = plan, buffer, produce

    def fill(self, index: int) -> Ready:
        """Enqueue slab `index` on the current stream, and with the last one what is not sent."""
        self._fill(self.plan.slabs[index].segments)
        ready = StreamReached(self.buffer.device)
        if index + 1 == len(self.plan.slabs):
            self._fill(self.plan.local)
        return ready

    def last_wave(self) -> Ready:
        """Torch does not say: when all is done."""
        return StreamReached(self.buffer.device)

    def _fill(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._produce(segment, stored(self.buffer, segment))


def linear_segments(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    act: Activation,
    addends: torch.Tensor | None = None,
) -> Producer:
    """`act(a @ weight.T + bias)`, a segment at a time; to it, in fp32, what each addend has at the segment's place."""

    def produce(segment: Segment, out: torch.Tensor) -> None:
        rows = a[segment.row_start : segment.row_stop]
        weight = weights[segment.weight][segment.col_start : segment.col_stop].t()
        bias = biases[segment.weight]
        if bias is None:
            torch.mm(rows, weight, out=out)
        else:
            torch.addmm(bias[segment.col_start : segment.col_stop], rows, weight, out=out)
        if act == "gelu-tanh":
            out.copy_(F.gelu(out, approximate="tanh"))
        if addends is not None:
            total = wide(out)
            for one in addends:
                total = total + stored(one, segment)
            out.copy_(total)

    return produce


def copied_segments(products: Sequence[torch.Tensor]) -> Producer:
    """Products [rows, widths[i]] that were computed elsewhere, copied into place."""

    def produce(segment: Segment, out: torch.Tensor) -> None:
        out.copy_(products[segment.weight][segment.row_start : segment.row_stop, segment.col_start : segment.col_stop])

    return produce


class SlabSignal:
    """A slab's counter has reached its number of tiles, in a product that was enqueued before."""

    def __init__(self, started: StreamReached, counters: torch.Tensor, slab: int, tiles: int) -> None:
        self._started, self._counters, self._slab, self._tiles = started, counters, slab, tiles

    def hold(self, stream: torch.cuda.Stream) -> None:
        # The event orders the counter's reset before the wait; the wait itself is invisible to CUDA's own ordering.
        self._started.hold(stream)
        address = self._counters.data_ptr() + 4 * self._slab
        gemm.binding().wait(stream.cuda_stream, address, self._tiles)


class CudaExecutor:
    """All slabs by one kernel, which signals each when it is done.

    The product is enqueued before anything waits for it, and waits for nothing itself: it always ends, and with it
    every wait. Counters are fresh and zeroed on a stream for each call, so repeated calls, groups side by side and
    graph replays cannot see each other's.

    Args:
        kernel: one that takes these operands.
        plan, buffer: as for `TorchExecutor`.
        a, weights, biases, act: the product's operands.
        sms: at most this many SMs; 0 takes all.
        addends: [count, elements] or None: each row lies like the buffer and is added to it.
        counters: int32, `gemm.counters_of(plan)` zeros that are there when the current stream is; None makes them.
    """

    def __init__(
        self,
        kernel: Kernel,
        plan: Plan,
        buffer: torch.Tensor,
        a: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        act: Activation,
        sms: int = 0,
        addends: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> None:
        table, tiles = gemm.device_program(plan, kernel.tile_m, kernel.tile_n, a.device)
        if counters is None:
            counters = torch.zeros(gemm.counters_of(plan), dtype=torch.int32, device=a.device)
        self._counters = counters
        self._tiles, self._sms = tiles, sms
        self._started = StreamReached(a.device)
        code = gemm.ACTIVATIONS[act]
        start = gemm.signaling_gemm if torch.compiler.is_compiling() else gemm.launch
        start(a, weights, biases, buffer, table, self._counters, kernel.index, code, sms, addends)

    def fill(self, index: int) -> Ready:
        """Slab `index` is under way since the executor was made."""
        return SlabSignal(self._started, self._counters, index, self._tiles[index])

    def last_wave(self) -> Ready:
        """As many tiles of the last slab are left as there are SMs, or the first one of it is done."""
        sms = self._sms or torch.cuda.get_device_properties(self._counters.device).multi_processor_count
        tiles = self._tiles[-1]
        return SlabSignal(self._started, self._counters, len(self._tiles) - 1, min(max(tiles - sms, 1), tiles))


@lru_cache(maxsize=gemm.PROGRAMS)
def choose_kernel(
    plan: Plan, device: torch.device, dtype: torch.dtype, named: str | None = None
) -> tuple[Kernel | None, tuple[str, ...]]:
    """The kernel that is named, or the one with least work; and why better ones are not used. None if none is right.

    Work is what its tiles cover, and per tile a cost of about 2048 elements for filling up. Of equals the first of
    the library's list.
    """
    kernels = gemm.kernels_for(device)
    assert not isinstance(kernels, str), kernels

    def work(kernel: Kernel) -> float:
        area = 0
        for one in plan.segments:
            area += -(-one.rows // kernel.tile_m) * kernel.tile_m * -(-one.cols // kernel.tile_n) * kernel.tile_n
        return area * (1 + 2048 / (kernel.tile_m * kernel.tile_n))

    wrong: list[str] = []
    for kernel in sorted(kernels, key=lambda one: (one.name != named, work(one))):
        # A capture cannot wait for a test's result; what is captured ran before, and was tested then.
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        reason = None if capturing else failure(kernel, device, dtype)
        if reason is None:
            return kernel, tuple(wrong)
        wrong.append(f"the kernel {kernel.name} is not used: {reason}")
    return None, tuple(wrong)
