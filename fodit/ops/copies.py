"""Exchanges between ranks of one host by the GPUs' copy engines.

NCCL's collectives run on SMs: they take them from the products and attentions that they run beside, and wait for them
where a kernel keeps all SMs to its end. Copy engines take none. A message goes straight into the other GPU's memory
where the GPUs reach each other, else in chunks through host memory that both processes map: out of one GPU and into
the other at the same time. On two H200 through host memory 67 MB took 1.7 ms each way, 2.9 by NCCL.

The streams wait for each other's counters in host memory; no SM waits. (From GPU to GPU the host waits until the other
rank's host has said where a message may be stored.) All ranks start their exchanges in the same order, and what a wait
waits for was enqueued before, so every wait ends. A rank that fails lets the others go: see `Copies.give_up`.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int32, memset, sizeof
from dataclasses import dataclass
from functools import cache

import torch

from fodit.kernels.binding import Lane, Library, Post
from fodit.ops.host_memory import PinnedMapping, whole_pages
from fodit.ops.ready import Ready
from fodit.timeline import COMMUNICATION, Timeline

SLOT_BYTES, MOST_SLOTS, LEAST_SLOTS = 4 << 20, 8, 4
RINGS_BYTES = 64 << 20  # of one rank, for all others together, where they need not be longer for the fewest slots
POSTS = 64  # of one direction; all ranks post in every exchange, so they are never more than one apart
FREED = 128  # the second counter's offset: on a cache line of its own
HEADER = 256
RELEASED = 1 << 30  # a counter's value where nothing is waited for any more
ASK_S = 0.2  # between two looks at whether Python was interrupted
GIVE_UP_S = 10.0
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
        slots = min(max(fitting, LEAST_SLOTS), MOST_SLOTS)
        return cls(1 << slots.bit_length() - 1, SLOT_BYTES)

    @property
    def size(self) -> int:
        return whole_pages(HEADER + POSTS * sizeof(Post)) + self.slots * self.slot_bytes


class Direction:
    """From one rank to another: this process's view of their lane."""

    def __init__(self, memory: PinnedMapping, shape: LaneShape) -> None:
        self.memory, device = memory, memory.device_address
        ring = device + shape.size - shape.slots * shape.slot_bytes
        self.filled, self.freed = device, device + FREED
        self.lane = Lane(ring, self.filled, self.freed, shape.slot_bytes, shape.slots, 0)
        self._counters = [c_int32.from_address(memory.address + offset) for offset in (0, FREED)]

    def post(self, number: int) -> int:
        """Host address of a message's `Post`."""
        return self.memory.address + HEADER + number % POSTS * sizeof(Post)

    @property
    def released(self) -> bool:
        return any(counter.value >= RELEASED for counter in self._counters)

    def release(self) -> None:
        """Let every stream go on that waits here. What it copies then is void."""
        for counter in self._counters:
            counter.value = RELEASED

    def reset(self) -> None:
        """As it was at first; neither side may be at work."""
        memset(self.memory.address, 0, HEADER + POSTS * sizeof(Post))
        self.lane.moved = 0


class Copies:
    """Starts exchanges of the ranks of one group, in the order of the calls.

    Args:
        rank: this rank in the group.
        outward, inward: to and from every other rank, by rank.
        direct: the GPUs reach each other's memory.
        timeout_s: how long a rank may be behind.

    Attributes:
        direct, timeout_s: as given.
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
        self._library, self.device, self.direct, self.timeout_s = library, device, direct, timeout_s
        self._outward, self._inward, self._index = outward, inward, device.index
        ranks = len(outward) + 1
        # In every turn each rank sends to one other and receives from one other.
        self._turns = [((rank + turn) % ranks, (rank - turn) % ranks) for turn in range(1, ranks)]
        self.sending, self.receiving, self._granting = (torch.cuda.Stream(device, priority=-1) for _ in range(3))
        self._opened: dict[bytes, int] = {}
        self._number = 0
        self._directions = [*outward.values(), *inward.values()]
        mappings = [one.memory for one in self._directions]
        self._closer = weakref.finalize(self, _close, library, device, mappings, self._opened)
        self._closer.atexit = False  # then CUDA ends with the process

    def __str__(self) -> str:
        return "copy engines, " + ("GPU to GPU" if self.direct else "through host memory")

    @property
    def broken(self) -> bool:
        """Whether this rank or another one has given up."""
        return any(one.released for one in self._directions)

    def give_up(self) -> None:
        """Let the other ranks go on, and this rank's own streams; what was exchanged is void.

        A rank that learns of it gives up, too: others may wait for what this one will not send. What is enqueued here
        still counts, so the counters are set again and again until all of it is done.
        """
        end = time.monotonic() + GIVE_UP_S
        done = False
        while not done:
            done = self._idle() or time.monotonic() > end
            for one in self._directions:
                one.release()
            time.sleep(1e-3)

    def _idle(self) -> bool:
        try:
            return all(stream.query() for stream in (self.sending, self.receiving, self._granting))
        except RuntimeError:  # the device has failed: nothing is under way there any more
            return True

    def reset(self) -> None:
        """After a rank has given up: start anew. All ranks do so between two exchanges, and none is at work."""
        self._number = 0
        for one in self._directions:
            one.reset()

    def close(self) -> None:
        """Unmap what other ranks share. No exchange may be under way, and none started any more."""
        self._closer()

    def empty(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """A flat buffer of `like`'s type that exchanges may write into."""
        if not self.direct:
            return like.new_empty(count)
        try:
            return self._pooled(count, like)
        except torch.OutOfMemoryError:  # for a pool torch does not give back what it has cached
            torch.cuda.empty_cache()
            return self._pooled(count, like)

    def _pooled(self, count: int, like: torch.Tensor) -> torch.Tensor:
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
            ConnectionError: a rank has given up.
            KernelError: CUDA refuses something.
            ValueError: a tensor is not contiguous.
        """
        sources, targets = _places(sent), _places(received)
        self.check()
        streams = (self.sending, self.receiving)
        with torch.cuda.device(self._index):
            ready.hold(self.sending)
            begin = timeline.mark(self.sending)
            if self.direct:
                self._push(sources, targets, ready)
            else:
                ready.hold(self.receiving)  # before, what is written may still be read
                self._stage(sources, targets)
            for stream in streams:
                timeline.add(COMMUNICATION, begin, timeline.mark(stream))
            ends = [_end_of(stream) for stream in streams]

        def finish() -> None:
            current = torch.cuda.current_stream(self._index)
            for end in ends:
                current.wait_event(end)

        return finish

    def check(self) -> None:
        """Raise ConnectionError if a rank has given up: what was exchanged since is void."""
        if self.broken:
            raise ConnectionError("the connection to another rank was lost: it gave up its exchanges")

    def _stage(self, sources: list[Place], targets: list[Place]) -> None:
        """Through host memory."""
        streams = self.sending.cuda_stream, self.receiving.cuda_stream
        for to, source in self._turns:
            out, into = self._outward[to].lane, self._inward[source].lane
            self._library.stage(out, *sources[to], into, *targets[source], *streams)

    def _push(self, sources: list[Place], targets: list[Place], ready: Ready) -> None:
        """Into the memory of the others, when they have said where and that it is free."""
        self._number += 1
        library, number = self._library, self._number
        if any(targets[source][1] for _, source in self._turns):
            ready.hold(self._granting)
        granting, sending, receiving = (one.cuda_stream for one in (self._granting, self.sending, self.receiving))
        for _, source in self._turns:
            (address, size), direction = targets[source], self._inward[source]
            library.grant(direction.post(number), number, address if size else None, granting, direction.freed)
        for to, _ in self._turns:
            (address, size), direction = sources[to], self._outward[to]
            handle, offset = self._collect(direction.post(number), number)
            if size:
                place = self._address(handle) + offset
                library.push(sending, place, address, size, direction.freed, direction.filled, number)
        for _, source in self._turns:
            if targets[source][1]:
                library.wait(receiving, self._inward[source].filled, number)

    def _collect(self, post: int, number: int) -> tuple[bytes, int]:
        """Where another rank stores a message: the handle of an allocation, and the offset in it."""
        found, waited = None, 0.0
        while found is None:
            found, waited = self._library.collect(post, number, ASK_S), waited + ASK_S
            if found is None:
                self.check()
                if waited > self.timeout_s:
                    raise TimeoutError(f"another rank did not start exchange {number} in {waited:.0f} s")
        return found

    def _address(self, handle: bytes) -> int:
        """Where another process's allocation begins for this device."""
        if handle not in self._opened:
            self._opened[handle] = self._library.open(handle)
        return self._opened[handle]


@cache
def _pool(device: torch.device) -> torch.cuda.MemPool:
    """Memory that other processes map, and that is therefore not given back to CUDA before this one ends."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool(use_on_oom=True)


def _places(tensors: Sequence[torch.Tensor]) -> list[Place]:
    if wrong := [tuple(one.stride()) for one in tensors if not one.is_contiguous()]:
        raise ValueError(f"what is exchanged must be contiguous, got a tensor with strides {wrong[0]}")
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
