"""A quick look at an unknown machine: a few collectives and one product, to scale a known machine's profile by."""

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

import torch

from fodit.agreement import everyone
from fodit.kernels.binding import Kernel
from fodit.ops.communicator import Communicator
from fodit.tune.clock import Clock, Work
from fodit.tune.operation import collective
from fodit.tune.predict import product_ms
from fodit.tune.profile import CUBLAS, OPERATIONS, Curve, Machine, Product, Profile
from fodit.tune.works import COLUMNS, Operands

MB = 1 << 20
SIZES = (MB, 8 * MB, 64 * MB)
PRODUCT_K, PRODUCT_ROWS = 2048, 64
REPEATS, WARM_UP = 15, 2  # over about a second: a link disturbed for half of that must not decide
FILL = 2048  # elements of a tile that its prologue and epilogue cost


def probing() -> bool:
    """Not with FODIT_NO_PROBE=1."""
    return os.environ.get("FODIT_NO_PROBE", "") in ("", "0")


def probe(
    known: Profile,
    machine: Machine,
    comm: Communicator,
    clock: Clock,
    kernels: Mapping[str, Kernel],
    dtype: torch.dtype = torch.bfloat16,
) -> Profile:
    """`known`, scaled to what is measured here: each collective by size, products by one product.

    What a collective and a product do to each other is taken from `known` as a ratio.
    """
    count = max(SIZES) // dtype.itemsize
    sent = torch.randn(count, device=comm.device, dtype=dtype)
    received = comm.empty(count, sent)

    def work(op: str, size: int) -> Work:
        part = size // dtype.itemsize
        return lambda: collective(comm, op, received[:part], sent[:part]).wait()

    pairs = [(op, size) for op in OPERATIONS for size in SIZES]
    taken = dict(zip(pairs, clock.compare([work(*pair) for pair in pairs], REPEATS, WARM_UP), strict=True))
    factors = {
        op: Curve(tuple((float(size), taken[op, size] / known.alone[op](size)) for size in SIZES)) for op in OPERATIONS
    }
    product = _product_factor(known, machine, comm, clock, kernels, dtype)
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    how = f"{when}, probed ({_described(factors, product)}); before that {known.taken}"
    mine = known.rescaled(factors, product, machine, how)
    return everyone(clock.control, mine)[0]


def _described(factors: Mapping[str, Curve], product: float) -> str:
    """How many times longer everything takes than it was known to."""
    sizes = ", ".join(f"{size / MB:g}" for size in SIZES)
    links = (f"{op} {', '.join(f'{factor:.2f}' for _, factor in curve.points)}" for op, curve in factors.items())
    return f"times as long, of {sizes} MiB: {'; '.join(links)}; products {product:.2f}"


def _product_factor(
    known: Profile,
    machine: Machine,
    comm: Communicator,
    clock: Clock,
    kernels: Mapping[str, Kernel],
    dtype: torch.dtype,
) -> float:
    """Time of a product here over its predicted one, if only the number of SMs differed."""
    name, kernel = next(iter(kernels.items()), (CUBLAS, None))
    product = known.kernels[name]
    operands = Operands(comm, (product.tile_m, product.tile_n), PRODUCT_K, PRODUCT_ROWS, COLUMNS, dtype)
    taken = clock.ms(_run(operands, kernel, machine.compute_sms), REPEATS)
    m, n = operands.out.shape
    return taken / product_ms(replace(known, machine=machine), m, n, PRODUCT_K, name)


def _run(operands: Operands, kernel: Kernel | None, sms: int) -> Work:
    return operands.by_cublas if kernel is None else partial(operands.by, kernel, sms)


def with_kernels(profile: Profile, kernels: Mapping[str, Kernel]) -> Profile:
    """The profile with an entry for every kernel: one that it lacks takes what its tile's size lets expect."""
    known = profile.kernels[CUBLAS]
    missing = {name: one for name, one in kernels.items() if name not in profile.kernels}
    added = {name: like(known, one.tile_m, one.tile_n) for name, one in missing.items()}
    return replace(profile, kernels=profile.kernels | added)


def like(known: Product, tile_m: int, tile_n: int) -> Product:
    """A kernel of another tile at the same speed, but for what filling up costs a small tile more."""
    ratio = (tile_m * tile_n + FILL) / (known.tile_m * known.tile_n + FILL)
    return Product(tile_m, tile_n, 1, max(known.launch_ms, 0.0), known.tile_ms * ratio, known.k_ms * ratio)
