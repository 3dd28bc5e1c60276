"""Says in words how an operation would be run, and why."""

from math import ceil, inf

import torch

from fodit.kernels.gemm import DTYPES
from fodit.tune.choice import Choice
from fodit.tune.planner import Planner, name_of, planner_named
from fodit.tune.predict import ITEMSIZE, SMALLEST, bound_ms, collective_ms, context, product_ms, sender, times_sent
from fodit.tune.profile import CUBLAS, OPERATIONS, Profile
from fodit.tune.reason import reason
from fodit.tune.search import Shape
from fodit.tune.store import folder

EXAMPLE = "h200-x2-no-p2p"  # where nothing was measured


def explain(
    op: str,
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    planner: Planner | None = None,
    profile: Profile | str | None = None,
) -> str:
    """Which plan a product [m, k] x [k, n] with a collective would get, and why.

    Args:
        op: all_reduce or reduce_scatter; all_to_all for heads of 128 columns.
        dtype: of the product: bfloat16, float16, or float32, which no kernel takes.
        planner: of a communicator (`comm.planner`).
        profile: without a planner: a profile, the path of one, or the name of a shipped one. None takes the newest one
            in the cache folder; where there is none, that of two H200, and the first line says so.

    Raises:
        ValueError: there is no such operation, product or profile, or no product has that dtype.

    >>> print(fodit.explain("all_to_all", 8888, 9216, 3072))
    """
    if op not in OPERATIONS:
        raise ValueError(f"no operation {op!r}; there are {', '.join(OPERATIONS)}")
    if min(m, n, k) < 1:
        raise ValueError(f"m, n and k must be at least 1, got {m}, {n} and {k}")
    planner = _for_dtype(planner or _planner(profile), dtype)
    if op == "all_to_all" and n < planner.ranks * Shape.head_dim:
        raise ValueError(f"n={n}: an all_to_all gives each of {planner.ranks} ranks heads of {Shape.head_dim} columns")
    choice = planner.choice(op, m, n, k, dtype)
    known = planner.profile
    shape = Shape(op, m, n, k, planner.ranks, name_of(dtype))
    size = m * n * ITEMSIZE
    lines = [*planner.notes, f"{shape}", f"  plan        {choice.plan}", f"  predicted   {choice.predicted_ms:.3f} ms"]
    if choice.measured_ms is not None:
        lines.append(f"  measured    {choice.measured_ms:.3f} ms")
    kind = "predicted" if choice.measured_serial_ms is None else "measured"
    lines.append(f"  serial      {choice.without_ms:.3f} ms {kind}; the plan gains {choice.gain - 1:.1%}")
    lines.append(f"  bound       {_bound(known, shape, choice)}")
    lines.append(f"  product     {_product(known, shape, choice)}")
    lines.append(f"  collective  {_collective(known, op, size, choice)}")
    lines.append(f"  because     {reason(known, shape, choice, planner.kernels)}")
    lines.append(f"  source      {choice.source}: {known.machine}; {known.taken}")
    return "\n".join(lines)


def _planner(profile: Profile | str | None) -> Planner:
    if isinstance(profile, Profile):
        return Planner(profile)
    if profile is None:
        stored = sorted(folder().glob("*.profile.json"), key=lambda path: path.stat().st_mtime)
        if stored:
            return Planner(Profile.load(stored[-1]))
        planner = planner_named(EXAMPLE)
        machine = planner.profile.machine
        link = machine.link.split(", ")[0]  # the rest are variables
        planner.notes = (f"nothing is measured here: this is for {machine.ranks} x {machine.gpus[0]}, {link}",)
        return planner
    return planner_named(profile)


def _for_dtype(planner: Planner, dtype: torch.dtype) -> Planner:
    """The planner as it is for 16 bits; without kernels, and with a note, for float32."""
    if dtype in DTYPES:
        return planner
    if dtype != torch.float32:
        raise ValueError(f"no product of a pipeline has dtype {dtype}; they have {_names(*DTYPES, torch.float32)}")
    note = f"float32 products run in torch, kernels take {_names(*DTYPES)}; predictions are for 16-bit elements"
    return Planner(planner.profile, planner.source, planner.plans, (), (*planner.notes, note))


def _names(*dtypes: torch.dtype) -> str:
    return ", ".join(map(name_of, dtypes))


def _bound(known: Profile, shape: Shape, choice: Choice) -> str:
    """Not above this plan's prediction either: its kernel may be faster than cuBLAS, as for small products, and its
    slabs smaller than a sixteenth."""
    product = min(product_ms(known, shape.m, shape.n, shape.k), _kernel_ms(known, shape, choice) or inf)
    parts = max(SMALLEST, ceil(sum(choice.slabs) / min(choice.slabs)))
    bound = bound_ms(known, shape.op, shape.m, shape.n, shape.k, parts, product)
    if choice.serial_ms < bound:  # small sums: the exchanges alone may take longer than a collective
        return f"{choice.serial_ms:.3f} ms, the serial time: no overlap takes less than {bound:.3f} ms"
    return f"{bound:.3f} ms, overlapped in slabs of 1/{parts} or larger"


def _product(known: Profile, shape: Shape, choice: Choice) -> str:
    text, alone = f"{product_ms(known, shape.m, shape.n, shape.k):.3f} ms by cuBLAS", _kernel_ms(known, shape, choice)
    if alone is None:
        return text
    return f"{text}, {alone:.3f} ms by {choice.kernel} that leaves {choice.free_sms} SMs"


def _kernel_ms(known: Profile, shape: Shape, choice: Choice) -> float | None:
    """The product by the plan's kernel, if it has one that is known."""
    if choice.kernel is None or choice.kernel not in known.kernels:
        return None
    return product_ms(known, shape.m, shape.n, shape.k, choice.kernel, choice.free_sms)


def _collective(known: Profile, op: str, size: int, choice: Choice) -> str:
    text = f"{collective_ms(known, op, size):.3f} ms for {size / 2**20:.0f} MiB alone"
    if not choice.overlap:
        return text
    whole, carrier = sum(choice.slabs), sender(known, op)
    sizes = [size * share / whole for share in choice.slabs] * times_sent(known, op)
    beside = known.beside[carrier].get(context(choice.kernel or CUBLAS, choice.free_sms))
    parts = "slabs" if carrier == op else "exchanges"
    text += f", {sum(collective_ms(known, carrier, int(one)) for one in sizes):.3f} ms in {len(sizes)} {parts}"
    if beside is not None:
        text += f", {sum(beside.curve(one) for one in sizes):.3f} ms beside the product, which takes "
        text += f"{beside.slowed:.2f} times as long meanwhile"
    return text
