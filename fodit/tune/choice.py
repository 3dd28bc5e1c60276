"""How one operation is run: what the planner decides, and what it expects of it."""

from dataclasses import dataclass

TUNED = "tuned"  # the source of a choice that was measured


@dataclass(frozen=True)
class Choice:
    """The way to run an operation.

    Args:
        op: the collective.
        overlap: False runs the product by cuBLAS, then one collective.
        slabs: relative sizes; (1,) without overlap.
        kernel: name of the kernel; None leaves it to the executor.
        free_sms: SMs that the product leaves to the collectives.
        predicted_ms, serial_ms: predicted with this plan, and without overlap.
        measured_ms, measured_serial_ms: the same measured, where the plan was tuned.
        source: "tuned", or from which profile it was predicted.
    """

    op: str
    overlap: bool
    slabs: tuple[int, ...]
    kernel: str | None
    free_sms: int
    predicted_ms: float
    serial_ms: float
    measured_ms: float | None
    measured_serial_ms: float | None
    source: str

    @property
    def gain(self) -> float:
        """Serial over this plan, measured if both were."""
        if self.measured_ms is not None and self.measured_serial_ms is not None:
            return self.measured_serial_ms / self.measured_ms
        return self.serial_ms / self.predicted_ms

    @property
    def without_ms(self) -> float:
        """Without overlap, measured if it was."""
        return self.serial_ms if self.measured_serial_ms is None else self.measured_serial_ms

    @property
    def plan(self) -> str:
        """The plan alone, as text."""
        if not self.overlap:
            return "serial"
        kernel = "" if self.kernel is None else f", {self.kernel}"
        return f"slabs {shares_text(self.slabs)}{kernel}, {self.free_sms} SMs free"

    def describe(self) -> str:
        """One line: the plan, the times and where they are from.

        >>> choice.describe()
        'slabs 1-2-4-4-4-2-1, hopper_128x256x64_s4_c2, 8 SMs free; predicted 12.101 ms, measured 11.973 ms,
        serial 14.524 ms (tuned)'
        """
        measured = "" if self.measured_ms is None else f", measured {self.measured_ms:.3f} ms"
        times = f"predicted {self.predicted_ms:.3f} ms{measured}, serial {self.without_ms:.3f} ms"
        return f"{self.plan}; {times} ({self.source})"


def shares_text(shares: tuple[int, ...]) -> str:
    """Relative sizes as text: 8 for eight even ones, 1-2-4 for uneven ones."""
    return str(len(shares)) if len(set(shares)) == 1 else "-".join(str(share) for share in shares)
