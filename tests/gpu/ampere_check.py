"""Checks and times the Ampere kernels of a built kernel library on one GPU. Needs torch and nothing else.

    python tests/gpu/ampere_check.py LIBRARY                   # every check, then timings against cuBLAS
    python tests/gpu/ampere_check.py LIBRARY --stock STOCK     # and against stock CUTLASS kernels
    compute-sanitizer --tool racecheck python tests/gpu/ampere_check.py LIBRARY --small

A tile program of these checks stores regions of the product at shuffled, unaligned places of a poisoned
buffer. Afterwards every element of the program must hold its value and every other must be untouched.

STOCK exports, for bf16, `int stock_gemm(int tile_m, int tile_n, int tile_k, int stages, int m, int n, int k,
const void* a, const void* w, void* d, void* stream)`, which returns -1 for a tile shape it does not have.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import random
import statistics
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char, c_char_p, c_int32, c_void_p
from dataclasses import dataclass, field
from functools import partial

import torch

ABI, AMPERE, MAX_WEIGHTS = 1, 0, 4
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
ACTS = {"none": 0, "gelu_tanh": 1}
KERNEL_FIELDS = ("family", "tile_m", "tile_n", "tile_k", "stages", "threads", "min_arch", "max_arch")
POISON = 0x7FAB  # a NaN in both types
TIMED_SHAPES = [
    (17776, 3072, 6144),
    (32760, 5120, 5120),
    (32760, 5120, 6912),
    (16380, 15360, 5120),
    (16380, 13824, 5120),
    (8192, 8192, 4096),
    (17776, 3072, 1536),
    (8888, 9216, 3072),
]


class FoditGemm(Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("abi", "dtype", "act", "kernel", "m", "k", "lda", "weights")],
        ("n", c_int32 * MAX_WEIGHTS),
        ("ldw", c_int32 * MAX_WEIGHTS),
        ("tiles", c_int32),
        ("sms", c_int32),
        ("a", c_void_p),
        ("w", c_void_p * MAX_WEIGHTS),
        ("bias", c_void_p * MAX_WEIGHTS),
        ("out", c_void_p),
        ("program", c_void_p),
        ("counters", c_void_p),
        ("ticket", c_void_p),
    ]


class FoditKernel(Structure):
    _fields_ = [
        *[(name, c_int32) for name in KERNEL_FIELDS],
        ("name", c_char * 48),
    ]


@dataclass
class Kernel:
    """One kernel of the library: its index there and its tile shape."""

    index: int
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    name: str

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * 2


class Library:
    """The C interface through ctypes."""

    def __init__(self, path: str) -> None:
        self.c = ctypes.CDLL(path)
        self.c.fodit_last_error.restype = c_char_p
        self.c.fodit_gemm.argtypes = [POINTER(FoditGemm), c_void_p]
        infos = (FoditKernel * 256)()
        count = self.c.fodit_kernels(infos, 256)
        offered = torch.cuda.get_device_properties(0).shared_memory_per_block_optin  # type: ignore[attr-defined]
        kernels = [
            Kernel(i, f.tile_m, f.tile_n, f.tile_k, f.stages, f.name.decode())
            for i, f in enumerate(infos[:count])
            if f.family == AMPERE
        ]
        self.kernels = [k for k in kernels if k.shared_bytes <= offered]
        self.refused = [k for k in kernels if k.shared_bytes > offered]

    def gemm(
        self,
        kernel: Kernel,
        program: torch.Tensor,
        a: torch.Tensor,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        out: torch.Tensor,
        counters: torch.Tensor | None = None,
        act: str = "none",
        sms: int = 0,
    ) -> None:
        """Runs `program` (int32 [tiles, 12] on the GPU) on the current stream; RuntimeError if it fails."""
        args = FoditGemm(ABI, DTYPES[a.dtype], ACTS[act], kernel.index, *a.shape, a.stride(0), len(weights))
        args.tiles, args.sms = program.shape[0], sms
        args.a, args.out, args.program = a.data_ptr(), out.data_ptr(), program.data_ptr()
        args.counters = None if counters is None else counters.data_ptr()
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            args.n[i], args.ldw[i], args.w[i] = w.shape[0], w.stride(0), w.data_ptr()
            args.bias[i] = None if b is None else b.data_ptr()
        if self.c.fodit_gemm(ctypes.byref(args), torch.cuda.current_stream().cuda_stream):
            raise RuntimeError(self.c.fodit_last_error().decode())


@dataclass
class Region:
    """D[m0 : m1, n0 : n1] of one weight, stored row by row from `offset` on, `ld` elements between rows."""

    weight: int
    m0: int
    m1: int
    n0: int
    n1: int
    slab: int
    ld: int = 0
    offset: int = 0

    def tiles(self, kernel: Kernel) -> list[list[int]]:
        """Rows of the tile program, twelve int32 each."""
        rows = []
        firsts = range(self.m0, self.m1, kernel.tile_m), range(self.n0, self.n1, kernel.tile_n)
        for m, n in itertools.product(*firsts):
            offset = self.offset + (m - self.m0) * self.ld + n - self.n0
            size = [min(kernel.tile_m, self.m1 - m), min(kernel.tile_n, self.n1 - n)]
            low, high = offset & 0xFFFFFFFF, offset >> 32
            low -= (low >> 31) << 32
            rows.append([m, n, *size, self.weight, self.slab, self.ld, 0, low, high, 0, 0])
        return rows


def cut(length: int, parts: int, rng: random.Random) -> list[tuple[int, int]]:
    """[0, length) in at most `parts` random pieces."""
    edges = sorted({0, length, *(rng.randrange(length + 1) for _ in range(parts - 1))})
    return list(itertools.pairwise(edges))


@dataclass
class Case:
    """A product with random inputs, and where its regions go."""

    m: int
    ns: list[int]
    k: int
    dtype: torch.dtype
    bias: bool
    act: str
    rng: random.Random
    pieces: int = 1  # row and column cuts of each weight's product
    multiple: int = 1  # offsets and leading dimensions are multiples of this
    device: str = "cuda"  # where torch computes: on the CPU, no kernel runs but the library's
    regions: list[Region] = field(default_factory=list)

    def __post_init__(self) -> None:
        randn = partial(torch.randn, device=self.device, dtype=self.dtype)
        ld = self.k + 8 * self.rng.randrange(2)
        self.a = randn(self.m, ld)  # this and W are padded: columns from k on are not used
        self.w = [randn(n, ld) / self.k**0.5 for n in self.ns]
        self.b = [randn(n) if self.bias else None for n in self.ns]
        self.exact = [self.reference(w, b, torch.float32) for w, b in zip(self.w, self.b, strict=True)]
        self.cublas = [self.reference(w, b, self.dtype) for w, b in zip(self.w, self.b, strict=True)]

        for i, n in enumerate(self.ns):
            pieces = cut(self.m, self.pieces, self.rng), cut(n, self.pieces, self.rng)
            for rows, cols in itertools.product(*pieces):
                self.regions.append(Region(i, *rows, *cols, slab=self.rng.randrange(-1, 4)))
        self.rng.shuffle(self.regions)
        offset = self.rng.randrange(64) * self.multiple
        for r in self.regions:
            r.ld = -(-(r.n1 - r.n0) // self.multiple) * self.multiple + self.rng.randrange(3) * self.multiple
            r.offset = offset
            offset += (r.m1 - r.m0) * r.ld + self.rng.randrange(3) * self.multiple
        self.size = offset + 64

    def reference(self, w: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """act(A @ w.T + b) by torch in `dtype`."""
        a, w = (x[:, : self.k].to(dtype) for x in (self.a, w))
        x = torch.nn.functional.linear(a, w, None if b is None else b.to(dtype))
        return torch.nn.functional.gelu(x, approximate="tanh") if self.act == "gelu_tanh" else x

    def check(self, library: Library, kernel: Kernel, sms: int = 0, repeats: int = 2) -> float:
        """The largest error over cuBLAS's own. AssertionError with the case where something is wrong."""
        what = f"{kernel.name} m {self.m} n {self.ns} k {self.k} {self.dtype} act {self.act} sms {sms}"
        rows = [row for r in self.regions for row in r.tiles(kernel)]
        self.rng.shuffle(rows)
        program = torch.tensor(rows, dtype=torch.int32).cuda()
        counters = torch.zeros(4, dtype=torch.int32).cuda()
        poison = torch.full((self.size,), POISON, dtype=torch.int16, device=self.device)
        buffers = [poison.clone().cuda() for _ in range(repeats)]
        a, *w = (x.cuda()[:, : self.k] for x in (self.a, *self.w))
        b = [None if b is None else b.cuda() for b in self.b]
        for out in buffers:
            library.gemm(kernel, program, a, w, b, out, counters, self.act, sms)
        torch.cuda.synchronize()
        buffers = [out.to(self.device) for out in buffers]

        expected = [repeats * sum(row[5] == slab for row in rows) for slab in range(4)]
        assert counters.tolist() == expected, f"{what}: counters {counters.tolist()}, expected {expected}"
        for out in buffers[1:]:
            assert torch.equal(out, buffers[0]), f"{what}: two runs differ"

        out, worst = buffers[0], 0.0
        half_ulp = 2.0**-8 if self.dtype == torch.bfloat16 else 2.0**-11
        ours = [torch.full_like(d, float("nan")) for d in self.cublas]
        for r in self.regions:
            view = out.as_strided((r.m1 - r.m0, r.n1 - r.n0), (r.ld, 1), r.offset)
            ours[r.weight][r.m0 : r.m1, r.n0 : r.n1] = view.view(self.dtype)
            view.fill_(POISON)
        assert bool((out == POISON).all()), f"{what}: stored outside its tiles"
        for i, d in enumerate(ours):
            exact = self.exact[i]
            wrong = ~((d.float() - exact).abs() <= half_ulp * exact.abs() * 1.001 + 1e-4)
            where = wrong.nonzero()
            assert len(where) == 0, f"{what}: {len(where)} wrong elements, the first at {where[0].tolist()}"
            error, floor = ((x.float() - exact).norm() for x in (d, self.cublas[i]))
            worst = max(worst, float(error / floor.clamp_min(1e-12)) if self.m * self.ns[i] >= 64 else 0.0)
        assert worst <= 1.1, f"{what}: {worst:.2f} times cuBLAS's error"
        return worst


def check_all(library: Library, small: bool) -> None:
    """Odd shapes, several weights, permuted storage, few SMs. Prints one line a kernel."""
    sizes = [[1, 129, 511, 513, 3000, 8193], [8, 72, 100, 1000], [8, 72, 1536]]
    if small:
        sizes = [[1, 130], [72, 200], [8, 72]]
    cases = []

    def add(seed: int, m: int, ns: list[int], k: int, pieces: int) -> None:
        rng = random.Random(seed)
        dtype, act = rng.choice(list(DTYPES)), rng.choice(list(ACTS))
        bias, multiple = rng.random() < 0.7, rng.choice([1, 2, 8])
        cases.append(Case(m, ns, k, dtype, bias, act, rng, pieces, multiple, "cpu" if small else "cuda"))

    for i, (m, n, k) in enumerate(itertools.product(*sizes)):
        add(i, m, [n], k, pieces=1)
    for i in range(2 if small else 24):
        rng = random.Random(1000 + i)
        ns = [rng.choice([72, 136, 1000, 129]) for _ in range(1 + i % MAX_WEIGHTS)]
        m, k = (130, 40) if small else (rng.randrange(1, 3000), 8 * rng.randrange(1, 100))
        add(2000 + i, m, ns, k, pieces=4)
    for kernel in library.kernels:
        worst = max(case.check(library, kernel, sms=[0, 5][i // 4 % 2]) for i, case in enumerate(cases))
        print(f"{kernel.name:28s} {len(cases)} cases right, error up to {worst:.3f} of cuBLAS's", flush=True)
    for kernel in library.refused:
        try:
            cases[0].check(library, kernel)
        except RuntimeError as e:
            print(f"{kernel.name:28s} refused: {e}")
        else:
            raise AssertionError(f"{kernel.name} with {kernel.shared_bytes} bytes a block was not refused")


def grouped(m: int, n: int, kernel: Kernel, group: int, slabs: int = 8) -> torch.Tensor:
    """The whole product, row-major, in columns of `group` tiles: tiles near in time share their operands."""
    tiles_m, tiles_n = -(-m // kernel.tile_m), -(-n // kernel.tile_n)
    rows = []
    for column in range(0, tiles_n, group):
        for i, j in itertools.product(range(tiles_m), range(column, min(column + group, tiles_n))):
            m0, n0 = i * kernel.tile_m, j * kernel.tile_n
            ends = min(m, m0 + kernel.tile_m), min(n, n0 + kernel.tile_n)
            rows += Region(0, m0, ends[0], n0, ends[1], slab=0, ld=n, offset=m0 * n + n0).tiles(kernel)
    for i, row in enumerate(rows):
        row[5] = i * slabs // len(rows)
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def check_free_sms(library: Library, free: int = 32) -> None:
    """With `sms` all but `free`, a second product that needs whole SMs ends while the first still runs."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count - free
    m, k, small_m = 8192, 4096, 1024
    a, w, out, small_out = (torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for kernel in library.kernels:
        programs = grouped(m, k, kernel, 8), grouped(small_m, k, kernel, 8)
        for _ in range(2):  # the first launches load the kernel
            start, end, side_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda.synchronize()
            start.record(main)
            library.gemm(kernel, programs[0], a, [w[:k]], [None], out, sms=sms)
            end.record(main)
            with torch.cuda.stream(side):
                library.gemm(kernel, programs[1], a[:small_m], [w[:k]], [None], small_out, sms=free)
                side_end.record(side)
            torch.cuda.synchronize()
        both = start.elapsed_time(end), start.elapsed_time(side_end)
        assert both[1] < 0.9 * both[0], f"{kernel.name} on {sms} SMs until {both[0]} ms kept others out to {both[1]} ms"
        print(f"{kernel.name:28s} {sms} SMs until {both[0]:.2f} ms, {free} others done at {both[1]:.2f} ms")


def median_ms(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each call. Rounds run all of them in a new order: clocks depend on what ran before."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 2):
        for name, call in random.sample(list(calls.items()), len(calls)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)  # meanwhile the call is queued: the time is the GPU's alone
            start.record()
            call()
            end.record()
            end.synchronize()
            if i >= 2:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def time_shape(
    library: Library, stock: ctypes.CDLL | None, m: int, n: int, k: int, args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of cuBLAS, each kernel and, as "stock NAME", its stock counterpart if there is one."""
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    counters = torch.zeros(8, device="cuda", dtype=torch.int32)
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    pointers = [c_void_p(x.data_ptr()) for x in (a, w, out)]

    calls: dict[str, Callable[[], object]] = {"cuBLAS": partial(torch.mm, a, w.T, out=out)}
    for kernel in library.kernels:
        program = grouped(m, n, kernel, args.group)
        calls[kernel.name] = partial(library.gemm, kernel, program, a, [w], [None], out, counters, "none", args.sms)
        if stock is not None:
            shape = (kernel.tile_m, kernel.tile_n, kernel.tile_k, kernel.stages)
            call = partial(stock.stock_gemm, *shape, m, n, k, *pointers, stream)
            if call() == 0:
                calls["stock " + kernel.name] = call
    return median_ms(calls, args.repeats)


def time_all(library: Library, args: argparse.Namespace) -> None:
    """Prints, per shape and kernel, milliseconds and the speed relative to stock CUTLASS and to cuBLAS."""
    stock = ctypes.CDLL(args.stock) if args.stock else None
    ratios: dict[str, list[float]] = {}
    for m, n, k in TIMED_SHAPES:
        times = time_shape(library, stock, m, n, k, args)
        tflops = {name: 2e-9 * m * n * k / t for name, t in times.items()}
        print(f"\n{m} x {n} x {k}: cuBLAS {times['cuBLAS']:.3f} ms, {tflops['cuBLAS']:.0f} TFLOP/s")
        for name in (kernel.name for kernel in library.kernels):
            line = f"  {name:28s} {times[name]:8.3f} ms  {tflops[name]:5.0f} TFLOP/s"
            if reference := times.get("stock " + name):
                ratios.setdefault(name, []).append(reference / times[name])
                line += f"  stock {reference:8.3f} ms  {ratios[name][-1]:.3f} of stock's speed"
            print(line, flush=True)
    for name, values in ratios.items():
        mean = statistics.geometric_mean(values)
        print(f"{name:28s} worst {min(values):.3f}, geometric mean {mean:.3f} of stock's speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--stock", help="a library of stock CUTLASS kernels to time against")
    parser.add_argument("--small", action="store_true", help="a few small cases only, for compute-sanitizer")
    parser.add_argument("--time-only", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--group", type=int, default=8, help="width of the timed programs' tile columns")
    parser.add_argument("--sms", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    library = Library(args.library)
    if not args.time_only:
        check_all(library, args.small)
    if not args.small:
        check_free_sms(library)
        time_all(library, args)


if __name__ == "__main__":
    main()
