"""The search among plans, without a GPU."""

from dataclasses import replace

import pytest
from profiles import LINKS, tiny_profile

from fodit.plan import all_reduce_plan
from fodit.tune.predict import (
    least_ms,
    overlapped_ms,
)
from fodit.tune.profile import CUBLAS, Beside, Curve, shipped
from fodit.tune.search import Shape, candidates, choose, partitions, products, ways


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
