"""Exchanges by copy engines with the GPU's part played by the host: what goes where, and who waits for whom."""

import ctypes
import itertools
import threading
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from fodit.kernels.binding import HANDLE_BYTES, Post
from fodit.ops import copies, host_memory
from fodit.ops.copies import POSTS, Copies, Direction, LaneShape
from fodit.ops.host_memory import PinnedMapping, SharedFile
from fodit.timeline import Timeline

CPU = torch.device("cpu")


class Library:
    """Copies at once. What a stream would wait for must be there already, or come from another thread."""

    def host_register(self, address, size):
        return address

    def host_unregister(self, address):
        pass

    def open(self, handle):
        return 0

    def close(self, address):
        pass

    def wait(self, stream, counter, target):
        while ctypes.c_int32.from_address(counter).value < target:
            assert not FAILED.wait(1e-4)

    def write(self, stream, counter, value):
        ctypes.c_int32.from_address(counter).value = value

    def grant(self, post, number, address, stream, freed):
        one = Post.from_address(post)
        if address is not None:
            one.handle[:], one.offset = (address // 4096 % 7).to_bytes(HANDLE_BYTES, "little"), address
            self.write(stream, freed, number)
        one.number = number

    def push(self, stream, to, source, size, freed, filled, number):
        self.wait(stream, freed, number)
        ctypes.memmove(to, source, size)
        self.write(stream, filled, number)

    def collect(self, address, number, timeout_s):
        one = Post.from_address(address)
        if one.number != number:
            FAILED.wait(1e-3)
            return None
        return bytes(one.handle), one.offset

    def stage(self, out, source, out_bytes, into, to, in_bytes, sending, receiving):
        """Chunk by chunk, both ways, as the library does it."""
        gone, come, chunk = 0, 0, out.slot_bytes
        while gone < out_bytes or come < in_bytes:
            if gone < out_bytes and ctypes.c_int32.from_address(out.freed).value > out.moved - out.slots:
                size = min(chunk, out_bytes - gone)
                ctypes.memmove(out.ring + out.moved % out.slots * chunk, source + gone, size)
                gone, out.moved = gone + size, out.moved + 1
                self.write(None, out.filled, out.moved)
            if come < in_bytes and ctypes.c_int32.from_address(into.filled).value > into.moved:
                size = min(chunk, in_bytes - come)
                ctypes.memmove(to + come, into.ring + into.moved % into.slots * chunk, size)
                come, into.moved = come + size, into.moved + 1
                self.write(None, into.freed, into.moved)
            assert not FAILED.is_set()


FAILED = threading.Event()


class Stream:
    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def wait_event(self, event):
        pass

    def query(self):
        return True


class Now:
    def hold(self, stream):
        assert isinstance(stream, Stream)


@pytest.fixture
def played():
    FAILED.clear()
    replaced = {
        "Stream": Stream,
        "Event": lambda **_: SimpleNamespace(record=lambda *_: None),
        "MemPool": lambda: None,
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: Stream(),
        "synchronize": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        yield Library()


def connected(library, ranks, direct, slots=2, slot_bytes=64):
    """Copies of every rank, on one set of files."""
    shape = LaneShape(0, 0) if direct else LaneShape(slots, slot_bytes)
    files = {pair: SharedFile(host_memory.whole_pages(shape.size)) for pair in itertools.permutations(range(ranks), 2)}

    def direction(pair):
        size = host_memory.whole_pages(shape.size)
        return Direction(PinnedMapping(library, files[pair].place, 0, size), shape)

    made = []
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        outward = {other: direction((rank, other)) for other in others}
        inward = {other: direction((other, rank)) for other in others}
        made.append(Copies(library, CPU, rank, outward, inward, direct, timeout_s=20))
        made[-1]._closer.detach()  # nothing is pinned
    return made


def on_ranks(action, ranks):
    """`action(rank)` in a thread each."""
    failures = []

    def run(rank):
        try:
            action(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
            FAILED.set()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_everything_arrives_in_its_place(played, ranks, direct):
    made = connected(played, ranks, direct)

    def action(rank):
        for call in range(POSTS + 3 if direct else 10):
            sizes = [[(5 * p + 3 * q + 7 * call) % 61 for q in range(ranks)] for p in range(ranks)]
            sizes[call % ranks][(call + 1) % ranks] = 0
            sent = [torch.full((n,), 100.0 * rank + q + call) for q, n in enumerate(sizes[rank])]
            recv = [row[rank] for row in sizes]
            received = torch.full((sum(recv),), -1.0)
            made[rank].start(received.split(recv), sent, Now(), Timeline(CPU, enabled=False))()
            for other, part in enumerate(received.split(recv)):
                assert (part == (100.0 * other + rank + call if other != rank else -1.0)).all(), (call, other)

    with patch.object(copies, "_end_of", lambda _: None):
        on_ranks(action, ranks)


def test_a_rank_that_stays_away(played):
    made = connected(played, 2, True)
    made[0].timeout_s = 0.1
    numbers = torch.zeros(8)
    with pytest.raises(TimeoutError, match="another rank did not start exchange 1"):
        made[0].start(numbers.clone().split(4), numbers.split(4), Now(), Timeline(CPU, enabled=False))


@pytest.mark.parametrize("direct", [True, False])
def test_a_rank_that_gives_up_lets_the_others_go(played, direct):
    """They learn of it instead of waiting, and all can start anew."""
    made = connected(played, 3, direct)
    numbers = [torch.full((4,), float(rank)) for rank in range(3)]

    def exchange(rank):
        received = torch.zeros(12)
        made[rank].start(received.split(4), numbers[rank : rank + 1] * 3, Now(), Timeline(CPU, enabled=False))()
        return received

    def action(rank):
        try:
            if rank == 1:
                raise ValueError("of a call on one rank")
            exchange(rank)
            made[rank].check()
        except (ValueError, ConnectionError):  # a rank that learns of it gives up, too: others may wait for this one
            made[rank].give_up()
        with pytest.raises(ConnectionError, match="gave up"):
            made[rank].check()

    with patch.object(copies, "_end_of", lambda _: None):
        on_ranks(action, 3)
        assert all(one.broken for one in made)
        for one in made:
            one.reset()
        assert not any(one.broken for one in made)
        arrived = {}
        on_ranks(lambda rank: arrived.update({rank: exchange(rank)}), 3)
    for rank, received in arrived.items():
        for other in set(range(3)) - {rank}:
            assert (received[4 * other :][:4] == other).all()


def test_strided_tensors_are_refused(played):
    made = connected(played, 2, False)
    with pytest.raises(ValueError, match="must be contiguous"):
        made[0].start([torch.zeros(4)] * 2, [torch.zeros(8)[::2]] * 2, Now(), Timeline(CPU, enabled=False))


def test_a_file_of_another_container_is_not_written(played):
    mine, other = SharedFile(host_memory.PAGE), SharedFile(host_memory.PAGE)
    with pytest.raises(OSError, match="another container"):
        PinnedMapping(played, (mine.place[0], other.place[1]), 0, host_memory.PAGE)


def test_rings_share_what_a_rank_may_pin():
    assert LaneShape.of(2, direct=True).size == host_memory.whole_pages(copies.HEADER + POSTS * ctypes.sizeof(Post))
    two, eight = LaneShape.of(2, direct=False), LaneShape.of(8, direct=False)
    assert two.slots == copies.MOST_SLOTS and eight.slots == copies.LEAST_SLOTS
    for ranks in range(2, 17):
        slots = LaneShape.of(ranks, direct=False).slots
        assert slots & (slots - 1) == 0, "the count of chunks wraps around"
    assert two.size % host_memory.PAGE == 0


def test_posts_are_as_the_library_has_them():
    assert ctypes.sizeof(Post) == 128 and Post.handle.offset == 16
