"""Correctness of the kernel library on one GPU.

    python kernel_check.py check|stress|special|small|host LIBRARY... [--kernel TEXT] [--seconds S]

check   odd shapes, several weights, permuted storage, dtypes, bias, activation, addends, strides, repeats, bad input
stress  a second stream copies each slab as soon as its counter allows, while the product and another go on
special graph replay, and a stream of 24 SMs
small   a few tiny products, meant to run under compute-sanitizer
host    host time of one launch
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fodit.kernels.binding import ABI, MAX_WEIGHTS, Gemm

DTYPES = {torch.bfloat16: 0, torch.float16: 1}
HOPPER = 1


class Kernel(ctypes.Structure):
    """FoditKernel."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("family", "tile_m", "tile_n", "tile_k", "stages", "threads", "min_arch", "max_arch")
        ),
        ("name", ctypes.c_char * 48),
    ]


class Library:
    def __init__(self, path: str) -> None:
        self.c = ctypes.CDLL(path)
        self.name = Path(path).stem
        self.c.fodit_last_error.restype = ctypes.c_char_p
        self.c.fodit_build_info.restype = ctypes.c_char_p
        self.c.fodit_gemm.argtypes = [ctypes.POINTER(Gemm), ctypes.c_void_p]
        self.c.fodit_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
        kernels = (Kernel * self.c.fodit_kernels(None, 0))()
        self.c.fodit_kernels(kernels, len(kernels))
        self.kernels = {kernel.name.decode(): (index, kernel) for index, kernel in enumerate(kernels)}

    def raise_on(self, code: int) -> None:
        if code:
            raise RuntimeError(self.c.fodit_last_error().decode())

    def wait(self, stream: torch.cuda.Stream, counter: torch.Tensor, target: int) -> None:
        self.raise_on(self.c.fodit_wait(stream.cuda_stream, counter.data_ptr(), target))


@dataclass
class Region:
    """A rectangle of one product, stored as a row-major matrix of its own."""

    weight: int
    m0: int
    rows: int
    n0: int
    cols: int
    slab: int
    ld: int
    offset: int


@dataclass
class Program:
    tiles: list[list[int]] = field(default_factory=list)
    tiles_of_slab: list[int] = field(default_factory=list)

    def to(self, device: str) -> torch.Tensor:
        return torch.tensor(self.tiles, dtype=torch.int32).reshape(-1, 12).to(device)


def grouped(m_tiles: int, n_tiles: int, group: int) -> Iterator[tuple[int, int]]:
    """The cells of a grid, `group` rows at a time, down the rows first: what runs at a time shares the L2."""
    for first in range(0, m_tiles, group):
        for n in range(n_tiles):
            for m in range(first, min(first + group, m_tiles)):
                yield m, n


def make_program(regions: list[Region], tile_m: int, tile_n: int, group: int = 16) -> Program:
    program = Program(tiles_of_slab=[0] * (1 + max(region.slab for region in regions)))
    for r in regions:
        for m, n in grouped(-(-r.rows // tile_m), -(-r.cols // tile_n), group):
            row, col = m * tile_m, n * tile_n
            rows, cols = min(tile_m, r.rows - row), min(tile_n, r.cols - col)
            offset = r.offset + row * r.ld + col
            low, high = offset & 0xFFFFFFFF, offset >> 32
            low = low - (1 << 32) if low >= 1 << 31 else low
            program.tiles.append([r.m0 + row, r.n0 + col, rows, cols, r.weight, r.slab, r.ld, 0, low, high, 0, 0])
            program.tiles_of_slab[r.slab] += 1
    return program


def plain(m: int, ns: list[int]) -> tuple[list[Region], int]:
    """All products side by side in one [m, sum(ns)] matrix."""
    ld, regions, column = sum(ns), [], 0
    for i, n in enumerate(ns):
        regions.append(Region(i, 0, m, 0, n, 0, ld, column))
        column += n
    return regions, m * ld


def pieces(total: int, parts: int, rng: random.Random) -> list[tuple[int, int]]:
    cuts = sorted({0, total, *(rng.randrange(total) for _ in range(parts - 1))})
    return list(itertools.pairwise(cuts))


def slabs(m: int, ns: list[int], columns: int, rows: int, rng: random.Random, pad: int = 0) -> tuple[list[Region], int]:
    """Column and row pieces of every product, each a contiguous slab, shuffled, with gaps between them."""
    cells = [
        (i, m0, m1, n0, n1)
        for i, n in enumerate(ns)
        for n0, n1 in pieces(n, columns, rng)
        for m0, m1 in pieces(m, rows, rng)
    ]
    rng.shuffle(cells)
    regions, offset = [], pad
    for slab, (i, m0, m1, n0, n1) in enumerate(cells):
        regions.append(Region(i, m0, m1 - m0, n0, n1 - n0, slab, n1 - n0 + pad, offset))
        offset += (m1 - m0) * (n1 - n0 + pad)
    return regions, offset + 16


@dataclass
class Product:
    """One call: random operands, a program, poisoned storage."""

    library: Library
    kernel: str
    m: int
    ns: list[int]
    k: int
    regions: list[Region]
    size: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    gelu: bool = False
    ticket: bool = True
    sms: int = 0
    group: int = 16
    pad_a: int = 0
    addends: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        g = torch.Generator("cuda").manual_seed(self.seed)
        rand = lambda *shape: torch.randn(*shape, device="cuda", generator=g).to(self.dtype)  # noqa: E731
        self.a = rand(self.m, self.k + self.pad_a)[:, : self.k]
        self.w = [rand(n, self.k) * self.k**-0.5 for n in self.ns]
        self.b = [rand(n) if self.bias else None for n in self.ns]
        self.added = rand(self.addends, self.size)
        self.index, described = self.library.kernels[self.kernel]
        self.program = make_program(self.regions, described.tile_m, described.tile_n, self.group)
        self.program_gpu = self.program.to("cuda")
        self.out = torch.full((self.size,), float("nan"), dtype=self.dtype, device="cuda")
        self.counters = torch.zeros(len(self.program.tiles_of_slab), dtype=torch.int32, device="cuda")
        self.ticket_gpu = torch.zeros(1, dtype=torch.int32, device="cuda") if self.ticket else None
        self.args = self.arguments()

    def arguments(self) -> Gemm:
        rest = MAX_WEIGHTS - len(self.ns)

        def pointers(tensors: list[torch.Tensor | None]) -> list[int | None]:
            return [None if t is None else t.data_ptr() for t in tensors] + [None] * rest

        zeros = [0] * rest
        return Gemm(
            abi=ABI, dtype=DTYPES[self.dtype], act=int(self.gelu), kernel=self.index, m=self.m, k=self.k,
            lda=self.a.stride(0), weights=len(self.ns), n=(ctypes.c_int32 * 4)(*self.ns, *zeros),
            ldw=(ctypes.c_int32 * 4)(*(w.stride(0) for w in self.w), *zeros), tiles=len(self.program.tiles),
            sms=self.sms, a=self.a.data_ptr(), w=(ctypes.c_void_p * 4)(*pointers(list(self.w))),
            bias=(ctypes.c_void_p * 4)(*pointers(self.b)), out=self.out.data_ptr(),
            program=self.program_gpu.data_ptr(), counters=self.counters.data_ptr(),
            ticket=None if self.ticket_gpu is None else self.ticket_gpu.data_ptr(),
            addend=self.added.data_ptr(), addend_stride=self.size, addends=self.addends,
        )  # fmt: skip

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        stream = stream or torch.cuda.current_stream()
        self.library.raise_on(self.library.c.fodit_gemm(ctypes.byref(self.args), stream.cuda_stream))

    def poison(self) -> None:
        self.out.fill_(float("nan"))
        self.counters.zero_()

    def check(self, reference: str = "cuda") -> str | None:
        """Launches twice; the reason why the result is wrong, or None. The reference is computed on that device."""
        self.poison()
        self.launch()
        first = self.out.clone()
        expected = torch.tensor(self.program.tiles_of_slab, dtype=torch.int32)
        if not torch.equal(self.counters.cpu(), expected):
            return f"counters {self.counters.tolist()}, expected {expected.tolist()}"
        if self.ticket_gpu is not None and self.ticket_gpu.item() != 0:
            return f"ticket left at {self.ticket_gpu.item()}"
        self.poison()
        self.launch()
        if not torch.equal(first.view(torch.int16), self.out.view(torch.int16)):
            return "two runs differ"

        first = first.to(reference)
        results = [torch.full((self.m, n), float("nan"), dtype=self.dtype, device=reference) for n in self.ns]
        sums, added = [torch.zeros(self.m, n, device=reference) for n in self.ns], self.added.to(reference)
        for r in self.regions:
            stored = first.as_strided((r.rows, r.cols), (r.ld, 1), r.offset)
            results[r.weight][r.m0 : r.m0 + r.rows, r.n0 : r.n0 + r.cols] = stored
            stored.fill_(float("nan"))
            for one in added:
                place = one.as_strided((r.rows, r.cols), (r.ld, 1), one.storage_offset() + r.offset)
                sums[r.weight][r.m0 : r.m0 + r.rows, r.n0 : r.n0 + r.cols] += place.float()
        if not bool(first.isnan().all()):
            return f"{int((~first.isnan()).sum())} elements written outside the program"
        a = self.a.to(reference)
        for w, b, result, total in zip(self.w, self.b, results, sums, strict=True):
            w, b = w.to(reference), None if b is None else b.to(reference)
            if bool(result.isnan().any()):
                return f"{int(result.isnan().sum())} of {result.numel()} elements are NaN"
            exact = a.float() @ w.float().T + (0 if b is None else b.float())
            exact = F.gelu(exact, approximate="tanh") if self.gelu else exact
            blas = F.linear(a, w, b)
            blas = F.gelu(blas, approximate="tanh") if self.gelu else blas
            exact, blas = exact + total, (blas.float() + total).to(self.dtype)
            ours, theirs = ((x.float() - exact).norm() / exact.norm() for x in (result, blas))
            if not ours <= 1.1 * theirs + 1e-6:
                return f"error {ours:.3e}, cuBLAS {theirs:.3e}"
        return None


def chosen(library: Library, text: str) -> list[str]:
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    return [
        name
        for name, (_, kernel) in library.kernels.items()
        if kernel.min_arch <= arch <= kernel.max_arch and any(part in name for part in text.split(","))
    ]


def drawn(rng: random.Random) -> dict[str, Any]:
    return {
        "bias": rng.random() < 0.5,
        "gelu": rng.random() < 0.5,
        "ticket": rng.random() < 0.5,
        "dtype": rng.choice(list(DTYPES)),
        "addends": rng.choice((0, 0, 1, 3)),
        "seed": rng.randrange(1 << 30),
    }


def check(library: Library, text: str, seconds: float) -> int:
    rng = random.Random(time.time_ns())
    failures, done, start = 0, 0, time.monotonic()

    def one(label: str, product: Product) -> None:
        nonlocal failures, done
        done += 1
        if (reason := product.check()) is not None:
            failures += 1
            print(f"WRONG {label}: {reason}", flush=True)

    kernels = chosen(library, text)
    grid = itertools.product((1, 129, 511, 513, 3000, 8193), (8, 72, 100, 129, 1000), (8, 72, 1536))
    for m, n, k in grid:
        for name in kernels:
            regions, size = plain(m, [n])
            options = {**drawn(rng), "pad_a": rng.choice((0, 8)), "sms": rng.choice((0, 7, 24, 131))}
            product = Product(library, name, m, [n], k, regions, size, **options)
            one(f"{name} plain {m, n, k} {options}", product)
    print(f"check: {done} plain products, {failures} wrong, {time.monotonic() - start:.0f} s", flush=True)

    while time.monotonic() - start < seconds:
        m, k = rng.randint(1, 2000), 8 * rng.randint(1, 100)
        ns = [rng.choice((1, 8)) * rng.randint(1, 200) for _ in range(rng.randint(1, 4))]
        step = rng.choice((1, 8))
        regions, size = slabs(m, ns, rng.randint(1, 3), rng.randint(1, 3), rng, pad=step * rng.randint(0, 2))
        options = {**drawn(rng), "sms": rng.choice((0, 2, 24, 131)), "group": rng.randint(1, 20)}
        name = rng.choice(kernels)
        one(f"{name} slabs {m, ns, k} {options}", Product(library, name, m, ns, k, regions, size, **options))
    print(f"check: {done} products, {failures} wrong, {time.monotonic() - start:.0f} s")

    regions, size = plain(128, [128])
    bad = {"abi": 9, "dtype": 5, "act": 7, "kernel": 99, "k": 12, "lda": 4, "m": 0, "weights": 5, "sms": -1}
    bad["addends"] = -1
    for name in kernels[:1]:
        for key, value in bad.items():
            product = Product(library, name, 128, [128], 64, regions, size)
            setattr(product.args, key, value)
            try:
                product.launch()
            except RuntimeError as error:
                print(f"refused {key}={value}: {error}")
            else:
                failures += 1
                print(f"WRONG: {key}={value} was accepted")
    return failures


def stress(library: Library, text: str, seconds: float) -> int:
    """Slabs are copied by a second stream as soon as their counter allows; a third runs another product."""
    rng = random.Random(time.time_ns())
    failures, rounds, early, start = 0, 0, 0, time.monotonic()
    kernels = chosen(library, text)
    compute, aside, copies = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    while time.monotonic() - start < seconds:
        m, k = rng.randint(1, 6000), 8 * rng.randint(1, 256)
        ns = [8 * rng.randint(1, 256) for _ in range(rng.randint(1, 3))]
        regions, size = slabs(m, ns, rng.randint(1, 3), rng.randint(1, 3), rng)
        name = rng.choice(kernels)
        product = Product(
            library, name, m, ns, k, regions, size, ticket=rng.random() < 0.5, seed=rng.randrange(1 << 30),
            sms=sm_count - rng.choice((8, 20)), bias=rng.random() < 0.5,
        )  # fmt: skip
        seen = torch.empty_like(product.out)
        regions_aside, size_aside = plain(700, [1000])
        other = Product(library, rng.choice(kernels), 700, [1000], 8 * rng.randint(1, 256), regions_aside, size_aside)
        other.launch()
        alone = other.out.clone()
        for _ in range(5):  # of the same product: counters start from zero, the stalls differ
            rounds += 1
            product.poison()
            other.poison()
            seen.fill_(float("nan"))
            torch.cuda.synchronize()
            finished, arrived = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(compute):
                torch.cuda._sleep(rng.choice((0, 0, 20_000, 200_000)))
                product.launch(compute)
                finished.record()
            with torch.cuda.stream(aside):
                torch.cuda._sleep(rng.choice((0, 10_000, 100_000)))
                other.launch(aside)
            with torch.cuda.stream(copies):
                for at, r in enumerate(regions):
                    library.wait(copies, product.counters[r.slab :], product.program.tiles_of_slab[r.slab])
                    part = slice(r.offset, r.offset + r.rows * r.ld)
                    seen[part].copy_(product.out[part])
                    if at == 0:
                        arrived.record()
            torch.cuda.synchronize()
            early += arrived.elapsed_time(finished) > 0
            if not torch.equal(other.out.view(torch.int16), alone.view(torch.int16)):
                failures += 1
                print(f"WRONG stress: the product beside {name} {m, ns, k}", flush=True)
            if not torch.equal(seen.view(torch.int16), product.out.view(torch.int16)):
                failures += 1
                wrong = int((seen != product.out).sum())
                print(f"WRONG stress {name} {m, ns, k}: {wrong} elements", flush=True)
        if rounds % 25 == 0 and (reason := product.check()) is not None:
            failures += 1
            print(f"WRONG stress {name} {m, ns, k}: {reason}", flush=True)
    print(f"stress: {rounds} products, {failures} wrong; the first slab was copied early in {early}")
    return failures


def special(library: Library, text: str) -> int:
    """Replays of a captured launch, and a green context's stream."""
    failures = 0
    context = torch.cuda.green_contexts.GreenContext.create(num_sms=24)  # its streams end with it
    green = context.Stream()
    for name in chosen(library, text):
        m, n, k = 4000, 4096, 2048
        regions, size = plain(m, [n])
        product = Product(library, name, m, [n], k, regions, size)
        reason = product.check()
        right = product.out.clone()

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            product.launch()
        product.poison()
        for _ in range(3):
            graph.replay()
        if product.counters.item() != 3 * len(product.program.tiles) or not torch.equal(product.out, right):
            reason = "a replay differs"

        product.poison()
        spent = []
        for stream in (torch.cuda.current_stream(), green):
            torch.cuda.synchronize()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            product.launch(stream)
            after.record(stream)
            torch.cuda.synchronize()
            spent.append(before.elapsed_time(after))
            if not torch.equal(product.out, right):
                reason = f"stream {stream} differs"
        failures += reason is not None
        print(
            f"special {name}: {reason or 'ok'}; all SMs {spent[0]:.3f} ms, 24 SMs {spent[1]:.3f} ms",
            flush=True,
        )
    return failures


def small(library: Library, text: str) -> int:
    rng = random.Random(0)
    failures = 0
    for name in chosen(library, text):
        for m, ns, k, addends in ((300, [264], 136, 0), (70, [40, 99], 72, 2), (513, [520], 264, 1)):
            regions, size = slabs(m, ns, 2, 2, rng)
            options: dict[str, Any] = {"bias": True, "gelu": True, "ticket": addends < 2, "sms": 4, "addends": addends}
            # Not on the GPU: the sanitizer's racecheck breaks torch's own kernels.
            reason = Product(library, name, m, ns, k, regions, size, **options).check(reference="cpu")
            failures += reason is not None
            print(f"small {name} {m, ns, k}: {reason or 'ok'}", flush=True)
    return failures


def host(library: Library, text: str) -> int:
    for name in chosen(library, text):
        regions, size = plain(128, [128, 128, 128, 128])
        product = Product(library, name, 128, [128] * 4, 64, regions, size)
        stream = torch.cuda.current_stream().cuda_stream
        spent = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                library.c.fodit_gemm(ctypes.byref(product.args), stream)
            spent.append((time.perf_counter() - start) / 50)
        print(f"host {name}: {1e6 * statistics.median(spent):.1f} us a launch with four weights")
    return 0


def main() -> int:
    keep = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep)
    parser.add_argument("what", choices=("check", "stress", "special", "small", "host"))
    parser.add_argument("library")
    parser.add_argument("--kernel", default="hopper", help="parts of kernel names, comma-separated")
    parser.add_argument("--seconds", type=float, default=30)
    arguments = parser.parse_args()
    library = Library(os.path.abspath(arguments.library))
    text, seconds = arguments.kernel, arguments.seconds
    match arguments.what:
        case "check":
            return check(library, text, seconds)
        case "stress":
            return stress(library, text, seconds)
        case "special":
            return special(library, text)
        case "small":
            return small(library, text)
        case _:
            return host(library, text)


if __name__ == "__main__":
    sys.exit(main())
