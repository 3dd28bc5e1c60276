"""The plans that are worth considering, and the best of them by prediction."""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, TypeVar

from fodit.ops.gemm import ROW_ALIGN
from fodit.plan import Plan, SumPlan, UlyssesLayout, all_reduce_plan, reduce_scatter_plan, sum_plan
from fodit.tune.choice import Choice
from fodit.tune.predict import least_ms, overlapped_ms, serial_ms, times_sent
from fodit.tune.profile import CUBLAS, Profile

Option = TypeVar("Option", bound=tuple[Any, ...])  # of a search; the first of equals is taken
MOST_SLABS = 10
LEAST_GAIN = 0.01  # of the serial time, measured; below, a plan is not worth its trouble
UNSURE = 0.034  # the predictor's error: a plan that is predicted to gain less may lose
FINE = 5  # kernels and numbers of free SMs for which all partitions are tried
COARSE_PARTITIONS = ((1,) * 2, (1, 4, 1), (1,) * 4, (1,) * 8, (1, 2, 4, 4, 4, 2, 1))


@dataclass(frozen=True)
class Shape:
    """What is computed and sent: a product [m, k] x [k, n] and a collective.

    Args:
        op: all_reduce, reduce_scatter or all_to_all.
        ranks: that communicate.
        dtype: its name, for what is stored.
        projections, head_dim, batch: of an all-to-all's columns and rows; n = projections * heads * head_dim.
    """

    op: str
    m: int
    n: int
    k: int
    ranks: int
    dtype: str = "bfloat16"
    projections: int = 1
    head_dim: int = 128
    batch: int = 1

    def __str__(self) -> str:
        return f"gemm + {self.op}, M={self.m} N={self.n} K={self.k} on {self.ranks} ranks, {self.dtype}"

    def plan(self, slabs: tuple[int, ...], copies: bool, rank: int = 0) -> Plan | SumPlan:
        """On one rank, cut into slabs of these relative sizes. A new object: a search must not empty the caches of the
        operations.

        Args:
            copies: whether copy engines do the exchanges.

        Raises:
            ValueError: there cannot be that many slabs.
        """
        if self.op == "all_to_all":
            return self.layout(slabs, rank).column_plan(self.projections)
        if copies:
            return sum_plan.__wrapped__(self.op, self.m, self.n, self.ranks, rank, slabs, ROW_ALIGN)
        make = all_reduce_plan if self.op == "all_reduce" else reduce_scatter_plan
        return make.__wrapped__(self.m, self.n, self.ranks, slabs, ROW_ALIGN)

    def layout(self, slabs: tuple[int, ...], rank: int = 0) -> UlyssesLayout:
        """Of an all-to-all: the longest part of the sequence is the first rank's."""
        tokens = self.m // self.batch * self.ranks
        heads = self.n // self.projections // self.head_dim
        return UlyssesLayout(rank, self.ranks, tokens, self.batch, heads, self.head_dim, slabs)

    def most_slabs(self, copies: bool) -> int:
        """Slabs that `plan` can have."""
        if self.op == "all_to_all":
            return min(MOST_SLABS, self.n // self.projections // self.head_dim // self.ranks)
        rows = self.m if self.op == "all_reduce" and not copies else -(-self.m // self.ranks)
        return min(MOST_SLABS, -(-rows // ROW_ALIGN))


@dataclass(frozen=True, order=True)
class Candidate:
    """A plan and its predicted time."""

    predicted_ms: float
    slabs: tuple[int, ...]
    kernel: str
    free_sms: int


@lru_cache(maxsize=16)
def partitions(most: int) -> tuple[tuple[int, ...], ...]:
    """Relative sizes of 1 to `most` slabs: even ones, and small slabs first and last, alone or in two steps.

    A small first slab starts the communication early, a small last one leaves little of it behind the product; in
    between few large ones use the link best.
    """
    found = [(1,) * count for count in range(1, most + 1)]
    ends: tuple[tuple[int, ...], ...] = ((), (1,), (1, 2))
    for edge in (2, 4, 8):
        for head in ends:
            for tail in ends:
                for body in range(1, most + 1):
                    one = (*head, *(edge,) * body, *reversed(tail))
                    if len(one) <= most and max(head + tail, default=1) < edge:
                        found.append(tuple(share // gcd(*one) for share in one))
    return tuple(dict.fromkeys(found))


def usable_kernels(profile: Profile, kernels: Iterable[str] | None) -> list[str]:
    """Of the profile's signaling kernels those in `kernels` (None: all); cuBLAS slab by slab if there are none."""
    known = [name for name in profile.kernels if name != CUBLAS]
    return [name for name in known if kernels is None or name in set(kernels)] or [CUBLAS]


def ways(profile: Profile, op: str, kernels: Iterable[str] | None) -> list[tuple[str, int]]:
    """Kernels with the numbers of SMs that they may leave free: none for copy engines, which gain nothing by them."""
    usable = usable_kernels(profile, kernels)
    frees = [0] if profile.machine.copies else profile.free_sms(op)
    if usable == [CUBLAS] or not frees:  # measured before there were kernels: what they do beside one is not known
        return [(CUBLAS, 0)]
    return [(kernel, free) for kernel in usable for free in frees]


def candidates(
    profile: Profile, shape: Shape, kernels: Iterable[str] | None = None, most: int | None = None
) -> list[Candidate]:
    """Overlapped plans with their predicted times, best first; the `most` best ones, or None for all.

    First a few partitions with every kernel and number of free SMs, then all partitions with the best of these.
    """
    copies = profile.machine.copies
    several = [slabs for slabs in partitions(shape.most_slabs(copies)) if len(slabs) > 1]  # one slab overlaps nothing
    plans = {slabs: shape.plan(slabs, copies) for slabs in several or [(1,)]}
    coarse = [plans[slabs] for slabs in COARSE_PARTITIONS if slabs in plans] or list(plans.values())[-1:]

    def least(way: tuple[str, int]) -> float:
        return min(least_ms(profile, plan, shape.k, *way) for plan in coarse)

    def exact(way: tuple[str, int]) -> float:
        return min(overlapped_ms(profile, plan, shape.k, *way) for plan in coarse)

    fine = best_first(ways(profile, shape.op, kernels), least, exact, FINE)
    keeps_up = [slabs for slabs in plans if host_keeps_up(profile, slabs, shape)] or list(plans)[:1]
    found = best_first(
        [(slabs, way) for _, way in fine for slabs in keeps_up],
        lambda one: least_ms(profile, plans[one[0]], shape.k, *one[1]),
        lambda one: overlapped_ms(profile, plans[one[0]], shape.k, *one[1]),
        most,
    )
    return [Candidate(taken, slabs, *way) for taken, (slabs, way) in found]


def products(
    profile: Profile, plan: Plan, k: int, kernels: Iterable[str] | None, most: int | None = None
) -> list[Candidate]:
    """A plan that is given, by every kernel and number of free SMs; as `candidates`."""
    slabs = tuple(slab.elements for slab in plan.slabs)
    found = best_first(
        ways(profile, plan.op, kernels),
        lambda way: least_ms(profile, plan, k, *way),
        lambda way: overlapped_ms(profile, plan, k, *way),
        most,
    )
    return [Candidate(taken, slabs, *way) for taken, way in found]


def best_first(
    options: Iterable[Option], least: Callable[[Option], float], exact: Callable[[Option], float], most: int | None
) -> list[tuple[float, Option]]:
    """Options with their exact times, shortest first: the `most` best ones, or None for all.

    `least` is never more than `exact` and takes less time: what it rules out is not looked at (branch and bound).
    """
    if most is None:
        return sorted((exact(one), one) for one in options)
    found: list[tuple[float, Option]] = []
    for bound, option in sorted((least(one), one) for one in options):
        if len(found) >= most and bound >= found[most - 1][0]:
            break
        insort(found, (exact(option), option))
    return found[:most]


def host_keeps_up(profile: Profile, slabs: Sequence[int], shape: Shape) -> bool:
    """Whether the host enqueues the collectives in less time than the operation takes without overlap."""
    collectives = len(slabs) * times_sent(profile, shape.op)
    return collectives * profile.host_ms <= serial_ms(profile, shape.op, shape.m, shape.n, shape.k)


def choose(profile: Profile, shape: Shape, kernels: Iterable[str] | None, source: str) -> Choice:
    """The best candidate, or serial if it gains less than predictions can tell."""
    (best,) = candidates(profile, shape, kernels, 1)
    return as_choice(shape, best, serial_ms(profile, shape.op, shape.m, shape.n, shape.k), source)


def as_choice(shape: Shape, best: Candidate, serial: float, source: str) -> Choice:
    in_one = len(best.slabs) == 1 and shape.op != "all_to_all"  # whose own part hides the rest even so
    if in_one or best.predicted_ms > serial * (1 - UNSURE):
        return Choice(shape.op, False, (1,), None, 0, serial, serial, None, None, source)
    kernel = None if best.kernel == CUBLAS else best.kernel
    return Choice(shape.op, True, best.slabs, kernel, best.free_sms, best.predicted_ms, serial, None, None, source)
