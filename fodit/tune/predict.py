"""How long an operation takes by a plan on a machine, from the machine's profile. Milliseconds.

A product is a persistent kernel: blocks on all SMs but the free ones draw tiles in the order of the tile program, so
tiles are done in waves, and a slab is complete with the wave of its last tile. Its collective follows, slower beside
the product than alone. Both go into the simulator of two queues.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from fodit.plan import Plan, UlyssesLayout
from fodit.tune.profile import CUBLAS, Product, Profile
from fodit.tune.simulate import COMMUNICATION, COMPUTE, Task, simulate

ITEMSIZE = 2  # bytes of bf16 and fp16
PRODUCT, ATTENTION, COPY = "product", "attention", "copy"
BLOCK_ROWS = 128  # query rows that an attention kernel's block attends
HALF_FULL = 0.5
REREAD_SHOWN = 0.5


def waves(tiles: int, sms: int) -> float:
    """Tile times until `tiles` tiles are done.

    Between whole waves, as if all blocks ran in step, and an even flow, as if they had drifted apart. Fits 56 products
    on an H200 (eight shapes, seven numbers of SMs) with a mean error of 0.5 %; either alone has 0.7 %.
    """
    even = tiles / sms
    return HALF_FULL * ceil(even - 1e-9) + (1 - HALF_FULL) * (even + HALF_FULL)


def slab_tiles(plan: Plan, product: Product) -> list[int]:
    """Tiles of each slab."""
    return [sum(product.tiles(one.rows, one.cols) for one in slab.segments) for slab in plan.slabs]


def slab_ends(profile: Profile, product: Product, tiles: Sequence[int], k: int, free: int) -> list[float]:
    """When each slab of a product alone is complete."""
    sms = (profile.machine.compute_sms - free) // product.cluster * product.cluster
    tile = product.tile(k) * profile.pace_at(free)
    ends, done = [], 0
    for count in tiles:
        done += count
        ends.append(max(product.launch_ms + tile * waves(done, max(sms, 1)), 0.0))
    return ends


def product_ms(profile: Profile, m: int, n: int, k: int, kernel: str = CUBLAS, free: int = 0) -> float:
    """A plain product [m, k] x [k, n]."""
    product = profile.kernels[kernel]
    return slab_ends(profile, product, [product.tiles(m, n)], k, free)[0]


def collective_ms(profile: Profile, op: str, size: int) -> float:
    """A collective of that many bytes, alone."""
    return profile.alone[op](size)


def serial_ms(profile: Profile, op: str, m: int, n: int, k: int) -> float:
    """The product by cuBLAS, then one collective."""
    return product_ms(profile, m, n, k) + collective_ms(profile, op, m * n * ITEMSIZE)


def overlapped_ms(profile: Profile, plan: Plan, k: int, kernel: str, free: int) -> float:
    """The plan's product by a kernel that leaves `free` SMs, its collectives beside it."""
    tasks = slab_tasks(profile, plan, k, kernel, free)
    return simulate(tasks)[-1][1]


def slab_tasks(profile: Profile, plan: Plan, k: int, kernel: str, free: int) -> list[Task]:
    """One compute task a slab, then one communication task a slab."""
    product, op = profile.kernels[kernel], plan.op
    tiles = slab_tiles(plan, product)
    if kernel == CUBLAS:  # without a signaling kernel every slab is a product of its own
        lengths = [slab_ends(profile, product, [count], k, free)[0] for count in tiles]
    else:
        ends = slab_ends(profile, product, tiles, k, free)
        lengths = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]
        lengths[1:] = [length + reread_ms(profile, plan, k) for length in lengths[1:]]
    name = context(kernel, free)
    tasks = [Task(COMPUTE, PRODUCT, length, slowed={op: profile.beside[op][name].slowed}) for length in lengths]
    for index, slab in enumerate(plan.slabs):
        size = (slab.stop - slab.start) * ITEMSIZE
        tasks.append(_collective(profile, op, size, (index,), {PRODUCT: name}))
    return tasks


def reread_ms(profile: Profile, plan: Plan, k: int) -> float:
    """What every slab but the first costs a product: it reads again what its tiles share, and half of that shows.

    A slab of rows needs all weights, one of columns all of A. That half of it shows fits 25 shapes in three link
    profiles on two H200.
    """
    again = plan.rows if plan.op == "all_to_all" else sum(plan.widths)
    return REREAD_SHOWN * again * k * ITEMSIZE / profile.copy_gbs / 1e6


def context(kernel: str, free: int) -> str:
    """The name in `Profile.beside` of what runs beside the collectives."""
    return CUBLAS if kernel == CUBLAS else str(free)


def _collective(profile: Profile, op: str, size: float, after: tuple[int, ...], others: dict[str, str]) -> Task:
    """A collective, slowed beside tasks of the kinds in `others`, which name what was measured beside it."""
    alone = profile.alone[op](size)
    slowed = {
        kind: max(profile.beside[op][name].curve(size) / alone, 1.0)
        for kind, name in others.items()
        if name in profile.beside[op]
    }
    return Task(COMMUNICATION, op, alone + profile.wait_ms, after, slowed)


def attention_ms(profile: Profile, batch: int, heads: int, tokens: int, dim: int) -> float:
    """Attention of whole sequences by a kernel with one block an SM."""
    known = min(profile.attention_ms, key=lambda one: abs(one - dim))
    blocks = batch * heads * ceil(tokens / BLOCK_ROWS)
    full = waves(blocks, profile.machine.compute_sms) * profile.machine.compute_sms / blocks
    return profile.attention_ms[known] * dim / known * batch * heads * tokens**2 / 1e9 * full


def copy_ms(profile: Profile, size: float) -> float:
    """Reading and writing `size` bytes."""
    return 2 * size / profile.copy_gbs / 1e6


def segment_ms(profile: Profile, layout: UlyssesLayout, width: int, kernel: str, free: int, parts: int = 1) -> float:
    """A layer's attention under Ulysses: q, k and v product, exchange, attention, the way back, out projection.

    The batch goes in `parts` of the layout's size: first the products of all, then the attentions of all, then their
    out projections. q and k are read and written once more when they arrive (normalised and rotated), the result once
    when it returns.
    """
    tasks: list[Task] = []
    arrivals, returns = [], []
    for _ in range(parts):
        arrivals.append(_add_products(tasks, profile, layout, width, kernel, free))
    for arrived in arrivals:
        returns.append(_add_attentions(tasks, profile, layout, arrived, context(kernel, free)))
    local, dim = layout.batch * layout.local_tokens, layout.head_dim
    for returned in returns:
        for group, before in enumerate(returned):
            heads = sum(layout.group_heads(rank, group) for rank in range(layout.ranks))
            tasks.append(Task(COMPUTE, COPY, copy_ms(profile, local * heads * dim * ITEMSIZE), (before,)))
        tasks.append(Task(COMPUTE, PRODUCT, product_ms(profile, local, width, layout.heads * dim)))
    return simulate(tasks)[-1][1]


def _add_products(
    tasks: list[Task], profile: Profile, layout: UlyssesLayout, width: int, kernel: str, free: int
) -> list[int]:
    """The q, k and v product and the exchange of each group; indices of the exchanges."""
    first = len(tasks)
    for task in slab_tasks(profile, layout.projection_plan, width, kernel, free):
        tasks.append(replace(task, after=tuple(first + index for index in task.after)))
    return [first + layout.groups + group for group in range(layout.groups)]


def _add_attentions(
    tasks: list[Task], profile: Profile, layout: UlyssesLayout, arrived: list[int], product: str
) -> list[int]:
    """The attention and the way back of each group; indices of the latter."""
    op, returned = "all_to_all", []
    beside = profile.beside[op].get(ATTENTION)
    slowed = {op: beside.slowed} if beside is not None else {}
    for group, before in enumerate(arrived):
        heads = layout.group_heads(layout.rank, group)
        size = layout.tokens * layout.batch * heads * layout.head_dim * ITEMSIZE
        taken = copy_ms(profile, 2 * size)
        taken += attention_ms(profile, layout.batch, heads, layout.tokens, layout.head_dim)
        tasks.append(Task(COMPUTE, ATTENTION, taken, (before,), slowed))
        others = {PRODUCT: product, ATTENTION: ATTENTION}
        tasks.append(_collective(profile, op, size, (len(tasks) - 1,), others))
        returned.append(len(tasks) - 1)
    return returned


def bound_ms(profile: Profile, op: str, m: int, n: int, k: int, smallest: int = 16) -> float:
    """No overlap can be faster: all of the product and the last slab's collective, or the first slab's product and
    all of the communication, with slabs of a sixteenth."""
    product, size = product_ms(profile, m, n, k), m * n * ITEMSIZE
    last = collective_ms(profile, op, size // smallest)
    return max(product + last, product / smallest + collective_ms(profile, op, size))
