"""Exchanges between ranks of one host by the GPUs' copy engines.

NCCL's collectives run on SMs: they take them from the products and attentions that they run beside, and wait for them
where a kernel keeps all SMs to its end. Copy engines take none. A message goes straight into the other GPU's memory
where the GPUs reach each other, else in chunks through host memory that both processes map: out of one GPU and into
the other at the same time. On two H200 through host memory 64 MB took 1.9 ms each way, 3.0 by NCCL.

The streams wait for each other's counters in host memory; neither the host nor an SM waits. All ranks start their
exchanges in the same order, and what a wait waits for was enqueued before, so every wait ends.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fodit.kernels.binding import HANDLE_BYTES, Lane, Library, Post
from fodit.ops.host_memory import PinnedMapping, whole_pages
from fodit.ops.ready import Ready
from fodit.timeline import COMMUNICATION, Timeline

SLOT_BYTES, MOST_SLOTS, LEAST_SLOTS = 4 << 20, 8, 4
RINGS_BYTES = 64 << 20  # of one rank, for all others together, where they need not be longer for the fewest slots
POSTS = 64  # of one direction; the ranks are never more than a few messages apart
POST_BYTES = 8 + 8 + HANDLE_BYTES + 48
FREED = 128  # the second counter's offset: on a cache line of its own
HEADER = 256
ASK_S = 0.2  # between two looks at whether Python was interrupted
Place = tuple[int, int]  # address on a device, and bytes


@dataclass(frozen=True)
class LaneShape:
    """What the lane of two ranks takes: two counters, posts, and a ring of slots."""

    slots: int
    slot_bytes: int

    @classmethod
    def of(cls, ranks: int, direct: bool) -> "LaneShape":
        if direct:
            return cls(0, 0)
        fitting = RINGS_BYTES // (ranks - 1) // SLOT_BYTES
        return cls(min(max(fitting, LEAST_SLOTS), MOST_SLOTS), SLOT_BYTES)

    @property
    def size(self) -> int:
        return whole_pages(HEADER + POSTS * POST_BYTES) + self.slots * self.slot_bytes


class Direction:
    """From one rank to another: this process's view of their lane."""

    def __init__(self, memory: PinnedMapping, shape: LaneShape) -> None:
        self.memory, device = memory, memory.device_address
        ring = device + shape.size - shape.slots * shape.slot_bytes
        self.filled, self.freed = device, device + FREED
        self.lane = Lane(ring, self.filled, self.freed, shape.slot_bytes, shape.slots, 0)

    def post(self, number: int) -> int:
        """Host address of a message's `Post`."""
        return self.memory.address + HEADER + number % POSTS * POST_BYTES

    def release(self) -> None:
        """Let every stream go on that waits here. What it copies then is void."""
        for offset in (0, FREED):
            Post.from_address(self.memory.address + offset).number = 1 << 30


class Copies:
    """Starts exchanges of the ranks of one group, in the order of the calls.

    Args:
        rank: this rank in the group.
        outward, inward: to and from every other rank, by rank.
        direct: the GPUs reach each other's memory.
        timeout_s: how long a rank may be behind.
    """

    def __init__(
        self,
        library: Library,
        device: torch.device,
        rank: int,
        outward: dict[int, Direction],
        inward: dict[int, Direction],
        direct: bool,
        timeout_s: float,
    ) -> None:
        self._library, self.device, self.direct, self._timeout_s = library, device, direct, timeout_s
        self._outward, self._inward = outward, inward
        ranks = len(outward) + 1
        # In every turn each rank sends to one other and receives from one other.
        self._turns = [((rank + turn) % ranks, (rank - turn) % ranks) for turn in range(1, ranks)]
        self.sending, self.receiving, self._granting = (torch.cuda.Stream(device, priority=-1) for _ in range(3))
        self._opened: dict[bytes, int] = {}
        self._number = 0
        mappings = [one.memory for one in (*outward.values(), *inward.values())]
        self._closer = weakref.finalize(self, _close, library, device, mappings, self._opened)
        self._closer.atexit = False  # then CUDA ends with the process

    def __str__(self) -> str:
        return "copy engines, " + ("GPU to GPU" if self.direct else "through host memory")

    def release(self) -> None:
        """Let every stream go on that waits for another rank; what was exchanged is void. For tests that fail."""
        for one in (*self._outward.values(), *self._inward.values()):
            one.release()

    def empty(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """A flat buffer of `like`'s type that exchanges may write into."""
        if not self.direct:
            return like.new_empty(count)
        with torch.cuda.use_mem_pool(_pool(self.device), self.device):
            return like.new_empty(count)

    def start(
        self,
        received: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor],
        ready: Ready,
        timeline: Timeline,
    ) -> Callable[[], None]:
        """Start to exchange contiguous tensors, one from and one for each rank, when `ready`.

        Those from and for this rank itself are not looked at. Where tensors are received must come from `empty`, and be
        free when `ready`.

        Returns:
            A function that lets the current stream wait for the end. Until then the tensors must be kept.

        Raises:
            TimeoutError: another rank does not start its exchange.
            KernelError: CUDA refuses something.
        """
        sources, targets = _places(sent), _places(received)
        with torch.cuda.device(self.device):
            ready.hold(self.sending)
            with torch.cuda.stream(self.sending):
                begin = timeline.mark()
            (self._push if self.direct else self._stage)(sources, targets, ready)
            with torch.cuda.stream(self.receiving):
                timeline.add(COMMUNICATION, begin, timeline.mark())
            ends = [_end_of(stream) for stream in (self.sending, self.receiving)]

        def finish() -> None:
            for end in ends:
                torch.cuda.current_stream(self.device).wait_event(end)

        return finish

    def _stage(self, sources: list[Place], targets: list[Place], ready: Ready) -> None:
        """Through host memory."""
        ready.hold(self.receiving)  # before, what is written may still be read
        streams = self.sending.cuda_stream, self.receiving.cuda_stream
        for to, source in self._turns:
            out, into = self._outward[to].lane, self._inward[source].lane
            self._library.stage(out, *sources[to], into, *targets[source], *streams)

    def _push(self, sources: list[Place], targets: list[Place], ready: Ready) -> None:
        """Into the memory of the others, when they have said where and that it is free."""
        self._number += 1
        library, number = self._library, self._number
        ready.hold(self._granting)
        for _, source in self._turns:
            address, size = targets[source]
            if size:
                direction = self._inward[source]
                library.post(direction.post(number), number, *library.export(address))
                library.write(self._granting.cuda_stream, direction.freed, number)
        for to, _ in self._turns:
            address, size = sources[to]
            if size:
                direction, stream = self._outward[to], self.sending.cuda_stream
                place = self._collect(direction.post(number), number)
                library.wait(stream, direction.freed, number)
                library.copy(stream, place, address, size)
                library.write(stream, direction.filled, number)
        for _, source in self._turns:
            if targets[source][1]:
                library.wait(self.receiving.cuda_stream, self._inward[source].filled, number)

    def _collect(self, post: int, number: int) -> int:
        """Where a message may be stored, for this device."""
        found, waited = None, 0.0
        while found is None:
            found, waited = self._library.collect(post, number, ASK_S), waited + ASK_S
            if found is None and waited > self._timeout_s:
                raise TimeoutError(f"timed out: another rank did not start exchange {number} in {waited:.0f} s")
        handle, offset = found
        if handle not in self._opened:
            self._opened[handle] = self._library.open(handle)
        return self._opened[handle] + offset


@cache
def _pool(device: torch.device) -> torch.cuda.MemPool:
    """Memory that other processes map, and that is therefore not given back to CUDA before this one ends."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def _places(tensors: Sequence[torch.Tensor]) -> list[Place]:
    return [(one.data_ptr(), one.nbytes) for one in tensors]


def _end_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _close(library: Library, device: torch.device, mappings: list[PinnedMapping], opened: dict[bytes, int]) -> None:
    if torch.cuda.is_current_stream_capturing():  # nothing may be waited for: what is pinned stays so
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        for base in opened.values():
            library.close(base)
        for mapping in mappings:
            mapping.close()
