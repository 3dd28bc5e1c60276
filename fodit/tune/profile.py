"""What is known of a machine: how long its products and collectives take, alone and side by side. Milliseconds, bytes.

The size of a collective is that of its whole input buffer; of an all-gather, of its output.
"""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from math import ceil, log
from pathlib import Path

from fodit.tune import codec

VERSION = 1
OPERATIONS = ("all_reduce", "reduce_scatter", "all_to_all")  # collectives that follow a product
COLLECTIVES = (*OPERATIONS, "all_gather")
CUBLAS = "cublas"  # among the kernels of a profile
COPY_ENGINES = "copy engines"  # in a machine's link
HELD_MS = 0.2  # a small collective that takes that much longer beside something has waited for its end


@dataclass(frozen=True)
class Machine:
    """What a profile is valid for.

    Args:
        gpus: name of every rank's GPU, in the order of ranks.
        ranks: ranks that communicate with each other; the others do the same at the same time.
        link: how they reach each other, with the environment variables that change it.
        nccl, driver: versions.
        sms, compute_sms: multiprocessors of the smallest GPU, and those that products may take.
    """

    gpus: tuple[str, ...]
    ranks: int
    link: str
    nccl: str
    driver: str
    sms: int
    compute_sms: int

    @property
    def key(self) -> str:
        """A file name that differs where machines differ."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()
        name = re.sub(r"[^a-z0-9]+", "-", self.gpus[0].lower()).strip("-")
        return f"{len(self.gpus)}x-{name}-{self.ranks}-{digest}"

    @property
    def peer(self) -> bool:
        return self.link.startswith("peer")

    @property
    def copies(self) -> bool:
        """Whether copy engines do the exchanges; else NCCL does."""
        return COPY_ENGINES in self.link

    def __str__(self) -> str:
        names = ", ".join(f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus))
        some = "" if self.compute_sms == self.sms else f", {self.compute_sms} SMs"
        return f"{names}{some}, {self.link}, NCCL {self.nccl}, driver {self.driver}"


@dataclass(frozen=True)
class Curve:
    """Time over size, linear between measured points; the last one's bandwidth beyond them."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, measured: Iterable[tuple[float, float]]) -> "Curve":
        """From measured (bytes, ms). More bytes never take less time: where they seemed to, the smaller size was
        disturbed, for disturbances only add."""
        points: list[tuple[float, float]] = []
        for size, ms in sorted(measured, reverse=True):
            points.append((size, min(ms, points[-1][1]) if points else ms))
        return cls(tuple(reversed(points)))

    def __call__(self, size: float) -> float:
        last, ms = self.points[-1]
        return interpolate(self.points, size) if size <= last else ms * size / last

    def scaled(self, factors: "Curve") -> "Curve":
        """Times the factor of each size."""
        return Curve.of((size, ms * factors.between(size)) for size, ms in self.points)

    def stretched(self, factor: float) -> "Curve":
        """The same times at sizes so many times larger."""
        return Curve(tuple((size * factor, ms) for size, ms in self.points))

    def between(self, size: float) -> float:
        """Interpolated over the size's logarithm, and constant beyond the points: for factors."""
        return interpolate([(log(at), factor) for at, factor in self.points], log(size))


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points, whose first numbers rise, and constant beyond them."""
    index = bisect_left(points, (x,))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (low, one), (high, other) = points[index - 1], points[index]
    return one + (other - one) * (x - low) / (high - low)


@dataclass(frozen=True)
class Beside:
    """A collective beside a product or an attention: its own time, and how many times longer the other takes."""

    curve: Curve
    slowed: float


@dataclass(frozen=True)
class Product:
    """A kernel: `launch_ms + (tile_ms + k_ms * K) * waves`.

    Args:
        tile_m, tile_n: what a block computes at a time.
        cluster: blocks that are started together; the number of SMs is rounded down to it.
        launch_ms: beyond the tiles; below 0 where the first tile is cheaper than the others.
    """

    tile_m: int
    tile_n: int
    cluster: int
    launch_ms: float
    tile_ms: float
    k_ms: float

    def tile(self, k: int) -> float:
        """Milliseconds of one tile, all SMs at work."""
        return self.tile_ms + self.k_ms * k

    def tiles(self, rows: int, cols: int) -> int:
        return ceil(rows / self.tile_m) * ceil(cols / self.tile_n)


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine.

    Args:
        machine: where they are from.
        taken: date, and how.
        alone: collective → time over size.
        beside: collective → what runs beside it → times. That is "attention", "cublas" for its products, or for those
            of fodit's kernels the number of SMs that they leave free.
        kernels: name → its times; "cublas" is among them.
        pace: SMs left free → a tile's time relative to none left free. Below 1: fewer SMs at work run at higher clocks.
        attention_ms: head dimension → time of 1e9 query-key pairs of one head.
        copy_gbs: bytes read and written by a copy in device memory, GB/s.
        wait_ms: what waiting for a slab adds to a collective.
        host_ms: time in which the host enqueues one collective.
        max_ctas: NCCL's limit of thread blocks; None is its own choice, with clusters of one block.
    """

    machine: Machine
    taken: str
    alone: dict[str, Curve]
    beside: dict[str, dict[str, Beside]]
    kernels: dict[str, Product]
    pace: dict[int, float]
    attention_ms: dict[int, float]
    copy_gbs: float
    wait_ms: float
    host_ms: float
    max_ctas: int | None = None

    def __post_init__(self) -> None:
        for name, wanted in (("alone", self.alone), ("beside", self.beside)):
            if missing := set(OPERATIONS) - set(wanted):
                raise ValueError(f"{name}.{min(missing)} is missing")
        if CUBLAS not in self.kernels:
            raise ValueError(f"kernels.{CUBLAS} is missing")
        if 0 not in self.pace:
            raise ValueError("pace.0 is missing")
        curves = [*self.alone.values(), *(one.curve for both in self.beside.values() for one in both.values())]
        for curve in curves:
            sizes = [size for size, _ in curve.points]
            if not sizes or sizes != sorted(set(sizes)) or min(min(point) for point in curve.points) <= 0:
                raise ValueError("a curve must be (bytes, ms) points above 0 in the order of sizes")
        slowed = [one.slowed for both in self.beside.values() for one in both.values()]
        if min([self.copy_gbs, *self.pace.values(), *self.attention_ms.values(), *slowed]) <= 0:
            raise ValueError("times, factors and bandwidths must be above 0")

    def slower(self, op: str, name: str, size: float) -> float:
        """How many times longer a collective takes beside what was measured as `name`."""
        return max(self.beside[op][name].curve(size) / self.alone[op](size), 1.0)

    def free_sms(self, op: str) -> list[int]:
        """Numbers of SMs a product may leave free, beside which the collective was measured."""
        return sorted(int(name) for name in self.beside[op] if name.isdigit())

    def holds(self, op: str, name: str) -> bool:
        """Whether a collective cannot start while what was measured as `name` runs.

        So it is with kernels that give no SM back before their end: cuBLAS' and cuDNN's persistent ones on Hopper.
        """
        beside = self.beside[op].get(name)
        if beside is None:
            return False
        size, taken = beside.curve.points[0]
        return taken - self.alone[op](size) > HELD_MS

    def pace_at(self, free: int) -> float:
        """A tile's time relative to none left free."""
        return interpolate(sorted(self.pace.items()), free)

    def rescaled(self, link: Mapping[str, Curve], product: float, machine: Machine, taken: str) -> "Profile":
        """For another machine: collectives take `link[op]` times as long (by size), products `product` times."""
        default = next(iter(link.values()))
        alone = {op: curve.scaled(link.get(op, default)) for op, curve in self.alone.items()}
        beside = {
            op: {name: self._beside_scaled(op, name, alone[op], link.get(op, default)) for name in both}
            for op, both in self.beside.items()
        }
        kernels = {
            name: replace(one, tile_ms=one.tile_ms * product, k_ms=one.k_ms * product)
            for name, one in self.kernels.items()
        }
        fewer_sms = self.machine.compute_sms / machine.compute_sms  # products count theirs, see `predict`
        attention = {dim: ms * product * fewer_sms for dim, ms in self.attention_ms.items()}
        return replace(
            self,
            machine=machine,
            taken=taken,
            alone=alone,
            beside=beside,
            kernels=kernels,
            attention_ms=attention,
        )

    def with_ranks(self, ranks: int) -> "Profile":
        """As far as is known without measuring: of such GPUs, each with a link of its own, more or fewer share a group.

        Of a collective's bytes a rank sends (ranks - 1) / ranks, twice with an all-reduce; so it takes a collective of
        other size as long. How many others that goes to is left out.
        """
        if ranks == self.machine.ranks or ranks == 1:
            return replace(self, machine=replace(self.machine, ranks=ranks))
        before = self.machine.ranks
        larger = (before - 1) / before * ranks / (ranks - 1)
        beside = {
            op: {name: replace(one, curve=one.curve.stretched(larger)) for name, one in both.items()}
            for op, both in self.beside.items()
        }
        alone = {op: curve.stretched(larger) for op, curve in self.alone.items()}
        return replace(self, machine=replace(self.machine, ranks=ranks), alone=alone, beside=beside)

    def _beside_scaled(self, op: str, name: str, alone: Curve, factors: Curve) -> Beside:
        """On a link of other speed. What a collective waits for a kernel's end has nothing to do with the link."""
        one = self.beside[op][name]
        if not self.holds(op, name):
            return replace(one, curve=one.curve.scaled(factors))
        waits = [(size, ms - self.alone[op](size)) for size, ms in one.curve.points]
        return replace(one, curve=Curve.of((size, alone(size) + wait) for size, wait in waits))

    def without_holds(self) -> "Profile":
        """For GPUs whose kernels give SMs back block by block: beside them collectives are as fast as alone."""
        beside = {
            op: {
                name: replace(one, curve=self.alone[op]) if self.holds(op, name) and not name.isdigit() else one
                for name, one in both.items()
            }
            for op, both in self.beside.items()
        }
        return replace(self, beside=beside)

    def save(self, path: Path) -> None:
        codec.write(path, VERSION, {"profile": codec.encode(self)})

    @classmethod
    def load(cls, path: Path, machine: Machine | None = None) -> "Profile":
        """From a file, of this machine if one is given.

        Raises:
            codec.FileError: the file is broken, of another version or of another machine.
        """
        found = codec.load(cls, path, VERSION, "profile", "is not a profile")
        if machine is not None:
            check_machine(path, found.machine, machine)
        return found


def check_machine(path: Path, found: Machine, wanted: Machine) -> None:
    """Raise codec.FileError if what a file holds is of another machine."""
    if found != wanted:
        raise codec.FileError(f"{path} is of another machine: {differences(found, wanted)}")


def differences(found: Machine, wanted: Machine) -> str:
    """What differs between two machines, as text."""
    one, other = asdict(found), asdict(wanted)
    return ", ".join(f"{name} is {one[name]}, here {other[name]}" for name in one if one[name] != other[name])


def shipped() -> dict[str, Profile]:
    """The profiles that come with fodit, by name. Real recordings, see their `taken`."""
    folder = resources.files(__package__) / "profiles"
    files = sorted((one for one in folder.iterdir() if one.name.endswith(".json")), key=lambda one: one.name)
    return {one.name.removesuffix(".json"): Profile.load(Path(str(one))) for one in files}


def nearest(machine: Machine, profiles: Mapping[str, Profile]) -> str:
    """Name of the profile that is most like the machine: by its link, its way of sharing SMs, their number."""

    def distance(name: str) -> tuple[bool, bool, bool, float, int]:
        other = profiles[name].machine
        shares = (one.compute_sms == one.sms for one in (machine, other))
        ratio = abs(log(other.compute_sms / machine.compute_sms))
        links = other.copies != machine.copies, other.peer != machine.peer
        return (*links, len(set(shares)) > 1, ratio, abs(other.ranks - machine.ranks))

    return min(profiles, key=distance)
