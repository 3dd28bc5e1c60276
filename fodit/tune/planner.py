"""What the operations ask: how shall this one be run? And how the ranks agree on one answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import gcd
from pathlib import Path

import torch
import torch.distributed as dist

from fodit.agreement import everyone, together
from fodit.kernels.binding import Kernel
from fodit.ops.communicator import Communicator
from fodit.plan import Plan, UlyssesLayout
from fodit.tune.choice import Choice
from fodit.tune.clock import Clock
from fodit.tune.codec import FileError
from fodit.tune.measure import this_machine
from fodit.tune.operation import distrusted, shared_kernels
from fodit.tune.predict import attention_calls, segment_ms, serial_ms
from fodit.tune.probe import probe, probing, with_kernels
from fodit.tune.profile import CUBLAS, Machine, Profile, nearest, shipped
from fodit.tune.reason import reason
from fodit.tune.search import UNSURE, Shape, choose, partitions, products
from fodit.tune.store import Attention, HeadGroups, Plans, alike, stored_plans, stored_profile

HOPPER = (9, 0)  # since then cuBLAS and cuDNN have kernels that stay on their SMs
MEASURED = "predicted from the measured profile"
KEPT = 1024  # answers
MOST_GROUPS = 8
AS_GOOD = 0.01  # longer; what the host does for each exchange is not predicted


class Planner:
    """Chooses how operations run. Answers are the same on all ranks, and remembered.

    Args:
        profile: of the machine, or the nearest there is.
        source: where the profile is from, for those who ask why.
        plans: what was tuned; it goes before prediction.
        kernels: names of the kernels that all ranks have; None takes the profile's.
        notes: what a user should know, such as a stored file that could not be used.

    Attributes:
        asked: a line for each answer it gave: the plan, its times and why it was chosen.
    """

    def __init__(
        self,
        profile: Profile,
        source: str = MEASURED,
        plans: Plans | None = None,
        kernels: Iterable[str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.profile, self.source, self.notes = profile, source, tuple(notes)
        self.plans = plans or Plans(profile.machine)
        self.kernels = None if kernels is None else tuple(kernels)
        self.asked: list[str] = []
        self._choice = lru_cache(KEPT)(self._find)
        self._product = lru_cache(KEPT)(self._find_product)
        self._groups = lru_cache(KEPT)(self._find_groups)
        self._calls = lru_cache(KEPT)(partial(attention_calls, profile))

    @property
    def ranks(self) -> int:
        return self.profile.machine.ranks

    def choice(self, op: str, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Choice:
        """For a product [m, k] x [k, n] with an all_reduce or a reduce_scatter; the slabs are relative sizes.

        `m`, `n` and `k` must be the same on all ranks.
        """
        return self._choice(Shape(op, m, n, k, self.ranks, name_of(dtype)))

    def product(self, plan: Plan, k: int, dtype: torch.dtype = torch.bfloat16) -> Choice:
        """For a plan that is given: the kernel and the SMs left free, and whether the slabs are worth it.

        Ranks may get different answers, which then only differ in the kernel.
        """
        return self._product(plan, k, name_of(dtype))

    def head_groups(
        self,
        tokens: int,
        batch: int,
        heads: int,
        head_dim: int,
        parts: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[int, ...]:
        """Relative sizes of the head groups of an Ulysses attention; arguments as in `store.Attention`."""
        return self.attention(Attention(tokens, batch, parts, heads, head_dim, self.ranks, name_of(dtype))).shares

    def attention_calls(self, layout: UlyssesLayout) -> tuple[tuple[int, ...], ...]:
        """For each head group of this rank the heads of each call of attention; see `predict.attention_calls`."""
        return self._calls(layout)

    def attention(self, attention: Attention) -> HeadGroups:
        """Head groups with their times."""
        return self._groups(attention)

    def _find(self, shape: Shape) -> Choice:
        found = self.plans.find(shape)
        if found is None or not self._has(found.kernel):
            found = choose(self.profile, shape, self.kernels, self.source)
        self.asked.append(f"{shape}: {found.describe()}: {reason(self.profile, shape, found, self.kernels)}")
        return found

    def _has(self, kernel: str | None) -> bool:
        return kernel is None or self.kernels is None or kernel in self.kernels

    def _find_product(self, plan: Plan, k: int, dtype: str) -> Choice:
        found = self._of_product(plan, k, dtype)
        self.asked.append(f"gemm + {plan.op}, M={plan.rows} N={sum(plan.widths)} K={k}: {found.describe()}")
        return found

    def _of_product(self, plan: Plan, k: int, dtype: str) -> Choice:
        sizes, n = [slab.elements for slab in plan.slabs], sum(plan.widths)
        slabs = tuple(size // gcd(*sizes) for size in sizes)
        overlap = len(slabs) > 1 or bool(plan.local)
        tuned = [
            one.choice
            for one in self.plans.tuned
            if (one.shape.op, one.shape.n, one.shape.k) == (plan.op, n, k)
            and alike(one.shape.dtype, dtype)
            and len(one.choice.slabs) == len(slabs)
            and self._has(one.choice.kernel)
        ]
        if tuned:
            return replace(tuned[0], slabs=slabs, overlap=overlap)
        (best,) = products(self.profile, plan, k, self.kernels, 1)
        serial = serial_ms(self.profile, plan.op, plan.rows, n, k)
        kernel = None if best.kernel == CUBLAS else best.kernel
        return Choice(
            plan.op, overlap, slabs, kernel, best.free_sms, best.predicted_ms, serial, None, None, self.source
        )

    def _find_groups(self, attention: Attention) -> HeadGroups:
        found = self.plans.find_groups(attention)
        found = found or predicted_groups(self.profile, attention, self.kernels, self.source)[0]
        self.asked.append(f"{attention}: {found.describe()}")
        return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def predicted_groups(
    profile: Profile, attention: Attention, kernels: Iterable[str] | None, source: str
) -> list[HeadGroups]:
    """All head groups that are worth considering, by time; but first the fewest that are as good as the best ones, or
    one group if nothing gains enough."""
    found = []
    one = attention
    for shares in partitions(min(one.projection.most_slabs(profile.machine.copies), MOST_GROUPS)):
        layout = UlyssesLayout(0, one.ranks, one.tokens, one.batch, one.heads, one.head_dim, shares)
        (best,) = products(profile, layout.projection_plan, one.width, kernels, 1)
        found.append((segment_ms(profile, layout, one.width, best.kernel, best.free_sms, one.parts), shares))
    alone = next(pair for pair in found if len(pair[1]) == 1)
    least, _ = min(found)
    as_good = [pair for pair in found if pair[0] <= least * (1 + AS_GOOD)]
    first = min(as_good, key=lambda pair: (len(pair[1]), pair)) if least <= alone[0] * (1 - UNSURE) else alone
    ranked = [first, *(pair for pair in sorted(found) if pair != first)]
    return [HeadGroups(attention, shares, ms, None, alone[0], source) for ms, shares in ranked]


def planner_named(name: str) -> Planner:
    """Of a shipped profile by its name, or of the profile in a file.

    Raises:
        ValueError: there is neither, or the file is not a profile.
    """
    known = shipped()
    if name in known:
        return Planner(known[name], f"predicted from the shipped profile {name}")
    if not Path(name).is_file():
        raise ValueError(f"no profile {name!r}: neither a file, nor one of {', '.join(known)}")
    return Planner(Profile.load(Path(name)))


def planner_for(
    comm: Communicator,
    control: dist.ProcessGroup | None,
    compute_sms: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Planner | None:
    """The planner of a communicator, the same on all ranks; None where there is nothing to plan (a CPU, one rank).

    What was measured and tuned on this machine is read from the cache folder by rank 0. Without it the nearest shipped
    profile is scaled by a quick probe of link and product (well under ten seconds), or with `FODIT_NO_PROBE=1` taken
    as it is.

    Args:
        comm: of the ranks that communicate; all ranks call this together.
        control: a gloo group of all ranks.
        compute_sms: SMs that products may take; None takes all.
    """
    if comm.stream is None:
        return None
    machine = this_machine(comm, control, compute_sms)
    kernels = shared_kernels(comm.device, control, dtype)
    profile, plans, notes = agreed_files(machine, control)
    notes += distrusted(comm.device, dtype)
    if profile is not None:
        return Planner(with_kernels(profile, kernels), MEASURED, plans, kernels, notes)
    return untuned(machine, comm, control, kernels, dtype, plans, notes)


def untuned(
    machine: Machine,
    comm: Communicator,
    control: dist.ProcessGroup | None,
    kernels: Mapping[str, Kernel],
    dtype: torch.dtype = torch.bfloat16,
    plans: Plans | None = None,
    notes: Sequence[str] = (),
) -> Planner:
    """The planner of a machine that nobody has measured; see `planner_for`."""
    known = shipped()
    name = nearest(machine, known)
    start = with_kernels(known[name].with_ranks(machine.ranks), kernels)
    if min(everyone(control, torch.cuda.get_device_capability(comm.device))) < HOPPER:
        start = start.without_holds()
    if everyone(control, probing())[0]:
        probed = probe(start, machine, comm, Clock(comm.device, control), kernels, dtype)
        return Planner(probed, f"predicted from the shipped profile {name}, scaled by a probe", plans, kernels, notes)
    return Planner(replace(start, machine=machine), f"predicted from the shipped profile {name}", plans, kernels, notes)


def agreed_files(machine: Machine, control: dist.ProcessGroup | None) -> tuple[Profile | None, Plans, tuple[str, ...]]:
    """What rank 0 finds in its cache folder, on all ranks, and what it could not use."""
    found: tuple[Profile | None, Plans, tuple[str, ...]] = (None, Plans(machine), ())
    with together(control, "reading the stored plans"):
        if control is None or dist.get_rank(control) == 0:
            found = _read(machine)
    return everyone(control, found)[0]


def _read(machine: Machine) -> tuple[Profile | None, Plans, tuple[str, ...]]:
    profile, plans, notes = None, Plans(machine), []
    try:
        profile = stored_profile(machine)
    except FileError as error:
        notes.append(str(error))
    try:
        plans = stored_plans(machine)
    except FileError as error:
        notes.append(str(error))
    return profile, plans, tuple(notes)
