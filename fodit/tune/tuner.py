"""Tunes the shapes of a model: the few plans that are predicted best are measured, and the fastest one is kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fodit.kernels.binding import Kernel
from fodit.models.sequence import DEFAULT_EXCHANGES
from fodit.ops.communicator import Communicator
from fodit.ops.gemm import DEFAULT_PARTS, DEFAULT_SLABS
from fodit.plan import Plan, SumPlan, UlyssesLayout
from fodit.tune.choice import TUNED, Choice, shares_text
from fodit.tune.clock import Clock, Work
from fodit.tune.operation import Operation, Segment
from fodit.tune.planner import predicted_groups
from fodit.tune.predict import attention_calls, serial_ms
from fodit.tune.profile import CUBLAS, Profile
from fodit.tune.search import LEAST_GAIN, Candidate, Shape, candidates, products
from fodit.tune.shapes import Model
from fodit.tune.store import Attention, HeadGroups, Plans, plans_path

TRIED, TRIED_GROUPS = 6, 5  # candidates measured for each shape, and head groups
FINALISTS = 2  # measured again, with more repeats
REPEATS, FINAL_REPEATS = 3, 7
STATIC_SLABS, STATIC_GROUPS = (1,) * DEFAULT_SLABS, (1,) * DEFAULT_EXCHANGES  # where nobody plans
Say = Callable[[str], None]


@dataclass
class Tuner:
    """Measures on all ranks together; all of them decide alike, since times are those of the slowest rank.

    Args:
        profile: of the machine.
        plans: where the results go; saved after each.
        comm: of the ranks that communicate.
        kernels: by name, those that all ranks have.
        say: told the results.
    """

    profile: Profile
    plans: Plans
    comm: Communicator
    clock: Clock
    kernels: Mapping[str, Kernel]
    say: Say = lambda text: None

    def model(self, model: Model, ulysses: int, tp: int = 1) -> None:
        """All shapes of a model, as far as there is an exchange."""
        self.say(f"{'milliseconds':66}{'predicted':>11}{'measured':>11}{'serial':>11}   plan")
        if ulysses > 1:
            self._keep_groups(self.attention(model.attention(ulysses)))
        if tp > 1:
            for shape in model.tensor_parallel(tp):
                self._keep(str(shape), shape, self.shape(shape))

    def shape(self, shape: Shape) -> Choice:
        """The best candidate, or serial if that is no slower by more than a hundredth."""
        operation = Operation(shape, self.comm)
        tried = self.candidates(shape)
        ways = [self.way(operation, self.plan(shape, one.slabs), one) for one in tried]
        return self._choice(operation, tried, ways)

    def attention(self, attention: Attention) -> HeadGroups:
        """Head groups, each candidate with a layer's real attention; and the plan of their q, k and v product."""
        shape = attention.projection
        segment = Segment(shape, self.comm, attention.parts)
        found = predicted_groups(self.profile, attention, self.kernels, TUNED)
        tried = [one for i, one in enumerate(found) if i < TRIED_GROUPS or one.shares in (STATIC_GROUPS, (1,))]
        ways = [self._segment_way(segment, attention, one.shares) for one in tried]
        finalists = _fastest(self.clock.compare(ways, REPEATS, warm_up=1))
        one_group = next(index for index, one in enumerate(tried) if len(one.shares) == 1)
        last = self.clock.compare([ways[index] for index in (*finalists, one_group)], FINAL_REPEATS, warm_up=1)
        ms, best = min(zip(last[:-1], finalists, strict=True))
        chosen = replace(tried[best], measured_ms=ms, one_group_ms=last[-1])
        self._keep("  its q, k and v product and exchange", shape, self._product(shape, chosen.shares))
        return chosen

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The best by prediction, no two alike in number of slabs and in what may matter most besides: SMs that NCCL
        has for itself, or the kernel where copy engines need none. And the static default."""
        found = candidates(self.profile, shape, self.kernels)
        tried: dict[tuple[int, int | str], Candidate] = {}
        for one in found:
            besides = one.kernel if self.profile.machine.copies else one.free_sms
            tried.setdefault((len(one.slabs), besides), one)
        slabs = self.static(shape)
        static = next((one for one in found if one.slabs == slabs), None)
        best = list(tried.values())[:TRIED]
        return best if static is None or static in best else [*best, static]

    def static(self, shape: Shape) -> tuple[int, ...]:
        """The slabs of the operations where nobody plans."""
        copies = self.profile.machine.copies
        wanted = STATIC_GROUPS if shape.op == "all_to_all" else DEFAULT_PARTS if copies else STATIC_SLABS
        return wanted[: shape.most_slabs(copies)]

    def plan(self, shape: Shape, slabs: tuple[int, ...]) -> Plan | SumPlan:
        """On this rank."""
        return shape.plan(slabs, self.profile.machine.copies, self.comm.rank)

    def way(self, operation: Operation, plan: Plan | SumPlan, one: Candidate) -> Work:
        """The operation by a candidate."""
        return partial(operation.overlapped, plan, self.kernels.get(one.kernel), self._sms(one.free_sms))

    def _product(self, shape: Shape, shares: tuple[int, ...]) -> Choice:
        """Kernel and free SMs with which the q, k and v product of these head groups is fastest."""
        operation, plan = Operation(shape, self.comm), self.plan(shape, shares)
        assert isinstance(plan, Plan), "of an all-to-all"
        tried = products(self.profile, plan, shape.k, self.kernels, TRIED)
        tried = [replace(one, slabs=shares) for one in tried]
        choice = self._choice(operation, tried, [self.way(operation, plan, one) for one in tried])
        return replace(choice, slabs=shares) if choice.overlap else choice

    def _choice(self, operation: Operation, tried: Sequence[Candidate], ways: Sequence[Work]) -> Choice:
        """Measure all in turn, then the fastest ones and serial in turn."""
        shape = operation.shape
        finalists = _fastest(self.clock.compare(ways, REPEATS, warm_up=1))
        last = [operation.serial, *(ways[index] for index in finalists)]
        serial, *taken = self.clock.compare(last, FINAL_REPEATS, warm_up=1)
        ms, index = min(zip(taken, finalists, strict=True))
        expected = serial_ms(self.profile, shape.op, shape.m, shape.n, shape.k)
        if ms > serial * (1 - LEAST_GAIN):
            return Choice(shape.op, False, (1,), None, 0, expected, expected, serial, serial, TUNED)
        best = tried[index]
        kernel = None if best.kernel == CUBLAS else best.kernel
        return Choice(shape.op, True, best.slabs, kernel, best.free_sms, best.predicted_ms, expected, ms, serial, TUNED)

    def _segment_way(self, segment: Segment, attention: Attention, shares: tuple[int, ...]) -> Work:
        layout: UlyssesLayout = attention.projection.layout(shares, self.comm.rank)
        (best,) = products(self.profile, layout.projection_plan, attention.width, self.kernels, 1)
        calls = attention_calls(self.profile, layout)
        return partial(segment.run, layout, calls, self.kernels.get(best.kernel), self._sms(best.free_sms))

    def _sms(self, free: int) -> int:
        return self.profile.machine.compute_sms - free

    def _keep(self, title: str, shape: Shape, choice: Choice) -> None:
        self.plans.add(shape, choice)
        self._save()
        self.say(_row(title, choice.predicted_ms, choice.measured_ms, choice.measured_serial_ms, choice.plan))

    def _keep_groups(self, found: HeadGroups) -> None:
        self.plans.add_groups(found)
        self._save()
        plan = f"head groups {shares_text(found.shares)}"
        self.say(_row(str(found.attention), found.predicted_ms, found.measured_ms, found.one_group_ms, plan))

    def _save(self) -> None:
        if self.clock.rank == 0:
            self.plans.save(plans_path(self.plans.machine))


def _fastest(times: Sequence[float]) -> list[int]:
    """Indices of the shortest times."""
    return sorted(range(len(times)), key=lambda index: times[index])[:FINALISTS]


def _row(title: str, *rest: float | str | None) -> str:
    *times, plan = rest
    return f"{title:66}" + "".join(f"{ms:11.3f}" for ms in times) + f"   {plan}"
