"""How long an operation takes by a plan on a machine, from the machine's profile. Milliseconds.

A product is a persistent kernel: blocks on all SMs but the free ones draw tiles in the order of the tile program, so
tiles are done in waves, and a slab is complete with the wave of its last tile. Its collective follows, slower beside
the product than alone. Both go into the simulator of two queues.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

from fodit.plan import Plan, SumPlan, UlyssesLayout, split_sizes
from fodit.tune.profile import CUBLAS, Product, Profile
from fodit.tune.simulate import COMMUNICATION, COMPUTE, Task, simulate

ITEMSIZE = 2  # bytes of bf16 and fp16
PRODUCT, ATTENTION, COPY = "product", "attention", "copy"
BLOCK_ROWS = 128  # query rows that an attention kernel's block attends
LONGEST_CALL_MS, SPARE = 2.0, 0.015  # of an attention call, and how much longer shorter calls may take together
MLP_RATIO = 4  # columns of CogVideoX's first MLP product over its input's
SMALLEST = 16  # the smallest useful slab is a sixteenth
HALF_FULL = 0.5
REREAD_SHOWN = 0.5
PIECE_MS = 0.01  # of a piece of a sum, beyond its launch: its waits, its first stages, its last tile's stores


def waves(tiles: int, sms: int) -> float:
    """Tile times until `tiles` tiles are done.

    Between whole waves, as if all blocks ran in step, and an even flow, as if they had drifted apart. Fits 56 products
    on an H200 (eight shapes, seven numbers of SMs) with a mean error of 0.5 %; either alone has 0.7 %.
    """
    even = tiles / sms
    return HALF_FULL * ceil(even - 1e-9) + (1 - HALF_FULL) * (even + HALF_FULL)


def slab_tiles(plan: Plan, product: Product) -> list[int]:
    """Tiles of each slab, and of what is not sent, if there is such a part."""
    parts = [slab.segments for slab in plan.slabs] + ([plan.local] if plan.local else [])
    return [sum(product.tiles(one.rows, one.cols) for one in part) for part in parts]


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


def communication_ms(profile: Profile, op: str, size: int) -> float:
    """All that an overlapped operation with a product of that many bytes communicates, alone and undivided."""
    return times_sent(profile, op) * collective_ms(profile, sender(profile, op), size)


def serial_ms(profile: Profile, op: str, m: int, n: int, k: int) -> float:
    """The product by cuBLAS, then one collective."""
    return product_ms(profile, m, n, k) + collective_ms(profile, op, m * n * ITEMSIZE)


def sender(profile: Profile, op: str) -> str:
    """The collective that sends what an operation communicates: copy engines exchange, and the products add."""
    return "all_to_all" if profile.machine.copies else op


def times_sent(profile: Profile, op: str) -> int:
    """How often an overlapped operation sends every part: what copy engines exchange and products sum up goes back."""
    return 2 if op == "all_reduce" and profile.machine.copies else 1


def overlapped_ms(profile: Profile, plan: Plan | SumPlan, k: int, kernel: str, free: int) -> float:
    """The plan's product by a kernel that leaves `free` SMs, its collectives beside it."""
    if isinstance(plan, SumPlan):
        tasks = sum_tasks(profile, plan, k, kernel, free)
    else:
        tasks = slab_tasks(profile, plan, k, kernel, free)
    return max(end for _, end in simulate(tasks))


def slab_tasks(profile: Profile, plan: Plan, k: int, kernel: str, free: int) -> list[Task]:
    """One compute task a slab, then one communication task a slab, then the computation of what is not sent."""
    op, name = plan.op, context(kernel, free)
    kind = CUBLAS if kernel == CUBLAS else PRODUCT
    slowed = {op: profile.beside[op][name].slowed}
    tasks = [Task(COMPUTE, kind, ms, slowed=slowed) for ms in slab_lengths(profile, plan, k, kernel, free)]
    slabs = len(plan.slabs)
    sent = [_collective(profile, op, size, index, name) for index, size in enumerate(slab_bytes(plan))]
    return tasks[:slabs] + sent + tasks[slabs:]


def sum_tasks(profile: Profile, plan: SumPlan, k: int, kernel: str, free: int) -> list[Task]:
    """The slabs of the other ranks, then each own piece after the slab that it takes, and its way to the others."""
    tasks = slab_tasks(profile, plan.others, k, kernel, free)
    kind, slowed, slabs = tasks[0].kind, tasks[0].slowed, len(plan.own)
    parts = zip(part_lengths(profile, plan, k, kernel, free), part_bytes(plan), strict=True)
    for index, own in enumerate(plan.own):
        computed = len(tasks)
        taken = [next(parts) for _ in own.slabs]
        tasks += [Task(COMPUTE, kind, ms, (slabs + index,), slowed) for ms, _ in taken]
        for part, (_, size) in enumerate(taken):
            if size:
                tasks.append(_collective(profile, plan.others.op, size, computed + part, context(kernel, free)))
    return tasks


def part_lengths(profile: Profile, plan: SumPlan, k: int, kernel: str, free: int) -> list[float]:
    """How long the product works on each part of the own pieces. What it adds it reads at the speed of a copy.

    Each piece is a kernel of its own; it starts in the last wave of the one before, unless their stream has less than
    all SMs. What that costs, `PIECE_MS`, fits 198 plans over NVLink between two H200 with a mean error of 3.8 %.
    """
    product, lengths = profile.kernels[kernel], []
    before = sum(slab_tiles(plan.others, product))  # tiles computed in the same waves
    for own in plan.own:
        tiles = slab_tiles(own, product)
        if kernel == CUBLAS:  # a product for each part
            taken = [slab_ends(profile, product, [count], k, free)[0] for count in tiles]
        elif profile.machine.compute_sms < profile.machine.sms:
            taken = _differences([0.0, *slab_ends(profile, product, tiles, k, free)])
        else:
            taken = _differences(slab_ends(profile, product, [before, *tiles], k, free))
            taken[0] += max(product.launch_ms, 0.0) + PIECE_MS
            before += sum(tiles)
        for ms, slab in zip(taken, own.slabs, strict=True):
            lengths.append(ms + (plan.ranks - 1) * slab.elements * ITEMSIZE / profile.copy_gbs / 1e6)
    return lengths


def _differences(ends: Sequence[float]) -> list[float]:
    return [end - start for start, end in pairwise(ends)]


def part_bytes(plan: SumPlan) -> list[int]:
    """Size of the exchange of each of these parts, as if a rank sent it to itself, too; 0 where it stays here."""
    sent = plan.ranks if plan.op == "all_reduce" else 0
    return [slab.elements * sent * ITEMSIZE for own in plan.own for slab in own.slabs]


def slab_lengths(profile: Profile, plan: Plan, k: int, kernel: str, free: int) -> list[float]:
    """How long the product works on each slab, and on what is not sent, alone."""
    product = profile.kernels[kernel]
    tiles = slab_tiles(plan, product)
    if kernel == CUBLAS:  # without a signaling kernel every slab is a product of its own
        return [slab_ends(profile, product, [count], k, free)[0] for count in tiles]
    ends = slab_ends(profile, product, tiles, k, free)
    again = reread_ms(profile, plan, k)
    return [ends[0], *(end - start + again for start, end in pairwise(ends))]


def slab_bytes(plan: Plan) -> list[int]:
    """Size of each slab's collective: of its whole input, with the share that a rank does not send to itself."""
    own = plan.ranks / (plan.ranks - 1) if plan.op == "all_to_all" and plan.ranks > 1 else 1.0
    return [round(slab.elements * own) * ITEMSIZE for slab in plan.slabs]


def least_ms(profile: Profile, plan: Plan | SumPlan, k: int, kernel: str, free: int) -> float:
    """Not more than `overlapped_ms`, in less time: communication starts with the first slab and never waits again."""
    if isinstance(plan, SumPlan):
        return _least_sum_ms(profile, plan, k, kernel, free)
    op, sizes, lengths = plan.op, slab_bytes(plan), slab_lengths(profile, plan, k, kernel, free)
    name = context(kernel, free)
    first, product, whole = lengths[0], sum(lengths), sum(busy_ms(profile, op, name, size) for size in sizes)
    slowed = 1.0
    if kernel != CUBLAS:
        slowed = min(profile.slower(op, name, size) for size in sizes)
    sent, last = product - (lengths[-1] if plan.local else 0.0), profile.alone[op](sizes[-1])
    return max(product, sent + last, product + whole - (product - first) / slowed)


def _least_sum_ms(profile: Profile, plan: SumPlan, k: int, kernel: str, free: int) -> float:
    lengths, parts = slab_lengths(profile, plan.others, k, kernel, free), part_lengths(profile, plan, k, kernel, free)
    op, name = plan.others.op, context(kernel, free)
    back = [size for size in part_bytes(plan) if size]
    sent = lengths[0] + sum(busy_ms(profile, op, name, size) for size in slab_bytes(plan.others))
    last = profile.alone[op](back[-1]) if back else 0.0
    returned = sum(busy_ms(profile, op, name, size) for size in back)
    return max(sum(lengths) + sum(parts) + last, sent + parts[-1] + last, sent + returned)


def reread_ms(profile: Profile, plan: Plan, k: int) -> float:
    """What every slab but the first costs a product: it reads again what its tiles share, and half of that shows.

    A slab of rows needs all weights, one of columns all of A. That half of it shows fits 25 shapes in three link
    profiles on two H200.
    """
    again = sum(plan.widths) if plan.by_rows else plan.rows
    return REREAD_SHOWN * again * k * ITEMSIZE / profile.copy_gbs / 1e6


def busy_ms(profile: Profile, op: str, name: str, size: float) -> float:
    """How long a collective beside `name` keeps the next one waiting.

    Back to back beside a product, small exchanges by copy engines take less time each than one takes alone: the next
    one is under way while the signals of the last one are.
    """
    alone = profile.alone[op](size)
    busy = min(profile.beside[op][name].curve(size), alone) if profile.machine.copies else alone
    return busy + profile.wait_ms


def context(kernel: str, free: int) -> str:
    """The name in `Profile.beside` of what runs beside the collectives."""
    return CUBLAS if kernel == CUBLAS else str(free)


def _collective(profile: Profile, op: str, size: float, after: int, product: str) -> Task:
    """A collective, slowed or held up by what runs beside it: signaling kernels as `product` was measured, and others.

    Slabs of a signaling kernel are tasks of their own, but it is one kernel: nothing gets in between them.
    """
    busy = busy_ms(profile, op, product, size)
    others = {kind: kind for kind in (CUBLAS, ATTENTION) if kind in profile.beside[op]}
    held = frozenset(kind for kind in others if profile.holds(op, kind))
    slowed = {
        kind: profile.slower(op, name, size) for kind, name in {PRODUCT: product, **others}.items() if kind not in held
    }
    lag = profile.alone[op](size) + profile.wait_ms - busy
    return Task(COMMUNICATION, op, busy, (after,), slowed, held, lag)


def attention_ms(profile: Profile, batch: int, heads: int, tokens: int, dim: int, attended: int | None = None) -> float:
    """One call of attention by a kernel with one block an SM; of a sequence to itself, or to `attended` tokens."""
    known = min(profile.attention_ms, key=lambda one: abs(one - dim))
    pairs = tokens * (tokens if attended is None else attended)
    idle = attention_waves(batch * heads, tokens, profile.machine.compute_sms)
    return profile.attention_ms[known] * dim / known * batch * heads * pairs / 1e9 * idle


def attention_waves(heads: int, tokens: int, sms: int) -> float:
    """How many times longer attention takes than with all SMs at work all the time: its last wave is not full."""
    blocks = heads * ceil(tokens / BLOCK_ROWS)
    return ceil(blocks / sms) * sms / blocks


def attention_calls(profile: Profile, layout: UlyssesLayout) -> tuple[tuple[int, ...], ...]:
    """For each head group the heads of each call of attention.

    Where attention keeps collectives from starting, long calls are divided, so that collectives get in between them.
    Not where the calls' last waves, which do not fill the GPU, would cost more than a little.
    """
    groups = [layout.group_heads(layout.rank, group) for group in range(layout.groups)]
    if not profile.holds("all_to_all", ATTENTION):
        return tuple((heads,) for heads in groups)

    def ms(heads: int) -> float:
        return attention_ms(profile, layout.batch, heads, layout.tokens, layout.head_dim)

    def divided(heads: int) -> tuple[int, ...]:
        best: tuple[int, ...] = (heads,)
        for count in range(2, heads + 1):
            if ms(max(best)) <= LONGEST_CALL_MS:
                break
            calls = split_sizes(heads, count)
            if sum(map(ms, calls)) <= ms(heads) * (1 + SPARE):
                best = calls
        return best

    return tuple(divided(heads) for heads in groups)


def copy_ms(profile: Profile, size: float) -> float:
    """Reading and writing `size` bytes."""
    return 2 * size / profile.copy_gbs / 1e6


def segment_ms(profile: Profile, layout: UlyssesLayout, width: int, kernel: str, free: int, parts: int = 1) -> float:
    """A layer's attention under Ulysses: q, k and v product, exchange, attention, the way back, out projection.

    The batch goes in `parts` of the layout's size: first the products of all, then the attentions of all, then their
    out projections. With several parts each one's MLP counts, too: the one of the first part hides the exchange of the
    next, and the last one's is put off until the next layer has its first product under way. A single part has none of
    that: its out projection hides the way back. q and k are read and written once more when they arrive (normalised
    and rotated).
    """
    tasks: list[Task] = []
    arrivals, returns, local = [], [], layout.batch * layout.local_tokens
    mlp = product_ms(profile, local, MLP_RATIO * width, width) + product_ms(profile, local, width, MLP_RATIO * width)
    for part in range(parts):
        arrivals.append(_add_products(tasks, profile, layout, width, kernel, free))
        if part == 0 and parts > 1:
            tasks.append(Task(COMPUTE, CUBLAS, mlp))
    for arrived in arrivals:
        returns.append(_add_attentions(tasks, profile, layout, arrived, context(kernel, free)))
    for part, returned in enumerate(returns):
        _add_out(tasks, profile, layout, width, returned, parts == 1)
        if part + 1 < parts:
            tasks.append(Task(COMPUTE, CUBLAS, mlp))
    return max(end for _, end in simulate(tasks))


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
    for before, calls in zip(arrived, attention_calls(profile, layout), strict=True):
        size = layout.tokens * layout.batch * sum(calls) * layout.head_dim * ITEMSIZE
        tasks.append(Task(COMPUTE, COPY, copy_ms(profile, 2 * size), (before,)))
        for heads in calls:
            taken = attention_ms(profile, layout.batch, heads, layout.tokens, layout.head_dim)
            tasks.append(Task(COMPUTE, ATTENTION, taken, (), slowed))
        if len(calls) > 1:
            tasks.append(Task(COMPUTE, COPY, copy_ms(profile, size)))
        tasks.append(_collective(profile, op, size, len(tasks) - 1, product))
        returned.append(len(tasks) - 1)
    return returned


def _add_out(
    tasks: list[Task], profile: Profile, layout: UlyssesLayout, width: int, returned: list[int], in_parts: bool
) -> None:
    """The out projection as `fodit.models.returns` has it."""
    local, dim = layout.batch * layout.local_tokens, layout.head_dim
    first, last = layout.rank_heads(layout.rank)

    def copy(heads: int, *after: int) -> None:
        tasks.append(Task(COMPUTE, COPY, copy_ms(profile, local * heads * dim * ITEMSIZE), after))

    def out(heads: int, *after: int, added: bool = False) -> None:
        again = copy_ms(profile, local * width * ITEMSIZE) if added else 0.0  # the sum so far is read and written
        tasks.append(Task(COMPUTE, CUBLAS, product_ms(profile, local, width, heads * dim) + again, after))

    ready = in_parts and layout.returns_lie_ready
    if not ready:
        copy(last - first)
    if in_parts:
        out(last - first)
    if not ready:
        for group, before in enumerate(returned):
            copy(sum(layout.group_heads(rank, group) for rank in range(layout.ranks) if rank != layout.rank), before)
    if not in_parts:
        out(layout.heads)
        return
    for heads in (first, layout.heads - last):
        if heads:
            out(heads, *returned, added=True)


def bound_ms(
    profile: Profile, op: str, m: int, n: int, k: int, parts: int = SMALLEST, product: float | None = None
) -> float:
    """No overlap can be faster: all of the product and the last slab's collective, or the first slab's product and
    all of the communication, with slabs of one of `parts`. The product takes cuBLAS' time or the one given. What of
    the product is exchanged comes first, what is needed here last; the sums of an all-reduce follow."""
    product, size = product_ms(profile, m, n, k) if product is None else product, m * n * ITEMSIZE
    ranks, carrier = profile.machine.ranks, sender(profile, op)
    exchanged = product * (ranks - 1) / ranks if carrier == "all_to_all" else product
    before_last = product if op == "all_reduce" else exchanged
    last = collective_ms(profile, carrier, size // parts)
    return max(product, before_last + last, exchanged / parts + communication_ms(profile, op, size))
