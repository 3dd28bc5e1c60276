"""Times work on all ranks together."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fodit.agreement import everyone

CYCLES_A_MS = 2_000_000
LEAD_MS = 3.0  # in which the host runs ahead, so that launches are not what is timed
Work = Callable[[], Any]


class Clock:
    """Milliseconds of work on the current stream; of the slowest rank, so all ranks get the same number.

    Args:
        device: of this rank.
        control: a gloo group of all ranks, or None for a single process.
    """

    def __init__(self, device: torch.device, control: dist.ProcessGroup | None) -> None:
        self.device, self.control = device, control
        self.began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this clock was made."""
        return time.monotonic() - self.began

    @property
    def rank(self) -> int:
        return dist.get_rank(self.control) if self.control is not None else 0

    def start(self, lead_ms: float = LEAD_MS) -> torch.cuda.Event:
        """All ranks start together; an event at the start."""
        torch.cuda.synchronize(self.device)
        if self.control is not None:
            dist.barrier(self.control)
        torch.cuda._sleep(int(lead_ms * CYCLES_A_MS))
        return self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, work: Work, repeats: int = 7, warm_up: int = 2, lead_ms: float = LEAD_MS) -> float:
        """Median of `work`."""
        return self.compare([work], repeats, warm_up, lead_ms)[0]

    def compare(
        self, works: Sequence[Work], repeats: int = 7, warm_up: int = 2, lead_ms: float = LEAD_MS
    ) -> list[float]:
        """Median of each, all in turn in every round: clocks and link change within seconds, for all alike."""
        return self.slowest(self.own(works, repeats, warm_up, lead_ms))

    def own(self, works: Sequence[Work], repeats: int = 7, warm_up: int = 2, lead_ms: float = LEAD_MS) -> list[float]:
        """`compare` for this rank alone, though all start together."""
        taken: list[list[float]] = [[] for _ in works]
        for index in range(repeats + warm_up):
            for work, times in zip(works, taken, strict=True):
                begin = self.start(lead_ms)
                work()
                end = self.mark()
                torch.cuda.synchronize(self.device)
                if index >= warm_up:
                    times.append(begin.elapsed_time(end))
        return [median(times) for times in taken]

    def slowest(self, times: Sequence[float]) -> list[float]:
        """Of each time the longest on any rank."""
        return [max(one) for one in zip(*everyone(self.control, list(times)), strict=True)]
