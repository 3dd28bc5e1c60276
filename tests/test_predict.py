"""The predictor, by hand and against recordings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import COPIES, LINKS, NCCL, predictions, recorded, regret, tiny_profile

from fodit.plan import UlyssesLayout, all_reduce_plan, reduce_scatter_plan
from fodit.tune.predict import (
    attention_calls,
    attention_ms,
    bound_ms,
    overlapped_ms,
    product_ms,
    segment_ms,
    serial_ms,
    slab_ends,
    slab_tiles,
    waves,
)
from fodit.tune.profile import CUBLAS, OPERATIONS, Beside, Curve, shipped
from fodit.tune.search import Candidate, Shape, as_choice

ERROR = 0.034  # mean absolute error of predictions, that of the FlashOverlap paper
REGRET = 0.01  # mean, of the measured time of the predicted best over the measured best


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
    two, three = (segment_ms(fast, layout, 512, "ampere_128x128x32", 2, parts) for parts in (2, 3))
    assert three == pytest.approx(1.5 * two, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_out_projection_of_own_heads_hides_the_way_back(ranks):
    """It does up to its own length; what is longer shows. The way there hides behind the first product."""
    layout = UlyssesLayout(1, ranks, 12800, 1, 4, 128)
    own = product_ms(tiny_profile(), 12800 // ranks, 512, 512 // ranks)

    def ms(exchange: float) -> float:
        """Of a segment with one head group, each of whose two exchanges takes so long whatever it carries."""
        flat = Curve(((1.0, exchange), (1e9, exchange)))
        profile = tiny_profile(alone=tiny_profile().alone | {"all_to_all": flat})
        return segment_ms(profile, layout, 512, "ampere_128x128x32", 2)

    assert ms(own) == pytest.approx(ms(own / 10), rel=0.02)
    assert ms(1.3 * own) - ms(own) >= 0.29 * own


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
    regrets = [one for shape, found in shapes if (one := regret(profile, shape, found)) is not None]
    assert len(regrets) >= 2
    assert sum(regrets) / len(regrets) <= REGRET
