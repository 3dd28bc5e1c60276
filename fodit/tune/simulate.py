"""Two queues that run at the same time: when does each task end?

One queue is the compute stream, the other the communication stream. Tasks of a queue run one after the other, in the
order given; a task starts when the task ahead of it in its queue and all tasks it comes `after` have ended. While both
queues are at work each slows the other: a task that takes t alone takes `t * slowed[kind]` beside one of that kind.
Beside a kind in `held` it does not even start: kernels that hold all SMs to their end let a collective in between them.

    compute   [ product, slab 0 ][ product, slab 1 ]      [ attention 0 ] ...
    comm                         [ all-to-all 0 ][ all-to-all 1 ]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COMPUTE, COMMUNICATION = 0, 1


@dataclass(frozen=True)
class Task:
    """One entry of a queue.

    Args:
        queue: COMPUTE or COMMUNICATION.
        kind: what it is, for tasks of the other queue: "product", "attention" or a collective's name.
        ms: its time with the other queue idle.
        after: indices of tasks that must have ended before it starts.
        slowed: how many times longer it takes beside a task of that kind; 1 where nothing is given.
        held: kinds of tasks beside which it cannot start.
        lag_ms: between its end for its queue, where the next one starts, and its end for those that come after it.
    """

    queue: int
    kind: str
    ms: float
    after: tuple[int, ...] = ()
    slowed: Mapping[str, float] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    lag_ms: float = 0.0


def simulate(tasks: Sequence[Task]) -> list[tuple[float, float]]:
    """Start and end of every task, milliseconds; its lag is over at the end.

    Raises:
        ValueError: tasks wait for each other in a circle.
    """
    queues = [[i for i, task in enumerate(tasks) if task.queue == queue] for queue in (COMPUTE, COMMUNICATION)]
    heads = [0, 0]  # position in each queue
    left = [task.ms for task in tasks]  # alone-milliseconds still to do
    start = [0.0] * len(tasks)
    end: list[float | None] = [None] * len(tasks)
    now = 0.0
    running: list[int | None] = [None, None]
    while True:
        waits: list[float] = []  # when the last of what a queue's next task comes after ends
        for queue in (COMMUNICATION, COMPUTE):  # whose priority is higher goes first
            if running[queue] is None and heads[queue] < len(queues[queue]):
                head, other = queues[queue][heads[queue]], running[1 - queue]
                let_in = other is None or tasks[other].kind not in tasks[head].held
                before = [end[one] for one in tasks[head].after]
                known = [one for one in before if one is not None]
                if not let_in or len(known) < len(before):
                    continue
                if max(known, default=0.0) <= now:
                    running[queue], start[head] = head, now
                else:
                    waits.append(max(known))
        active = [task for task in running if task is not None]
        if not active and not waits:
            break
        pace = {}  # alone-milliseconds a millisecond
        for task, other in ((running[0], running[1]), (running[1], running[0])):
            if task is not None:
                pace[task] = 1.0 if other is None else 1.0 / tasks[task].slowed.get(tasks[other].kind, 1.0)
        first = min(active, key=lambda task: left[task] / pace[task], default=None)
        until = now + left[first] / pace[first] if first is not None else min(waits)
        step, now = min([until, *waits]) - now, min([until, *waits])
        for task in active:
            left[task] -= step * pace[task]
        if first is not None and until <= min(waits, default=until):
            queue = tasks[first].queue
            left[first], end[first], running[queue] = 0.0, now + tasks[first].lag_ms, None
            heads[queue] += 1
    if None in end:
        raise ValueError(f"tasks {[i for i, one in enumerate(end) if one is None]} wait for each other in a circle")
    return [(begin, stop) for begin, stop in zip(start, end, strict=True) if stop is not None]
