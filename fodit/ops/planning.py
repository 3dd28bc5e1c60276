"""What operations ask of a planner. `fodit.tune` has one."""

from typing import Protocol

import torch

from fodit.plan import Plan, UlyssesLayout


class Choice(Protocol):
    """How an operation is run. `fodit.tune.choice.Choice` documents the attributes."""

    @property
    def overlap(self) -> bool: ...

    @property
    def slabs(self) -> tuple[int, ...]: ...

    @property
    def kernel(self) -> str | None: ...

    @property
    def free_sms(self) -> int: ...


class Planner(Protocol):
    """Says how operations are run on this machine; the same on all ranks. `fodit.tune.planner.Planner` is one.

    Attributes:
        asked: a line for each answer it gave: the plan, its times and why it was chosen.
        notes: what a user should know, such as a stored file that could not be used.
    """

    asked: list[str]
    notes: tuple[str, ...]

    def choice(self, op: str, m: int, n: int, k: int, dtype: torch.dtype) -> Choice:
        """For a product [m, k] x [k, n] with a reducing collective."""

    def product(self, plan: Plan, k: int, dtype: torch.dtype) -> Choice:
        """Kernel and free SMs for a plan that is given."""

    def head_groups(
        self, tokens: int, batch: int, heads: int, head_dim: int, parts: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Relative sizes of the groups in which an attention's heads are exchanged."""

    def attention_calls(self, layout: UlyssesLayout) -> tuple[tuple[int, ...], ...]:
        """For each head group the heads of each call of attention."""
