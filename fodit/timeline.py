"""What one rank did and when: step borders, communication, and the time its compute stream waited for it.

On a GPU the marks are CUDA events, read once at the end; on a CPU they are readings of the clock. A mark costs about
a microsecond and never synchronises, so that measuring does not disturb what is measured.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fodit.report import StepTime

COMMUNICATION = "communication"  # a collective is running
EXPOSED = "exposed"  # the compute stream has nothing to do but wait for one


@dataclass
class _Open:
    begin: Any
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    end: Any = None


class Timeline:
    """Collects spans step by step. A disabled timeline takes no marks.

    Args:
        device: of the work that is timed.
        enabled: take marks at all.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.device = device
        self.enabled = enabled
        self._steps: list[_Open] = []

    def mark(self, stream: torch.cuda.Stream | None = None) -> Any:
        """Now, on a stream; without one on the current stream of the device."""
        if not self.enabled:
            return None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            # A thread's current device may be another one.
            event.record(stream or torch.cuda.current_stream(self.device.index))
            return event
        return time.perf_counter()

    def add(self, kind: str, begin: Any, end: Any) -> None:
        """Book a span to the current step; spans outside steps are dropped.

        A mark may be a list that will hold one, for what ends on another thread.
        """
        if self.enabled and self._steps and self._steps[-1].end is None:
            self._steps[-1].spans.append((kind, begin, end))

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        begin = self.mark()
        yield
        self.add(kind, begin, self.mark())

    def clear(self) -> None:
        """Forget all steps."""
        self._steps = []

    def begin_step(self) -> None:
        """Close the current step, if any, and open the next one."""
        mark = self.mark()
        self.end_step(mark)
        self._steps.append(_Open(mark))

    def end_step(self, mark: Any = None) -> None:
        if self._steps and self._steps[-1].end is None:
            self._steps[-1].end = self.mark() if mark is None else mark

    def steps(self) -> list[StepTime]:
        """The finished steps; what is under way twice counts once. Waits for the device."""
        if not self.enabled:
            return []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        result = []
        for step in self._steps:
            if step.end is None:
                continue
            wall = _seconds(step.begin, step.end)
            spans: dict[str, list[tuple[float, float]]] = {COMMUNICATION: [], EXPOSED: []}
            for kind, begin, end in step.spans:
                spans[kind].append((_seconds(step.begin, begin), _seconds(step.begin, end)))
            result.append(
                StepTime(
                    wall_s=wall,
                    communication_s=_covered(spans[COMMUNICATION], wall),
                    exposed_s=_covered(spans[EXPOSED], wall),
                )
            )
        return result


def _covered(spans: list[tuple[float, float]], wall: float) -> float:
    """Seconds from 0 to `wall` that lie in at least one of the spans."""
    total = done = 0.0
    for begin, end in sorted(spans):
        begin, end = max(begin, done), min(end, wall)
        if end > begin:
            total += end - begin
            done = end
    return total


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(end, list):
        end = end[0]
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
