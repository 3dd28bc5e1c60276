"""Collectives of one group on streams of their own, so that the compute stream goes on meanwhile."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from fodit.kernels.binding import Library, load
from fodit.ops.copies import Copies
from fodit.ops.planning import Planner
from fodit.ops.ready import Ready, StreamReached
from fodit.timeline import COMMUNICATION, EXPOSED, Timeline

# torch 2.13 renamed them.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective that was started.

    It keeps alive what the communication stream still reads: the tensors, and the counters of the condition it waits
    for. Freed earlier, their memory could be given to the next operation of the compute stream.
    """

    def __init__(
        self, finish: Callable[[], None] | None, kept: tuple[Any, ...], timeline: Timeline | None = None
    ) -> None:
        self._finish = finish
        self._kept = kept
        self._timeline = timeline

    def wait(self, exposed: bool = True) -> None:
        """Let the current stream (on a CPU: the caller) wait for the collective. A second call does nothing.

        Args:
            exposed: book the wait in the timeline; not where another stream computes meanwhile.
        """
        if self._finish is not None:
            with self._timeline.span(EXPOSED) if exposed and self._timeline is not None else nullcontext():
                self._finish()
        self._finish, self._kept = None, ()


def sms_beside_nccl(device: torch.device) -> int:
    """SMs that a product may take while collectives run: all but a sixteenth, at least four.

    A block of the signaling kernel fills its SM, so that without SMs of their own NCCL's blocks would start when the
    product ends, and nothing would overlap. On two H200 (132 SMs) 8 free SMs were best of 0, 8 and 16 or within 1 %
    of it, with and without peer access (benchmarks/2026-11-29-ops-*-first.json).
    """
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return max(count - max(count // 16, 4), 1)


class Communicator:
    """Starts collectives of one process group in the order of the calls.

    The order of calls must be the same on all ranks. On a GPU NCCL's collectives run on one high-priority stream of
    this communicator, in that order; exchanges by copy engines have streams of their own. On a CPU all run in gloo's
    threads. A group of one rank has no queue: collectives are not called at all.

    Args:
        group: the process group, or None for a single process.
        device: of the tensors.
        timeline: where durations are booked.
        overlap: False waits for every collective as soon as it is started.

    Attributes:
        compute_sms: SMs that products have in all, of which planned ones leave some free.
        copies: copy engines that do the exchanges; None leaves them to NCCL. `fodit.ops.connect` makes them.
        planner: plans what is not given; None leaves it to fixed defaults.
        notes: what a user should know of the exchanges.
        fallbacks: a sentence for each reason why products ran in torch, or not by the best kernel.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeline: Timeline | None = None,
        overlap: bool = True,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.device = device
        self.timeline = timeline or Timeline(device, enabled=False)
        self.overlap = overlap
        use_stream = device.type == "cuda" and self.size > 1
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if use_stream else 0
        self.compute_sms = self._sms
        self.copies: Copies | None = None
        self.notes: tuple[str, ...] = ()
        self.planner: Planner | None = None
        self.fallbacks: set[str] = set()
        self.stream = torch.cuda.Stream(device, priority=-1) if use_stream else None
        self._second: torch.cuda.Stream | None = None

    def gemm_sms(self, op: str) -> int:
        """SMs that a product beside its collectives may take if nobody plans it; 0 takes all."""
        if self.stream is None or (self.uses_copies and op not in ("all_reduce", "reduce_scatter")):
            return 0
        return sms_beside_nccl(self.device)

    @property
    def second_stream(self) -> torch.cuda.Stream | None:
        """A stream for products that take the SMs that those of the current stream leave at their end.

        None without a GPU, and where the current stream is confined to some SMs, which this one would not be.
        """
        if self.device.type != "cuda" or self.stream is None:
            return None
        library = load()
        current = torch.cuda.current_stream(self.device.index)
        if not isinstance(library, Library) or library.stream_sms(current.cuda_stream) < self._sms:
            return None
        if self._second is None:
            self._second = torch.cuda.Stream(self.device)
        return self._second

    def empty(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """A flat buffer of `count` elements of `like`'s type that exchanges may receive into."""
        return like.new_empty(count) if self._copies is None else self._copies.empty(count, like)

    @property
    def uses_copies(self) -> bool:
        """Whether copy engines do an exchange that is started now."""
        return self._copies is not None

    @property
    def _copies(self) -> Copies | None:
        """None too while a graph is captured: a replay would wait for the counts of the first time."""
        captured = self.copies is not None and torch.cuda.is_current_stream_capturing()
        return None if captured else self.copies

    def start(
        self,
        collective: Callable[..., Any],
        *tensors: torch.Tensor | list[torch.Tensor],
        ready: Ready | None = None,
        **kwargs: Any,
    ) -> Pending:
        """Call `collective(*tensors, **kwargs)` of torch.distributed once `ready` (default: the work enqueued so far).

        Tensors must come from the current stream, and stay unchanged until the returned `Pending` was waited for.
        """
        if self.stream is None:
            pending = self._start_on_host(collective, tensors, kwargs)
        else:
            pending = self._start_on_stream(collective, tensors, kwargs, ready)
        return self._started(pending)

    def _started(self, pending: Pending) -> Pending:
        if not self.overlap:
            pending.wait()
        return pending

    def _start_on_stream(self, collective: Any, tensors: tuple, kwargs: dict, ready: Ready | None) -> Pending:
        assert self.stream is not None
        timeline = self.timeline
        ready = ready or StreamReached(self.device)
        ready.hold(self.stream)
        with torch.cuda.stream(self.stream):
            begin = timeline.mark()
            collective(*tensors, group=self.group, **kwargs)  # synchronous: NCCL works on the current stream
            timeline.add(COMMUNICATION, begin, timeline.mark())
            done = torch.cuda.Event()
            done.record()

        def finish() -> None:
            torch.cuda.current_stream(self.device).wait_event(done)

        return Pending(finish, (*tensors, ready), timeline)

    def _start_on_host(self, collective: Any, tensors: tuple, kwargs: dict) -> Pending:
        begin = self.timeline.mark()
        work = collective(*tensors, group=self.group, async_op=True, **kwargs)
        end = [begin]  # read after the collective, when gloo's thread has put its end here
        if self.timeline.enabled:
            work.get_future().add_done_callback(lambda _: end.__setitem__(0, time.perf_counter()))
            self.timeline.add(COMMUNICATION, begin, end)

        return Pending(work.wait, tensors, self.timeline)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        recv_sizes: Sequence[int],
        send_sizes: Sequence[int],
        ready: Ready | None = None,
    ) -> Pending:
        """Start to exchange flat tensors in which the elements from and for each rank lie one behind the other.

        Parts from and for this rank itself may be there on either side: they are neither read nor written. What is
        received into comes from `empty`.
        """
        return self.exchange(received.split(list(recv_sizes)), sent.split(list(send_sizes)), ready)

    def exchange(
        self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], ready: Ready | None = None
    ) -> Pending:
        """Start to exchange contiguous tensors, one from and one for each rank; else as `all_to_all`."""
        targets, sources = self._without_own(received), self._without_own(sent)
        if self._copies is not None:
            ready = ready or StreamReached(self.device)
            end = self._copies.start(targets, sources, ready, self.timeline)
            return self._started(Pending(end, (*targets, *sources, ready), self.timeline))
        if self.device.type == "cuda":
            return self.start(dist.all_to_all, targets, sources, ready=ready)
        return self._packed_all_to_all(targets, sources)

    def _without_own(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A part for each rank, an empty one for this rank."""
        return [part if rank != self.rank else part[:0] for rank, part in enumerate(parts)]

    def _packed_all_to_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Pending:
        """gloo sends from one piece of memory and receives into one, so what lies apart is packed."""
        recv_sizes, send_sizes = ([one.numel() for one in parts] for parts in (targets, sources))
        packed = targets[0].new_empty(sum(recv_sizes))
        pending = self.start(
            dist.all_to_all_single,
            packed,
            torch.cat(sources),
            output_split_sizes=recv_sizes,
            input_split_sizes=send_sizes,
        )

        def finish() -> None:
            pending.wait()
            for target, part in zip(targets, packed.split(recv_sizes), strict=True):
                target.copy_(part)

        return Pending(finish, ())

    def gather_rows(self, rows: torch.Tensor, sizes: tuple[int, ...]) -> "GatheredRows":
        """All-gather along the first dimension, where rank p has `sizes[p]` rows. Starts it; `.wait()` gives the rows.

        By NCCL, also where copy engines do the exchanges: then it waits for none of them, nor they for it. Unfused:
        `dist.all_gather(parts, rows); torch.cat(parts)`. Uneven parts are padded to the longest.
        """
        if rows.shape[0] != sizes[self.rank]:
            raise ValueError(f"rank {self.rank} has {rows.shape[0]} rows to gather, the sizes say {sizes}")
        if self.size == 1:
            return GatheredRows(Pending(None, ()), rows, sizes)
        longest = max(sizes)
        mine = rows.contiguous()
        if rows.shape[0] < longest:
            padding = rows.new_zeros(longest - rows.shape[0], *rows.shape[1:])
            mine = torch.cat([mine, padding])
        everyone = rows.new_empty(self.size * longest, *rows.shape[1:])
        return GatheredRows(self.start(all_gather_single, everyone, mine), everyone, sizes)


class GatheredRows:
    """Rows on their way from all ranks."""

    def __init__(self, pending: Pending, everyone: torch.Tensor, sizes: tuple[int, ...]) -> None:
        self._pending, self._everyone, self._sizes = pending, everyone, sizes

    def wait(self) -> torch.Tensor:
        """[sum(sizes), ...] in the order of ranks, for use on the current stream."""
        self._pending.wait()
        if len(set(self._sizes)) == 1:
            return self._everyone
        longest = max(self._sizes)
        parts = [self._everyone[p * longest :][:size] for p, size in enumerate(self._sizes)]
        return torch.cat(parts)
