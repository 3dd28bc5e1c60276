"""The simulator, the predictor, the search and the store, without a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_executor import KERNELS

from fodit.parallel import initialise
from fodit.plan import UlyssesLayout, all_reduce_plan, reduce_scatter_plan
from fodit.tune import codec, store
from fodit.tune.choice import Choice
from fodit.tune.explain import explain
from fodit.tune.planner import Planner, agreed_files
from fodit.tune.predict import (
    attention_calls,
    attention_ms,
    bound_ms,
    least_ms,
    overlapped_ms,
    product_ms,
    segment_ms,
    serial_ms,
    slab_ends,
    slab_tiles,
    waves,
)
from fodit.tune.probe import like, with_kernels
from fodit.tune.profile import CUBLAS, OPERATIONS, Beside, Curve, Machine, Product, Profile, nearest, shipped
from fodit.tune.search import Candidate, Shape, as_choice, candidates, choose, partitions, products, ways
from fodit.tune.shapes import model
from fodit.tune.simulate import COMMUNICATION, COMPUTE, Task, simulate
from fodit.tune.store import Attention, HeadGroups, Plans

NCCL = ("nvlink-nccl", "no-p2p-nccl", "consumer-nccl")  # recorded with NCCL doing everything
COPIES = ("nvlink", "no-p2p", "consumer")
LINKS = (*COPIES, *NCCL)
ERROR = 0.034  # mean absolute error of predictions, that of the FlashOverlap paper
REGRET = 0.01  # mean, of the measured time of the predicted best over the measured best
CPU = torch.device("cpu")


# Simulator


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


# Predictor


def tiny_profile(**changes):
    """Ten SMs; a tile takes 1 ms, a collective 1 ms a MB and 0.5 ms more."""
    line = Curve(((1e6, 1.5), (101e6, 101.5)))
    machine = Machine(("Tiny", "Tiny"), 2, "host memory", "2.0", "13000", 10, 10)
    both = {"0": Beside(line, 1.0), "2": Beside(line, 1.0), CUBLAS: Beside(line, 1.0), "attention": Beside(line, 1.0)}
    ops = ("all_reduce", "reduce_scatter", "all_to_all", "all_gather")
    kernels = {name: Product(128, 128, 1, 0.0, 1.0, 0.0) for name in (CUBLAS, "ampere_128x128x32")}
    made = Profile(
        machine, "made up", dict.fromkeys(ops, line), dict.fromkeys(ops[:3], both), kernels, {0: 1.0, 2: 1.0},
        {128: 1.0}, 1000.0, 0.0, 0.0,
    )  # fmt: skip
    return replace(made, **changes)


def test_waves():
    assert waves(10, 10) == 1.25 and waves(11, 10) == 0.5 * 2 + 0.5 * 1.6
    assert all(waves(tiles + 1, 7) >= waves(tiles, 7) for tiles in range(1, 50))


def test_slabs_are_complete_with_their_last_tile():
    """Three slabs of 1, 2 and 1 tile rows of 10 tiles on 8 SMs."""
    profile = tiny_profile()
    product = profile.kernels["ampere_128x128x32"]
    plan = all_reduce_plan(512, 1280, 2, (1, 2, 1), 128)
    assert slab_tiles(plan, product) == [10, 20, 10]
    assert slab_ends(profile, product, [10, 20, 10], 64, 2) == [waves(10, 8), waves(30, 8), waves(40, 8)]
    # Every rank's part has tiles of its own: 257 rows take three, 256 two.
    assert slab_tiles(reduce_scatter_plan(513, 128, 2, 1), product) == [5]


def test_overlapped_by_hand():
    """Two slabs of 20 tiles on 10 SMs, 2.25 and 4.25 ms; 1.3 MB each, 1.81 ms alone: the second starts at 4.25.

    Half of reading 640 x 64 weights of 2 bytes again, at 1000 GB/s, comes on top.
    """
    profile = tiny_profile()
    plan = all_reduce_plan(1024, 640, 2, 2, 128)
    size = 512 * 640 * 2
    assert overlapped_ms(profile, plan, 64, "ampere_128x128x32", 0) == pytest.approx(
        4.25 + 0.5 * 640 * 64 * 2 / 1e9 + profile.alone["all_reduce"](size)
    )
    assert serial_ms(profile, "all_reduce", 1024, 640, 64) == pytest.approx(
        4.25 + profile.alone["all_reduce"](2 * size)
    )


def holding(**changes):
    """Beside attention a small collective takes 1 ms longer: it has waited."""
    profile = tiny_profile(**changes)
    beside = profile.beside["all_to_all"] | {"attention": Beside(Curve(((1e6, 2.5), (101e6, 102.5))), 1.0)}
    return replace(profile, beside=profile.beside | {"all_to_all": beside})


def test_attention_calls():
    """1280 tokens are ten blocks a head on ten SMs: a head takes 1.64 ms, and no call has idle SMs."""
    layout = UlyssesLayout(0, 2, 1280, 1, 20, 128, (1, 4))
    cost = 1000.0
    long = {"attention_ms": {128: cost}}
    assert attention_ms(tiny_profile(**long), 1, 1, 1280, 128) == pytest.approx(cost * 1280**2 / 1e9)
    assert not tiny_profile().holds("all_to_all", "attention") and holding().holds("all_to_all", "attention")
    assert attention_calls(tiny_profile(**long), layout) == ((2,), (8,)), "collectives need not wait"
    assert attention_calls(holding(**long), layout) == ((1, 1), (1,) * 8)
    assert attention_calls(holding(attention_ms={128: cost / 2}), layout) == ((2,), (2,) * 4)
    # 1281 tokens are eleven blocks a head: of any call the last wave is nearly empty, of eight heads together least.
    assert attention_calls(holding(**long), replace(layout, tokens=1281)) == ((2,), (8,))


def test_other_numbers_of_ranks():
    """A rank sends (ranks - 1) / ranks of what it has: half of it among two, three quarters among four."""
    known = shipped()["h200-x2-nvlink"]
    assert known.with_ranks(2) == known
    four = known.with_ranks(4)
    assert four.machine == replace(known.machine, ranks=4)
    for op in OPERATIONS:
        assert four.alone[op](3e7) == pytest.approx(known.alone[op](4.5e7))
        for name, beside in known.beside[op].items():
            assert four.beside[op][name].curve(3e7) == pytest.approx(beside.curve(4.5e7))
    assert known.with_ranks(1).alone == known.alone, "nothing is sent"
    assert four.with_ranks(2).alone["all_to_all"](1e6) == pytest.approx(known.alone["all_to_all"](1e6))


@pytest.mark.parametrize("link", NCCL)
def test_what_holds_collectives_up(link):
    """Seen on two H200: attention and cuBLAS, and kernels that leave no SM free; not in a green context of 24 SMs."""
    profile = shipped()[f"h200-x2-{link}"]
    for op, both in profile.beside.items():
        held = {name for name in both if profile.holds(op, name)}
        assert held == (set() if link == "consumer-nccl" else {"0", CUBLAS, "attention"} & set(both)), op


@pytest.mark.parametrize("link", COPIES)
def test_nothing_holds_copy_engines_up(link):
    profile = shipped()[f"h200-x2-{link}"]
    assert not any(profile.holds("all_to_all", name) for name in profile.beside["all_to_all"])
    slowed = max(one.slowed for one in profile.beside["all_to_all"].values())
    # They take no SM. But over NVLink, at some 370 GB/s each way, memory bandwidth and power.
    assert slowed < (1.06 if link == "nvlink" else 1.02)


def test_attention_has_fewer_sms_on_smaller_gpus():
    known = shipped()["h200-x2-no-p2p"]
    small = replace(known.machine, sms=66, compute_sms=66)
    found = known.rescaled({"all_to_all": Curve(((1e6, 1.0),))}, 1.0, small, "half of it")
    for dim in (64, 128):
        ratio = attention_ms(found, 1, 24, 32768, dim) / attention_ms(known, 1, 24, 32768, dim)
        assert ratio == pytest.approx(2, rel=0.02)


def test_holds_are_the_kernels_not_the_links():
    """On a link three times as fast collectives still wait for the end of an attention; not on GPUs before Hopper."""
    known = shipped()["h200-x2-no-p2p-nccl"]
    fast = known.rescaled({"all_reduce": Curve(((1e6, 1 / 3),))}, 1.0, known.machine, "faster")
    assert fast.alone["all_to_all"](1e7) == pytest.approx(known.alone["all_to_all"](1e7) / 3)
    for profile in (fast, known.rescaled({"all_reduce": Curve(((1e6, 3.0),))}, 1.0, known.machine, "slower")):
        assert profile.holds("all_to_all", "attention") and profile.holds("all_to_all", CUBLAS)
        assert not profile.holds("all_to_all", "8")
    free = known.without_holds()
    assert not free.holds("all_to_all", "attention") and not free.holds("all_reduce", CUBLAS)
    assert free.holds("all_to_all", "0"), "a kernel on all SMs stays one"


def test_several_parts_hide_behind_each_other():
    """Long enough an MLP hides the exchange of q, k and v, and a part's attention the way back of another's."""
    line = Curve(((1e6, 1e-3), (101e6, 0.1)))
    ops = ("all_reduce", "reduce_scatter", "all_to_all", "all_gather")
    fast = tiny_profile(alone=dict.fromkeys(ops, line))
    layout = UlyssesLayout(0, 2, 1280, 1, 4, 128, (1, 1))
    one, two = (segment_ms(fast, layout, 512, "ampere_128x128x32", 2, parts) for parts in (1, 2))
    mlp = product_ms(fast, 640, 2048, 512) + product_ms(fast, 640, 512, 2048)
    assert two == pytest.approx(2 * one + 2 * mlp, rel=0.02)


def test_curve():
    curve = Curve.of([(4.0, 2.0), (1.0, 1.5), (2.0, 2.5)])
    assert curve.points == ((1.0, 1.5), (2.0, 2.0), (4.0, 2.0)), "more bytes never take less time"
    assert [curve(size) for size in (0.5, 1.5, 3.0, 8.0)] == [1.5, 1.75, 2.0, 4.0]
    factors = Curve(((1.0, 3.0), (4.0, 1.0)))
    assert [factors.between(size) for size in (0.5, 1.0, 2.0, 8.0)] == [3.0, 3.0, 2.0, 1.0]
    assert curve.scaled(Curve(((1.0, 2.0), (4.0, 4.0)))).points == ((1.0, 3.0), (2.0, 6.0), (4.0, 8.0))


@given(st.floats(1.0, 4.0), st.integers(1, 10), st.sampled_from(("all_reduce", "reduce_scatter")))
def test_slower_links_take_longer(factor, slabs, op):
    profile = tiny_profile()
    slower = profile.rescaled({op: Curve(((1e6, factor),))}, 1.0, profile.machine, "slower")
    shape = Shape(op, 5000, 1280, 64, 2)
    plan = shape.plan((1,) * slabs, profile.machine.copies)
    fast, slow = (overlapped_ms(one, plan, 64, "ampere_128x128x32", 2) for one in (profile, slower))
    assert fast <= slow + 1e-9
    assert slow >= product_ms(profile, 5000, 1280, 64, "ampere_128x128x32", 2) - 1e-9
    assert bound_ms(slower, op, 5000, 1280, 64) >= bound_ms(profile, op, 5000, 1280, 64)


def recorded(link):
    """The profile, and (shape, its measurements) of each recorded shape."""
    content = json.loads((Path(__file__).parent / "data" / f"validation-{link}.json").read_text())
    fields = Shape.__dataclass_fields__
    return shipped()[f"h200-x2-{link}"], [
        (Shape(**{name: one[name] for name in fields}), one) for one in content["shapes"]
    ]


def predictions(profile, shape, found, kinds):
    """(predicted, measured) of the recorded plans of these kinds."""
    rows = [row for row in found["rows"] if row["kind"] in kinds]
    plans = [shape.plan(tuple(row["slabs"]), profile.machine.copies) for row in rows]
    predicted = [
        overlapped_ms(profile, plan, shape.k, row["kernel"], row["free_sms"])
        for plan, row in zip(plans, rows, strict=True)
    ]
    return list(zip(predicted, (row["measured_ms"] for row in rows), strict=True))


def test_predictions_against_measurements():
    """Of the plans that run: serial, the chosen one and the static default, for the shapes of five models."""
    errors = []
    for profile, shapes in map(recorded, LINKS):
        pairs = [(serial_ms(profile, one.op, one.m, one.n, one.k), found["serial"]) for one, found in shapes]
        for shape, found in shapes:
            pairs += predictions(profile, shape, found, ("chosen", "static"))
        errors += [abs(predicted / measured - 1) for predicted, measured in pairs]
    assert len(errors) == 3 * (3 * 20 + 3 * 25)
    assert sum(errors) / len(errors) <= ERROR


@pytest.mark.parametrize("link", LINKS)
def test_nothing_is_slower_than_serial(link):
    """By the measurements of what was predicted best: where that is not taken, serial is."""
    profile, shapes = recorded(link)
    for shape, found in shapes:
        serial = serial_ms(profile, shape.op, shape.m, shape.n, shape.k)
        ((predicted, measured),) = predictions(profile, shape, found, ("chosen",))
        one = as_choice(shape, Candidate(predicted, (1, 1), CUBLAS, 0), serial, "")
        assert not one.overlap or measured <= found["serial"]


@pytest.mark.parametrize("link", NCCL)
def test_predicted_best_against_measured_best(link):
    """Of some 40 plans a shape, measured in turn."""
    profile, shapes = recorded(link)
    tried = [predictions(profile, shape, found, ("exhaustive",)) for shape, found in shapes]
    regrets = [min(one)[1] / min(measured for _, measured in one) - 1 for one in tried if one]
    assert len(regrets) >= 2
    assert sum(regrets) / len(regrets) <= REGRET


# Search


def test_partitions():
    found = partitions(10)
    assert len(found) == len(set(found)) and max(len(one) for one in found) == 10
    assert {(1,), (1,) * 8, (1, 2, 4, 4, 4, 2, 1), (1, 4, 4, 4, 1), (4, 4, 2, 1)} <= set(found)
    assert partitions(1) == ((1,),)


@pytest.mark.parametrize("link", LINKS)
def test_search_finds_what_all_candidates_would(link):
    """The search does not try every kernel with every partition; it loses less than a hundredth by that."""
    profile = shipped()[f"h200-x2-{link}"]
    copies = profile.machine.copies
    for shape in (Shape("all_reduce", 17776, 3072, 6144, 2), Shape("reduce_scatter", 16380, 1536, 4480, 2)):
        everything = min(
            overlapped_ms(profile, shape.plan(slabs, copies), shape.k, kernel, free)
            for slabs in partitions(shape.most_slabs(copies))[::3]
            for kernel, free in ways(profile, shape.op, None)
        )
        found = candidates(profile, shape)
        assert found == sorted(found) and found[0].predicted_ms <= everything * 1.01


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("op", ["all_reduce", "all_to_all"])
def test_the_few_best_are_those_of_all(link, op):
    """What is ruled out without being simulated is no better; the first few are exact."""
    profile, shape = shipped()[f"h200-x2-{link}"], Shape(op, 8888, 9216, 3072, 2, "bfloat16", 3, 64)
    everything = candidates(profile, shape)
    for most in (1, 6):
        few = candidates(profile, shape, most=most)
        assert [one.predicted_ms for one in few] == [one.predicted_ms for one in everything[:most]]
    plan = Shape("all_to_all", 8888, 9216, 3072, 2, "bfloat16", 3, 64).plan((1, 2, 1), profile.machine.copies)
    assert products(profile, plan, shape.k, None, 1)[0] == products(profile, plan, shape.k, None)[0]


@pytest.mark.parametrize("link", LINKS)
def test_least_is_not_more(link):
    """Of every kernel, number of free SMs and some partitions."""
    profile = shipped()[f"h200-x2-{link}"]
    copies = profile.machine.copies
    shapes = [Shape(op, 17776, 3072, 1536, 2) for op in ("all_reduce", "reduce_scatter")]
    for shape in (*shapes, Shape("all_to_all", 2222, 1536, 640, 2)):
        for slabs in partitions(shape.most_slabs(copies))[::9]:
            for kernel, free in [(CUBLAS, 0), *ways(profile, shape.op, None)]:
                case = (profile, shape.plan(slabs, copies), shape.k, kernel, free)
                assert least_ms(*case) <= overlapped_ms(*case) * (1 + 1e-9)


def test_one_slab_is_serial():
    """A kernel that is faster than cuBLAS overlaps nothing by that."""
    slow = replace(tiny_profile().kernels[CUBLAS], tile_ms=9.0)
    profile = tiny_profile(kernels=tiny_profile().kernels | {CUBLAS: slow})
    choice = choose(profile, Shape("all_reduce", 100, 640, 64, 2), None, "test")
    assert not choice.overlap and choice.plan == "serial"


def test_serial_where_nothing_is_gained():
    """Collectives that only run when the product has ended."""
    profile = tiny_profile()
    blocked = Beside(Curve(((1e6, 1e6),)), 1.0)
    profile = replace(profile, beside={op: dict.fromkeys(both, blocked) for op, both in profile.beside.items()})
    choice = choose(profile, Shape("all_reduce", 1024, 640, 64, 2), None, "test")
    assert not choice.overlap and choice.slabs == (1,) and choice.predicted_ms == choice.serial_ms
    assert choose(tiny_profile(), Shape("all_reduce", 5120, 640, 64, 2), None, "test").overlap
    assert "serial; predicted" in choice.describe() and choice.gain == 1.0


def test_a_profile_from_before_there_were_kernels():
    """Nothing is known of collectives beside them."""
    known = tiny_profile()
    beside = {op: {CUBLAS: both[CUBLAS]} for op, both in known.beside.items()}
    choice = choose(replace(known, beside=beside), Shape("all_reduce", 5120, 640, 64, 2), None, "test")
    assert choice.kernel is None


def test_without_kernels_products_go_slab_by_slab():
    choice = choose(tiny_profile(), Shape("all_reduce", 5120, 640, 64, 2), (), "test")
    assert choice.overlap and choice.kernel is None and choice.free_sms == 0


def test_search_leaves_the_caches_of_operations_alone():
    before = all_reduce_plan.cache_info().currsize
    candidates(tiny_profile(), Shape("all_reduce", 1920, 640, 64, 2))
    assert all_reduce_plan.cache_info().currsize == before


# Profiles and the store


def test_profile_round_trip(tmp_path):
    for name, profile in shipped().items():
        path = tmp_path / f"{name}.json"
        profile.save(path)
        assert Profile.load(path, profile.machine) == profile


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(version=0), "has version 0, this fodit reads 1"),
        (lambda c: c["profile"].pop("pace"), "pace is missing"),
        (lambda c: c["profile"].update(speed=1), "speed is not known"),
        (lambda c: c["profile"]["alone"].pop("all_reduce"), "alone.all_reduce is missing"),
        (lambda c: c["profile"]["alone"]["all_reduce"].update(points=[[2, 1], [1, 1]]), "in the order of sizes"),
        (
            lambda c: c["profile"]["kernels"]["cublas"].update(tile_ms="fast"),
            "kernels.cublas.tile_ms is 'fast', not float",
        ),
        (lambda c: c["profile"].update(pace={"none": 1.0}), "pace has the key 'none', not int"),
        (lambda c: c["profile"].update(copy_gbs=-1.0), "must be above 0"),
        (lambda c: c["profile"].update(copy_gbs=True), "copy_gbs is True"),
        (lambda c: c.update(profile=[]), "the content is \\[\\], not an object"),
    ],
)
def test_broken_profiles(tmp_path, change, says):
    path = tmp_path / "one.profile.json"
    tiny_profile().save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(codec.FileError, match=says) as error:
        Profile.load(path)
    assert str(path) in str(error.value)


def test_half_a_file(tmp_path):
    path = tmp_path / "one.profile.json"
    path.write_text('{"version": 1, "prof')
    with pytest.raises(codec.FileError, match="cannot be read"):
        Profile.load(path)


def test_other_machines_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("FODIT_CACHE", str(tmp_path))
    profile = tiny_profile()
    machine = profile.machine
    profile.save(store.profile_path(machine))
    assert store.stored_profile(machine) == profile
    others = [
        replace(machine, gpus=("Tiny", "Huge")), replace(machine, gpus=("Tiny",) * 4), replace(machine, ranks=4),
        replace(machine, link="peer access"), replace(machine, nccl="2.1"), replace(machine, driver="14000"),
        replace(machine, compute_sms=8),
    ]  # fmt: skip
    assert len({one.key for one in (machine, *others)}) == 8
    for other in others:
        assert store.stored_profile(other) is None
        profile.save(store.profile_path(other))  # whatever a file is called
        with pytest.raises(codec.FileError, match="is of another machine: "):
            store.stored_profile(other)


def test_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FODIT_CACHE", "/a")
    assert store.folder() == Path("/a")
    monkeypatch.delenv("FODIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert store.folder() == Path("/b/fodit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.folder() == tmp_path / ".cache" / "fodit"


def make_plans(profile):
    plans = Plans(profile.machine)
    choice = Choice("all_reduce", True, (1, 2, 1), "ampere_128x128x32", 2, 5.0, 9.0, 6.0, 9.0, "tuned")
    plans.add(Shape("all_reduce", 1000, 640, 64, 2), choice)
    attention = Attention(100, 1, 2, 6, 64, 2)
    plans.add(attention.projection, replace(choice, op="all_to_all", slabs=(1, 2)))
    plans.add_groups(HeadGroups(attention, (1, 2), 3.0, 3.5, 4.0, "tuned"))
    return plans


def test_plans(tmp_path):
    profile = tiny_profile()
    plans = make_plans(profile)
    plans.save(tmp_path / "plans.json")
    assert Plans.load(tmp_path / "plans.json", profile.machine) == plans
    with pytest.raises(codec.FileError, match="another machine"):
        Plans.load(tmp_path / "plans.json", replace(profile.machine, nccl="3"))
    profile.save(tmp_path / "plans.json")
    with pytest.raises(codec.FileError, match="holds no plans"):
        Plans.load(tmp_path / "plans.json", profile.machine)


def test_planner():
    profile = tiny_profile()
    planner = Planner(profile, plans=make_plans(profile))
    tuned = planner.choice("all_reduce", 1000, 640, 64)
    assert tuned.source == "tuned" and tuned.gain == 1.5
    assert planner.choice("all_reduce", 1001, 640, 64) == tuned, "rows of uneven parts differ by one"
    other = planner.choice("all_reduce", 2000, 640, 64)
    assert other.source == "predicted from the measured profile" and other.measured_ms is None
    assert planner.choice("all_reduce", 2000, 640, 64) is other
    assert planner.choice("all_reduce", 1000, 640, 64, torch.float16) == tuned, "as fast in either 16-bit type"
    assert planner.choice("all_reduce", 1000, 640, 64, torch.float32) != tuned
    for dtype in (torch.bfloat16, torch.float16):
        assert planner.head_groups(100, 1, 6, 64, 2, dtype) == (1, 2)
    assert planner.head_groups(101, 1, 6, 64) in partitions(3)
    layout = UlyssesLayout(0, 2, 100, 1, 6, 64, (1, 2))
    mine = planner.product(layout.projection_plan, 384)
    assert (mine.kernel, mine.free_sms, mine.slabs, mine.source) == ("ampere_128x128x32", 2, (1, 2), "tuned")
    whole = planner.product(UlyssesLayout(0, 2, 100, 1, 6, 64).projection_plan, 384)
    assert whole.overlap and whole.slabs == (1,), "the product of what stays here runs beside the one exchange"
    assert whole.source != "tuned"
    assert len(planner.asked) == 10 and all(" ms" in line for line in planner.asked)
    # A kernel that this machine's library lacks is not promised.
    elsewhere = Planner(profile, plans=make_plans(profile), kernels=())
    assert elsewhere.choice("all_reduce", 1000, 640, 64).kernel is None


def agree(folder):
    """Each rank has a folder of its own; only rank 0's counts."""
    import os

    control = initialise(CPU, 60)
    rank = torch.distributed.get_rank(control)
    os.environ["FODIT_CACHE"] = f"{folder}/{rank}"
    profile = replace(tiny_profile(), taken=f"by rank {rank}")
    try:
        profile.save(store.profile_path(profile.machine))
        make_plans(profile).save(store.plans_path(profile.machine))
        torch.distributed.barrier(control)
        found, plans, notes = agreed_files(profile.machine, control)
        if rank == 0:
            store.profile_path(profile.machine).write_text("{}")
        torch.distributed.barrier(control)
        return found.taken, len(plans.tuned), notes, agreed_files(profile.machine, control)
    finally:
        del os.environ["FODIT_CACHE"]


def test_ranks_agree(pool, tmp_path):
    for taken, tuned, notes, (nothing, plans, why) in pool.run(2, agree, str(tmp_path)):
        assert (taken, tuned, notes) == ("by rank 0", 2, ())
        assert nothing is None and len(plans.tuned) == 2
        assert len(why) == 1 and "has version None" in why[0]


# Untuned machines, shapes of models, words


def test_nearest():
    known = shipped()
    cards = Machine(("NVIDIA GeForce RTX 4090",) * 2, 2, "host memory", "2.28.9", "13000", 128, 128)
    assert nearest(cards, known) == "h200-x2-no-p2p-nccl"
    assert nearest(replace(cards, link="peer access"), known) == "h200-x2-nvlink-nccl"
    assert nearest(replace(cards, compute_sms=24), known) == "h200-x2-consumer-nccl"
    assert nearest(replace(cards, link="host memory, copy engines"), known) == "h200-x2-no-p2p"
    assert nearest(replace(cards, link="peer access, copy engines"), known) == "h200-x2-nvlink"
    assert nearest(replace(cards, link="host memory, copy engines", compute_sms=24), known) == "h200-x2-consumer"


def test_kernels_that_a_profile_lacks():
    profile = shipped()["h200-x2-no-p2p"]
    assert with_kernels(profile, dict.fromkeys(profile.kernels, KERNELS[0])) == profile
    found = with_kernels(profile, {"new": replace(KERNELS[0], tile_m=128, tile_n=64)}).kernels["new"]
    known = profile.kernels[CUBLAS]
    assert (found.tile_m, found.tile_n) == (128, 64)
    assert known.tile(4096) / 4 < found.tile(4096) < known.tile(4096) / 3, "smaller, and a little slower for its size"
    assert like(known, 128, 256).tile(4096) == pytest.approx(known.tile(4096))


def test_shapes_of_models(tmp_path):
    found = model("CogVideoX-5b")
    assert (found.tokens, found.width, found.ffn, found.batch, found.parts) == (17776, 3072, 12288, 2, 2)
    assert found.attention(2).projection == Shape("all_to_all", 8888, 9216, 3072, 2, "bfloat16", 3, 64, 1)
    assert [(one.m, one.n, one.k) for one in found.tensor_parallel(2)[:2]] == [(35552, 3072, 1536), (35552, 3072, 6144)]
    assert model("CogVideoX-5b", cfg=2).batch == 1
    assert model("zai-org/CogVideoX1.5-5b").tokens == 11 * 48 * 85 + 226
    wan = model("Wan-AI/Wan2.1-T2V-14B-Diffusers")
    assert (wan.tokens, wan.width, wan.ffn, wan.batch) == (32760, 5120, 13824, 1)
    assert model("Wan2.2-TI2V-5B").tokens == 31 * 22 * 40
    assert model("Wan2.1-T2V-1.3B", 240, 416, 17).tokens == 5 * 15 * 26
    with pytest.raises(ValueError, match="is not a saved pipeline"):
        model(str(tmp_path))


def test_model_in_a_folder(tiny):
    with pytest.raises(ValueError, match="give --height, --width, --num-frames"):
        model(tiny("cogvideox-rope"))
    assert model(tiny("cogvideox-rope"), 64, 96, 9).tokens > 0
    assert model(tiny("wan2.1"), 64, 96, 9).batch == 1


def test_explain():
    text = explain("all_reduce", 17776, 3072, 6144, profile="h200-x2-no-p2p")
    for word in (
        "slabs",
        "SMs free",
        "predicted",
        "serial",
        "bound",
        "because",
        "communication takes longer",
        "shipped",
    ):
        assert word in text
    profile = tiny_profile()
    assert "measured    6.000 ms" in explain(
        "all_reduce", 1000, 640, 64, planner=Planner(profile, plans=make_plans(profile))
    )
    with pytest.raises(ValueError, match="neither a file, nor one of h200-x2-consumer"):
        explain("all_reduce", 1, 1, 1, profile="none")


def test_explain_takes_the_newest_stored_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("FODIT_CACHE", str(tmp_path))
    assert "shipped" in explain("all_reduce", 1024, 640, 64)
    tiny_profile().save(store.profile_path(tiny_profile().machine))
    assert "made up" in explain("all_reduce", 1024, 640, 64)
