"""Profiles and tuned plans in the user's cache folder, one pair of files for each machine."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from fodit.tune import codec
from fodit.tune.choice import Choice, shares_text
from fodit.tune.profile import Machine, Profile, check_machine
from fodit.tune.search import Shape

VERSION = 1
HALVES = {"float16", "bfloat16"}  # products and exchanges take the same time
NEAR = 0.01  # rows may differ that much: ranks hold uneven parts of a sequence


def alike(dtype: str, other: str) -> bool:
    """Whether what was tuned in one type holds for the other."""
    return dtype == other or {dtype, other} <= HALVES


def folder() -> Path:
    """`FODIT_CACHE`, else fodit under `XDG_CACHE_HOME` or `~/.cache`."""
    if given := os.environ.get("FODIT_CACHE"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fodit"


@dataclass(frozen=True)
class Attention:
    """A model's self-attention under Ulysses.

    Args:
        tokens: of the whole sequence.
        batch: items that are attended together.
        parts: how many such batches follow each other, the exchange of one beside the computation of another.
        heads, head_dim: of the model.
        ranks: that share the sequence.
    """

    tokens: int
    batch: int
    parts: int
    heads: int
    head_dim: int
    ranks: int
    dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def projection(self) -> Shape:
        """The q, k and v product of the rank with most tokens."""
        rows = self.batch * -(-self.tokens // self.ranks)
        return Shape(
            "all_to_all", rows, 3 * self.width, self.width, self.ranks, self.dtype, 3, self.head_dim, self.batch
        )

    def __str__(self) -> str:
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        size = f"{self.tokens} tokens, batch {self.batch * self.parts}{parts}, {self.heads} heads of {self.head_dim}"
        return f"attention, {size} on {self.ranks} ranks, {self.dtype}"


@dataclass(frozen=True)
class HeadGroups:
    """Relative sizes of the head groups, and milliseconds of a layer's attention: with them, and with one group."""

    attention: Attention
    shares: tuple[int, ...]
    predicted_ms: float
    measured_ms: float | None
    one_group_ms: float
    source: str

    def describe(self) -> str:
        """One line: the groups, the times of a layer's attention and where they are from."""
        measured = "" if self.measured_ms is None else f", measured {self.measured_ms:.3f} ms"
        times = f"predicted {self.predicted_ms:.3f} ms{measured}, with one group {self.one_group_ms:.3f} ms"
        return f"head groups {shares_text(self.shares)}; {times} ({self.source})"


@dataclass(frozen=True)
class Tuned:
    """A shape and the plan that was measured best."""

    shape: Shape
    choice: Choice


@dataclass
class Plans:
    """What was tuned on a machine."""

    machine: Machine
    tuned: list[Tuned] = field(default_factory=list)
    groups: list[HeadGroups] = field(default_factory=list)

    def find(self, shape: Shape) -> Choice | None:
        """For this shape, or one whose number of rows is nearly the same."""

        def fits(one: Shape) -> bool:
            same = (one.op, one.n, one.k, one.ranks, one.head_dim, one.projections)
            wanted = (shape.op, shape.n, shape.k, shape.ranks, shape.head_dim, shape.projections)
            return same == wanted and alike(one.dtype, shape.dtype)

        near = [one for one in self.tuned if fits(one.shape) and abs(one.shape.m - shape.m) <= NEAR * shape.m]
        return min(near, key=lambda one: abs(one.shape.m - shape.m)).choice if near else None

    def find_groups(self, attention: Attention) -> HeadGroups | None:
        def fits(one: Attention) -> bool:
            return alike(one.dtype, attention.dtype) and replace(one, dtype=attention.dtype) == attention

        return next((one for one in self.groups if fits(one.attention)), None)

    def add(self, shape: Shape, choice: Choice) -> None:
        self.tuned = [one for one in self.tuned if one.shape != shape] + [Tuned(shape, choice)]

    def add_groups(self, found: HeadGroups) -> None:
        self.groups = [one for one in self.groups if one.attention != found.attention] + [found]

    def save(self, path: Path) -> None:
        codec.write(path, VERSION, {"plans": codec.encode(self)})

    @classmethod
    def load(cls, path: Path, machine: Machine) -> "Plans":
        """Of this machine.

        Raises:
            codec.FileError: the file is broken, of another version or of another machine.
        """
        found = codec.load(cls, path, VERSION, "plans", "holds no plans")
        check_machine(path, found.machine, machine)
        return found


def profile_path(machine: Machine) -> Path:
    return folder() / f"{machine.key}.profile.json"


def plans_path(machine: Machine) -> Path:
    return folder() / f"{machine.key}.plans.json"


def stored_profile(machine: Machine) -> Profile | None:
    """Of this machine, or None if none was measured.

    Raises:
        codec.FileError: there is a file, but it is broken or of another machine.
    """
    path = profile_path(machine)
    return Profile.load(path, machine) if path.exists() else None


def stored_plans(machine: Machine) -> Plans:
    """Of this machine; empty if none were tuned. Raises as `stored_profile`."""
    path = plans_path(machine)
    return Plans.load(path, machine) if path.exists() else Plans(machine)
