"""The simulator of two queues."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fodit.tune.simulate import COMMUNICATION, COMPUTE, Task, simulate


def test_one_queue_after_the_other():
    tasks = [Task(COMPUTE, "product", 2.0), Task(COMMUNICATION, "all_reduce", 3.0, (0,))]
    assert simulate(tasks) == [(0.0, 2.0), (2.0, 5.0)]


def test_slabs_overlap():
    """Product 0-2-4-6; collectives of 1: each behind its slab."""
    tasks = [Task(COMPUTE, "product", 2.0) for _ in range(3)]
    tasks += [Task(COMMUNICATION, "all_reduce", 1.0, (slab,)) for slab in range(3)]
    assert simulate(tasks)[3:] == [(2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]


def test_both_slow_each_other():
    """From 2 on the collective (3 alone) runs at a third beside the product (2 alone), which runs at a half: the
    product ends at 6, when 4/3 of the collective are done; the rest is alone."""
    tasks = [
        Task(COMPUTE, "product", 2.0),
        Task(COMPUTE, "product", 2.0, slowed={"all_reduce": 2.0}),
        Task(COMMUNICATION, "all_reduce", 3.0, (0,), {"product": 3.0}),
    ]
    (_, first), (start, end), (_, done) = simulate(tasks)
    assert (first, start, end) == (2.0, 2.0, 6.0) and done == pytest.approx(6.0 + 3.0 - 4.0 / 3.0)


def test_order_of_a_queue_is_kept():
    """The second collective is ready first, but its turn comes after the first one's."""
    tasks = [
        Task(COMPUTE, "a", 1.0),
        Task(COMPUTE, "b", 4.0),
        Task(COMMUNICATION, "x", 1.0, (1,)),
        Task(COMMUNICATION, "y", 1.0, (0,)),
        Task(COMPUTE, "c", 1.0, (3,)),
    ]
    assert simulate(tasks)[2:] == [(5.0, 6.0), (6.0, 7.0), (7.0, 8.0)]


def test_held_tasks_start_between_others():
    """x is ready at 1, during the first "hold" task, and starts at its end before the next one; y ends beside that."""
    hold = frozenset({"hold"})
    tasks = [
        Task(COMPUTE, "a", 1.0),
        Task(COMPUTE, "hold", 4.0),
        Task(COMPUTE, "hold", 4.0),
        Task(COMMUNICATION, "w", 2.0, (), {}, hold),
        Task(COMMUNICATION, "x", 1.0, (0,), {}, hold),
        Task(COMMUNICATION, "y", 1.0, (0,)),
        Task(COMMUNICATION, "z", 1.0, (0,), {}, hold),
    ]
    assert simulate(tasks)[3:] == [(0.0, 2.0), (5.0, 6.0), (6.0, 7.0), (9.0, 10.0)]


def test_circles_are_refused():
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([Task(COMPUTE, "a", 1.0, (1,)), Task(COMMUNICATION, "x", 1.0, (0,))])


@st.composite
def schedules(draw):
    """Tasks in any order, each after some of those before it."""
    tasks = []
    for index in range(draw(st.integers(1, 12))):
        before = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else ()
        ms, slowed = draw(st.floats(0.0, 10.0)), draw(st.floats(1.0, 4.0))
        queue = draw(st.sampled_from((COMPUTE, COMMUNICATION)))
        tasks.append(Task(queue, "ab"[queue], ms, tuple(before), {"ba"[queue]: slowed}))
    return tasks


@given(schedules(), st.floats(1.0, 3.0))
def test_simulator_invariants(tasks, factor):
    times = simulate(tasks)
    end = max(stop for _, stop in times)
    for queue in (COMPUTE, COMMUNICATION):
        mine = [(time, task) for time, task in zip(times, tasks, strict=True) if task.queue == queue]
        assert end >= sum(task.ms for _, task in mine) - 1e-6, "never faster than either queue alone"
        assert all(a[0][1] <= b[0][0] + 1e-9 for a, b in zip(mine, mine[1:], strict=False)), "one at a time, in order"
    for (start, stop), task in zip(times, tasks, strict=True):
        assert stop - start >= task.ms - 1e-6
        assert all(times[before][1] <= start for before in task.after)
    alone = [replace(task, slowed={}) for task in tasks]
    unslowed = max(stop for _, stop in simulate(alone))
    assert unslowed <= sum(task.ms for task in tasks) + 1e-6, "at worst one after the other"
    longer = [replace(task, ms=task.ms * factor) for task in alone]
    assert max(stop for _, stop in simulate(longer)) == pytest.approx(unslowed * factor)
