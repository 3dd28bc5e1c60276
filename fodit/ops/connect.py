"""Connects the ranks of a group for exchanges by copy engines, where they are all in one host."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fodit.agreement import describe, everyone
from fodit.environment import EXCHANGE
from fodit.kernels.binding import Library, load
from fodit.ops.communicator import Communicator
from fodit.ops.copies import Copies, Direction, LaneShape
from fodit.ops.host_memory import PinnedMapping, Place, SharedFile
from fodit.ops.peers import peer_allowed, reaches, uuid_of
from fodit.ops.ready import StreamReached
from fodit.timeline import Timeline

TEST_S = 20.0
TEST_SIZES = (1, 1000, 10 << 20)  # int32 elements for each rank; the last ones fill a ring more than once
BOOT = Path("/proc/sys/kernel/random/boot_id")


def connected(
    group: dist.ProcessGroup | None,
    device: torch.device,
    control: dist.ProcessGroup | None,
    timeout_s: float = 1800.0,
    timeline: Timeline | None = None,
    overlap: bool = True,
) -> Communicator:
    """A communicator with copy engines, where the group can have them; arguments as for both."""
    comm = Communicator(group, device, timeline, overlap)
    if comm.stream is not None and group is not None and control is not None:
        comm.copies, notes = connect(group, device, control, timeout_s)
        comm.notes = tuple(notes)
        if comm.copies is not None:
            _connect_nccl(group, device)
    return comm


def _connect_nccl(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL connects ranks when they first need it. While a graph is captured they cannot, and then NCCL exchanges."""
    numbers = torch.zeros(dist.get_world_size(group), device=device)
    dist.all_reduce(numbers, group=group)
    dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)


def connect(
    group: dist.ProcessGroup, device: torch.device, control: dist.ProcessGroup, timeout_s: float
) -> tuple[Copies | None, list[str]]:
    """Copy engines for the ranks of a group, or None: then NCCL does their exchanges.

    Straight from GPU to GPU where the group's GPUs have peer access (and NCCL_P2P_DISABLE is not set), else through
    host memory. `FODIT_EXCHANGE=staged` keeps to host memory, `FODIT_EXCHANGE=nccl` to NCCL. A test exchange has to
    come out right first.

    Args:
        group: of the ranks that exchange.
        control: a gloo group of all ranks, which call this together, each with its own group.
        timeout_s: how long a rank may be behind.

    Returns:
        The copy engines, and a sentence for everything that keeps the group from faster ones.

    Raises:
        ValueError: on all ranks, if FODIT_EXCHANGE is none of these on one of them.
    """
    for value in everyone(control, EXCHANGE.value):
        if (wrong := EXCHANGE.wrong(value)) is not None:
            raise ValueError(wrong)
    meeting = _Meeting(group, device, control, timeout_s)
    notes = [f"exchanges go through NCCL: {meeting.reason}"] if meeting.reason is not None else []
    found: Copies | None = None
    for direct in (True, False):  # ranks of all groups meet in both attempts, whether theirs makes them or not
        wanted = meeting.reason is None and found is None and (meeting.peers or not direct)
        made, failure = meeting.attempt(direct, wanted)
        found = found or made
        if failure is not None:
            notes.append(f"no exchanges {'from GPU to GPU' if direct else 'through host memory'}: {failure}")
    return found, notes


def refusal() -> str | None:
    """Why this process cannot exchange by copy engines, or None."""
    library = load()
    if EXCHANGE.value == "nccl":
        return f"{EXCHANGE.name}=nccl"
    return library if isinstance(library, str) else None


def direct_allowed() -> bool:
    """Whether it may do so from GPU to GPU."""
    return EXCHANGE.value != "staged" and peer_allowed()


@dataclass(frozen=True)
class _Offer:
    """What a rank says of itself.

    Attributes:
        host: by name and boot.
        reason: why it cannot take part, or None.
        uuid: of its GPU.
        reached: of every other GPU it sees, whether it has peer access; None where it must not use that.
    """

    host: str
    reason: str | None
    uuid: str
    reached: dict[str, bool] | None

    @classmethod
    def of(cls, device: torch.device) -> "_Offer":
        host = socket.gethostname() + (BOOT.read_text().strip() if BOOT.is_file() else "")
        others = {uuid_of(other): reaches(device, other) for other in range(torch.cuda.device_count())}
        return cls(host, refusal(), uuid_of(device), others if direct_allowed() else None)


class _Meeting:
    """The ranks of one group, which do the same steps and stop together.

    Attributes:
        reason: why this group cannot, or None.
        peers: whether all its GPUs reach each other, as far as their ranks see them; the test has the last word.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, control: dist.ProcessGroup, timeout_s: float
    ) -> None:
        self.device, self._control, self._timeout_s = device, control, timeout_s
        self._members = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        offers: list[_Offer] = self._ours(_Offer.of(device))
        self.reason = next((one.reason for one in offers if one.reason is not None), None)
        hosts, uuids = {one.host for one in offers}, [one.uuid for one in offers]
        if len(hosts) > 1:
            self.reason = f"the ranks are on {len(hosts)} hosts"
        self.peers = all(
            one.reached is not None and all(one.reached.get(uuid, True) for uuid in uuids) for one in offers
        )

    def attempt(self, direct: bool, wanted: bool) -> tuple[Copies | None, str | None]:
        """Copy engines that passed their test, or what failed first on any rank; neither if they are not wanted."""
        shape = LaneShape.of(self.size, direct)
        file, failure = self._step(wanted, lambda: SharedFile(shape.size * (self.size - 1)))
        places = self._ours(file.place if file is not None else None)
        mapped, failure = self._step(wanted and failure is None, lambda: self._directions(places, shape), failure)
        if file is not None:
            file.close()
        library = load()

        def tested() -> Copies:
            assert isinstance(library, Library) and mapped is not None
            test_s = min(TEST_S, self._timeout_s / 4)  # the others wait meanwhile
            copies = Copies(library, self.device, self.rank, mapped[0], mapped[1], direct, test_s)
            _test(copies, self.rank, self.size, test_s)
            copies.timeout_s = self._timeout_s
            return copies

        copies, failure = self._step(wanted and failure is None, tested, failure)
        return copies if failure is None else None, failure

    def _directions(self, places: list[Place], shape: LaneShape) -> tuple[dict[int, Direction], dict[int, Direction]]:
        """To and from every other rank. The lane from p to q is in the file of p, at the distance from p to q."""
        library = load()
        assert isinstance(library, Library)

        def direction(sender: int, receiver: int) -> Direction:
            offset = ((receiver - sender) % self.size - 1) * shape.size
            return Direction(PinnedMapping(library, places[sender], offset, shape.size), shape)

        others = [rank for rank in range(self.size) if rank != self.rank]
        with torch.cuda.device(self.device):
            return (
                {other: direction(self.rank, other) for other in others},
                {other: direction(other, self.rank) for other in others},
            )

    def _step(self, wanted: bool, action: Callable[[], Any], failed: str | None = None) -> tuple[Any, str | None]:
        """What the action made here, if it is wanted, and what failed first on any rank of the group."""
        made, failure = None, failed
        if wanted:
            try:
                made = action()
            except Exception as error:  # noqa: BLE001 - whatever it is, NCCL does the exchanges, and the note says why
                failure = describe(error)
        return made, next((one for one in self._ours(failure) if one is not None), None)

    def _ours(self, value: Any) -> list[Any]:
        """Of every rank of this group; all ranks there are call it together."""
        values = everyone(self._control, value)
        return [values[rank] for rank in self._members]


def _test(copies: Copies, rank: int, size: int, test_s: float) -> None:
    """Exchange known numbers, twice for each size.

    Raises:
        RuntimeError: other numbers arrive, or none in time. The other ranks do not wait for this one then.
    """
    end = time.monotonic() + test_s
    try:
        for count in (*TEST_SIZES, *TEST_SIZES):
            _exchange_numbers(copies, rank, size, count, end)
    except BaseException:
        copies.give_up()
        raise


def _exchange_numbers(copies: Copies, rank: int, size: int, count: int, end: float) -> None:
    device = copies.device
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    sent = [numbers + (100 * rank + other) for other in range(size)]
    received = copies.empty(size * count, numbers).fill_(-1).view(size, count)
    copies.start(received.unbind(), sent, StreamReached(device), Timeline(device, enabled=False))()
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        if time.monotonic() > end:
            raise RuntimeError("a test exchange did not end in time")
        time.sleep(1e-4)
    copies.check()
    for other, part in enumerate(received):
        wanted = numbers + (100 * other + rank) if other != rank else torch.full_like(numbers, -1)
        if not torch.equal(part, wanted):
            raise RuntimeError(f"a test exchange of {4 * count} bytes came out wrong")
