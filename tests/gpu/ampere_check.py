"""Speed of the Ampere kernels next to CUTLASS's own, and whether they keep to their SMs. One GPU, torch alone.

    python tests/gpu/ampere_check.py LIBRARY [--stock STOCK]

STOCK is benchmarks/stock_cutlass.cu, built. Whether the kernels are right is for kernel_check.py --kernel ampere.
"""

import argparse
import ctypes
import os
import random
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean, median

import torch
from kernel_check import Library, Product, chosen, plain

LEAD_CYCLES = 400_000  # in which a call is queued: the time is the GPU's alone

SHAPES = [
    (17776, 3072, 6144), (32760, 5120, 5120), (32760, 5120, 6912), (16380, 15360, 5120), (16380, 13824, 5120),
    (8192, 8192, 4096), (17776, 3072, 1536), (8888, 9216, 3072),
]  # fmt: skip


def whole(library: Library, name: str, m: int, n: int, k: int, sms: int = 0) -> Product:
    """The whole product, row-major, in one slab."""
    regions, size = plain(m, [n])
    return Product(library, name, m, [n], k, regions, size, ticket=False, sms=sms, group=8)


def median_ms(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each call. Rounds run all of them in a new order: clocks depend on what ran before."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(repeats + 2):
        for name, call in random.sample(list(calls.items()), len(calls)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LEAD_CYCLES)
            start.record()
            call()
            end.record()
            end.synchronize()
            if index >= 2:
                times[name].append(start.elapsed_time(end))
    return {name: median(taken) for name, taken in times.items()}


def time_all(library: Library, stock: ctypes.CDLL | None, repeats: int) -> None:
    """Prints, per shape and kernel, milliseconds and the speed relative to stock CUTLASS."""
    ratios: dict[str, list[float]] = {}
    names = chosen(library, "ampere")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    for m, n, k in SHAPES:
        first = whole(library, names[0], m, n, k)
        a, w = first.a, first.w[0]
        out = torch.empty(m, n, dtype=a.dtype, device="cuda")
        calls: dict[str, Callable[[], object]] = {"cuBLAS": partial(torch.mm, a, w.t(), out=out)}
        pointers = [ctypes.c_void_p(one.data_ptr()) for one in (a, w, out)]
        for name in names:
            calls[name] = whole(library, name, m, n, k).launch
            _, kernel = library.kernels[name]
            if stock is not None:
                shape = (kernel.tile_m, kernel.tile_n, kernel.tile_k, kernel.stages)
                call = partial(stock.stock_gemm, *shape, m, n, k, *pointers, stream)
                if call() == 0:
                    calls["stock " + name] = call
        times = median_ms(calls, repeats)
        print(f"\n{m} x {n} x {k}: cuBLAS {times['cuBLAS']:.3f} ms")
        for name in names:
            line = f"  {name:28s} {times[name]:8.3f} ms"
            if reference := times.get("stock " + name):
                ratios.setdefault(name, []).append(reference / times[name])
                line += f"  stock {reference:8.3f} ms  {ratios[name][-1]:.3f} of stock's speed"
            print(line, flush=True)
    for name, values in ratios.items():
        print(f"{name:28s} worst {min(values):.3f}, geometric mean {geometric_mean(values):.3f} of stock's speed")


def check_free_sms(library: Library, free: int = 32) -> None:
    """With `sms` all but `free`, a second product that needs whole SMs ends while the first still runs."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count - free
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for name in chosen(library, "ampere"):
        large, small = whole(library, name, 8192, 4096, 4096, sms), whole(library, name, 1024, 4096, 4096, free)
        for _ in range(2):  # the first launches load the kernel
            start, end, side_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda.synchronize()
            start.record(main)
            large.launch(main)
            end.record(main)
            small.launch(side)
            side_end.record(side)
            torch.cuda.synchronize()
        both = start.elapsed_time(end), start.elapsed_time(side_end)
        assert both[1] < 0.9 * both[0], f"{name} on {sms} SMs until {both[0]} ms kept others out to {both[1]} ms"
        print(f"{name:28s} {sms} SMs until {both[0]:.2f} ms, {free} others done at {both[1]:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--stock", help="a library of CUTLASS's kernels to time against")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    library = Library(os.path.abspath(given.library))
    check_free_sms(library)
    time_all(library, ctypes.CDLL(os.path.abspath(given.stock)) if given.stock else None, given.repeats)


if __name__ == "__main__":
    main()
