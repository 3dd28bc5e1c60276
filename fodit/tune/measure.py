"""Takes the profile of a machine: under half a minute, on all its ranks together."""

import ctypes
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from functools import partial
from math import ceil
from statistics import median

import torch
import torch.distributed as dist

from fodit.agreement import everyone
from fodit.ops.communicator import Communicator, Pending
from fodit.ops.peers import peer_allowed, reaches
from fodit.ops.ready import Ready
from fodit.tune.clock import LEAD_MS, Clock, Work
from fodit.tune.operation import collective, shared_kernels
from fodit.tune.predict import ATTENTION, attention_waves, waves
from fodit.tune.profile import COLLECTIVES, COPY_ENGINES, CUBLAS, OPERATIONS, Beside, Curve, Machine, Product, Profile
from fodit.tune.works import ATTENTION_HEADS, ATTENTION_TOKENS, COLUMNS, Attention, LongWork, Operands, Reached, Started

MB = 1 << 20
SIZES = (MB // 8, MB // 2, 2 * MB, 8 * MB, 32 * MB, 128 * MB, 512 * MB)  # of collectives alone
BESIDE_SIZES = (MB, 8 * MB, 32 * MB, 128 * MB)
FREE_SMS = (0, 2, 4, 8, 12, 16, 20)
MOST_FREE = 1 / 6  # of the SMs
CASES = ((8, 1536), (24, 1536), (8, 6144), (24, 6144))  # (waves, K) of measured products
LONG_K, LONG_COLUMNS, LONG_MS = 6144, 24, 6.0  # of products beside which collectives are measured
ROUNDS = 4
SILENT = ("NCCL_DEBUG", "NCCL_VERSION")  # variables that change nothing; container images set the second one
HOST_CALLS = 32
HOST_MS = 0.1  # at most, for a collective to be enqueued
Say = Callable[[str], None]


def this_machine(comm: Communicator, control: dist.ProcessGroup | None, compute_sms: int | None = None) -> Machine:
    """What these ranks run on, the same on all of them.

    Args:
        comm: of the ranks that communicate with each other.
        control: a gloo group of all ranks.
        compute_sms: SMs that products may take; None takes all.
    """
    device = comm.device
    properties = torch.cuda.get_device_properties(device)
    peer = peer_allowed() and all(reaches(device, other) for other in range(torch.cuda.device_count()))
    if comm.copies is not None:
        peer = comm.copies.direct
    set_here = {f"{k}={v}" for k, v in os.environ.items() if k.startswith("NCCL_") and not k.startswith(SILENT)}
    sms = properties.multi_processor_count
    mine = (properties.name, sms, compute_sms or sms, peer, socket.gethostname(), set_here, comm.copies is not None)
    names, counts, taken, peers, hosts, variables, copies = zip(*everyone(control, mine), strict=True)
    link = ["peer access" if all(peers) else "host memory"]
    if all(copies):
        link.append(COPY_ENGINES)
    if len(set(hosts)) > 1:
        link.append(f"{len(set(hosts))} hosts")
    link += sorted(set().union(*variables))
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return Machine(names, comm.size, ", ".join(link), nccl, driver_version(), min(counts), min(taken))


def driver_version() -> str:
    """Of the CUDA interface that the driver offers, such as 13000; torch does not say it."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        failed = 1
    return "unknown" if failed else str(version.value)


def measure(
    machine: Machine,
    comm: Communicator,
    clock: Clock,
    context: AbstractContextManager | None = None,
    say: Say = lambda text: None,
    dtype: torch.dtype = torch.bfloat16,
) -> Profile:
    """The machine's profile.

    Args:
        comm: of the ranks that communicate, with the NCCL options that operations use.
        context: in which the compute stream is current.
        say: told what is done.
    """
    with context or nullcontext():
        mine = _Measuring(machine, comm, clock, say, dtype).profile()
    return everyone(clock.control, mine)[0]  # even the last bit of a fit can differ, and with it a choice


class _Measuring:
    def __init__(self, machine: Machine, comm: Communicator, clock: Clock, say: Say, dtype: torch.dtype) -> None:
        self.machine, self.comm, self.clock, self.dtype = machine, comm, clock, dtype
        self.say = lambda text: say(f"{clock.elapsed_s:6.1f} s  {text}")
        self.kernels = shared_kernels(comm.device, clock.control, dtype)
        largest = max(SIZES) // dtype.itemsize
        self.sent = torch.randn(largest, device=comm.device, dtype=dtype)
        self.received = comm.empty(self.sent.numel(), self.sent)
        self.watch = torch.cuda.Stream(comm.device)  # waits for collectives beside the compute stream
        self._turn = 0

    def profile(self) -> Profile:
        kernels = {name: self._product(name) for name in (CUBLAS, *self.kernels)}
        self.say(f"{len(kernels)} kernels")
        alone = {op: Curve.of((size, self._alone(op, size)) for size in SIZES) for op in COLLECTIVES}
        self.say("collectives alone")
        wait_ms, host_ms = self._overheads()
        attention = {dim: self._attention(dim) for dim in (64, 128)}
        frees = [0]
        if self.kernels and self.comm.copies is None:
            frees = [free for free in FREE_SMS if free <= self.machine.compute_sms * MOST_FREE]
        pace = {free: self._pace(kernels, free) for free in frees}
        self.say("attention, and products with fewer SMs")
        works = {CUBLAS: self._long_operands(kernels, CUBLAS).long(None, 0)}
        if self.kernels:
            fastest = self._fastest(kernels)
            operands, sms = self._long_operands(kernels, fastest), self.machine.compute_sms
            works |= {str(free): operands.long(self.kernels[fastest], sms - free) for free in frees}
        beside: dict[str, dict[str, Beside]] = {}
        for op in OPERATIONS:
            runs = self.comm.copies is None or op == "all_to_all"  # else nothing but exchanges runs beside products
            beside[op] = {n: self._beside(op, alone[op], work, host_ms) for n, work in works.items() if runs}
            self.say(f"{op} beside products")
        beside["all_to_all"][ATTENTION] = self._beside(
            "all_to_all", alone["all_to_all"], self._long_attention(), host_ms
        )
        taken = f"{datetime.now(timezone.utc).isoformat(timespec='seconds')}, fodit.tune.measure"
        return Profile(self.machine, taken, alone, beside, kernels, pace, attention, self._copy_gbs(), wait_ms, host_ms)

    # Products

    def _tiles(self, name: str) -> tuple[int, int, int]:
        """Tile height and width, and cluster size."""
        if name == CUBLAS:
            return 128, 256, 1  # what it takes for large products on Hopper; elsewhere the fit absorbs the difference
        cluster = name.rpartition("_c")[2]
        return self.kernels[name].tile_m, self.kernels[name].tile_n, int(cluster) if cluster.isdigit() else 1

    def _operands(self, name: str, rounds: float, k: int, columns: int) -> Operands:
        """Of a product of about `rounds` waves."""
        tile_m, tile_n, _ = self._tiles(name)
        rows = max(round(rounds * self.machine.compute_sms / columns), 2)
        return Operands(self.comm, (tile_m, tile_n), k, rows, columns, self.dtype)

    def _run(self, name: str, operands: Operands, free: int = 0) -> Work:
        if name == CUBLAS:
            return operands.by_cublas
        return partial(operands.by, self.kernels[name], self.machine.compute_sms - free)

    def _product(self, name: str) -> Product:
        """Fit launch, tile and K times to a few products, by least squares of relative errors."""
        tile_m, tile_n, cluster = self._tiles(name)
        made = [self._operands(name, rounds, k, COLUMNS) for rounds, k in CASES]
        taken = self.clock.compare([self._run(name, one) for one in made])
        sms = self.machine.compute_sms // cluster * cluster
        rows = [(1.0, waves(one.tiles, sms), waves(one.tiles, sms) * one.k) for one in made]
        matrix = torch.tensor(rows, dtype=torch.float64) / torch.tensor(taken, dtype=torch.float64)[:, None]
        wanted = torch.ones(len(rows), 1, dtype=torch.float64)
        launch, tile, per_k = torch.linalg.lstsq(matrix, wanted).solution[:, 0].tolist()
        return Product(tile_m, tile_n, cluster, launch, tile, per_k)

    def _fastest(self, kernels: dict[str, Product]) -> str:
        """The kernel that is fastest for its tile's size."""

        def cost(name: str) -> float:
            return kernels[name].tile(LONG_K) / (kernels[name].tile_m * kernels[name].tile_n)

        return min(self.kernels, key=cost)

    def _pace(self, kernels: dict[str, Product], free: int) -> float:
        """A tile's time with SMs left free, relative to none."""
        if not free:
            return 1.0
        name = self._fastest(kernels)
        operands = self._operands(name, *CASES[-1], COLUMNS)
        taken = self.clock.compare([self._run(name, operands, one) for one in (0, free)])
        cluster, sms = kernels[name].cluster, self.machine.compute_sms
        counts = [waves(operands.tiles, (sms - one) // cluster * cluster) for one in (0, free)]
        tiles = [(ms - kernels[name].launch_ms) / count for ms, count in zip(taken, counts, strict=True)]
        return tiles[1] / tiles[0]

    def _long_operands(self, kernels: dict[str, Product], name: str) -> Operands:
        rounds = max(LONG_MS / kernels[name].tile(LONG_K), 2.0)
        return self._operands(name, rounds, LONG_K, LONG_COLUMNS)

    # Attention and copies

    def _attention(self, dim: int) -> float:
        """Of 1e9 query-key pairs of one head, if all SMs were at work all the time."""
        work = Attention(dim, self.comm.device, self.dtype)
        idle = attention_waves(ATTENTION_HEADS, ATTENTION_TOKENS, self.machine.compute_sms)
        return self.clock.ms(work) / (work.pairs / 1e9) / idle

    def _long_attention(self) -> LongWork:
        work = Attention(128, self.comm.device, self.dtype)
        return work.long(LONG_MS, self.clock.ms(work, repeats=3))

    def _copy_gbs(self) -> float:
        taken = self.clock.ms(lambda: self.received.copy_(self.sent))
        return 2 * self.sent.nbytes / taken / 1e6

    # Collectives

    def _start(self, op: str, size: int, ready: Ready | None = None) -> Pending:
        """Start a collective of `size` bytes on the next part of the buffers, which the caches do not hold."""
        count = size // self.dtype.itemsize
        begin = self._turn % (self.sent.numel() // count) * count
        self._turn += 1
        return collective(self.comm, op, self.received[begin:][:count], self.sent[begin:][:count], ready)

    def _alone(self, op: str, size: int) -> float:
        return self.clock.ms(lambda: self._start(op, size).wait(), repeats=5, warm_up=2)

    def _overheads(self) -> tuple[float, float]:
        """What the wait for a slab adds to a collective, and the host's time to enqueue one."""

        def several(ready: Ready | None) -> float:
            begin = time.perf_counter()
            pending = [self._start("all_to_all", 4096, ready) for _ in range(HOST_CALLS)]
            taken = (time.perf_counter() - begin) * 1e3 / HOST_CALLS
            for one in pending:
                one.wait()
            return taken

        held = Reached(self.comm) if self.kernels else None
        lead = LEAD_MS + HOST_CALLS * HOST_MS
        plain, waiting = self.clock.compare([lambda: several(None), lambda: several(held)], lead_ms=lead)
        self.clock.start(lead)
        host = self.clock.slowest([several(held)])[0]
        return max(waiting - plain, 0.0) / HOST_CALLS, host

    def _beside(self, op: str, collective_alone: Curve, work: LongWork, host_ms: float) -> Beside:
        """Collectives back to back beside work on the compute stream, for each size."""
        times, slowed = [], []
        alone = self.clock.ms(work, repeats=1, warm_up=2)
        for size in BESIDE_SIZES:
            count = min(ceil(alone / collective_alone(size)) + 1, 2 * HOST_CALLS)
            lead = LEAD_MS + 2 * count * host_ms
            rounds = []
            for _ in range(ROUNDS):
                begin = self.clock.start(lead)
                work()
                end = self.clock.mark()
                torch.cuda.synchronize(self.comm.device)
                rounds.append((begin.elapsed_time(end), *self._race(op, size, count, work, lead)))
            alone, length, each, busy = self.clock.slowest([median(one) for one in zip(*rounds[1:], strict=True)])
            times.append((float(size), each))
            slowed.append(max(busy / max(alone - length + busy, busy / 2), 1.0))
        return Beside(Curve.of(times), median(slowed))

    def _race(self, op: str, size: int, count: int, work: LongWork, lead_ms: float) -> tuple[float, float, float]:
        """Milliseconds of the work, of each collective beside it, and in which both were under way."""
        begin = self.clock.start(lead_ms)
        ready = work()
        end = self.clock.mark()
        ready.hold(self.watch)
        with torch.cuda.stream(self.watch):
            marks = [self.clock.mark()]
        for index in range(count):  # for all but the first nothing is left to wait for
            pending = self._start(op, size, Started(begin) if index else ready)
            with torch.cuda.stream(self.watch):
                pending.wait()
                marks.append(self.clock.mark())
        torch.cuda.synchronize(self.comm.device)
        length = begin.elapsed_time(end)
        first, *ends = [begin.elapsed_time(one) for one in marks]
        inside = [one for one in ends if one <= length]
        if not inside:  # held up until the work had ended, or nearly
            return length, ends[0] - first, max(length - first, 1e-3)
        # From end to end: in the first one's time is what no later one waits for, and how far the ranks are apart.
        each = (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else inside[0] - first
        return length, each, min(ends[-1], length) - first
