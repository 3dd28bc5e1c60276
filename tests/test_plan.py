"""Every plan covers its product exactly once, and what a collective moves lands where the result wants it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fodit.plan import (
    TILE_FIELDS,
    Plan,
    UlyssesLayout,
    all_reduce_plan,
    reduce_scatter_plan,
    share_sizes,
    split_ranges,
    split_sizes,
    tile_program,
)
from fodit.plan.slabs import slab_rows

ranks = st.integers(1, 8)
small = st.integers(1, 40)


def fill(plan: Plan) -> list:
    """The send buffer with every element named (row, weight, column); None where nothing is stored."""
    buffer: list = [None] * plan.send_size
    for slab in plan.slabs:
        for segment in slab.segments:
            for row in range(segment.rows):
                for col in range(segment.cols):
                    address = segment.offset + row * segment.ld + col
                    assert slab.start <= address < slab.stop, "a segment leaves its slab"
                    assert buffer[address] is None, "two elements share an address"
                    buffer[address] = (segment.row_start + row, segment.weight, segment.col_start + col)
    return buffer


def check_cover(plan: Plan, buffer: list) -> None:
    wanted = {(r, w, c) for r in range(plan.rows) for w, n in enumerate(plan.widths) for c in range(n)}
    stored = [element for element in buffer if element is not None]
    assert len(stored) == len(wanted) and set(stored) == wanted
    assert [slab.start for slab in plan.slabs] == [0, *(slab.stop for slab in plan.slabs[:-1])]
    assert plan.slabs[-1].stop == plan.send_size
    assert [slab.recv_start for slab in plan.slabs] == [0, *(slab.recv_stop for slab in plan.slabs[:-1])]
    assert plan.slabs[-1].recv_stop == plan.recv_size


@given(st.integers(0, 200), ranks)
def test_split(total, parts):
    sizes = split_sizes(total, parts)
    assert sum(sizes) == total and len(sizes) == parts and max(sizes) - min(sizes) <= 1
    assert split_ranges(total, parts)[-1][1] == total


@given(st.integers(1, 200), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_shares(total, shares):
    if len(shares) > total:
        with pytest.raises(ValueError, match="in proportion"):
            share_sizes(total, shares)
        return
    sizes = share_sizes(total, shares)
    assert sum(sizes) == total and min(sizes) >= 1 and len(sizes) == len(shares)
    if total % sum(shares) == 0:
        assert list(sizes) == [total // sum(shares) * share for share in shares]
    assert share_sizes(total, (1,) * len(shares)) == split_sizes(total, len(shares))


@given(st.integers(1, 500), st.integers(1, 12), st.sampled_from([1, 3, 128]))
def test_slab_rows_align(rows, slabs, align):
    sizes = slab_rows(rows, slabs, align)
    assert sum(sizes) == rows and min(sizes) > 0 and len(sizes) <= slabs
    borders = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    assert all(border % align == 0 for border in borders)


def test_plans_are_made_once():
    assert all_reduce_plan(64, 8, 2, 3) is all_reduce_plan(64, 8, 2, 3)
    assert reduce_scatter_plan(64, 8, 2, 3) is not reduce_scatter_plan(64, 8, 2, 4)
    layout = UlyssesLayout(0, 2, 10, 1, 4, 16)
    assert layout.projection_plan is layout.projection_plan


def test_slab_rows_by_shares():
    assert slab_rows(1000, (1, 2, 1)) == (250, 500, 250)
    assert slab_rows(1000, (1, 2, 1), align=128) == (256, 512, 232)
    assert slab_rows(17776, (1, 4, 4, 1), align=128) == (1792, 7168, 7040, 1776)


@given(small, small, ranks, st.integers(1, 6), st.sampled_from([1, 4]))
def test_all_reduce(rows, width, size, slabs, align):
    plan = all_reduce_plan(rows, width, size, slabs, align)
    buffer = fill(plan)
    check_cover(plan, buffer)
    assert buffer == [(r, 0, c) for r in range(rows) for c in range(width)], "the slabs are rows of the result"


@given(small, st.integers(1, 9), ranks, st.integers(1, 6), st.sampled_from([1, 4]))
def test_reduce_scatter(rows, width, size, slabs, align):
    plan = reduce_scatter_plan(rows, width, size, slabs, align)
    buffer = fill(plan)
    check_cover(plan, buffer)
    for rank, (start, stop) in enumerate(split_ranges(rows, size)):
        received: list = [None] * plan.recv_size
        for slab in plan.slabs:
            part = (slab.stop - slab.start) // size
            assert part == slab.recv_stop - slab.recv_start
            received[slab.recv_start : slab.recv_stop] = buffer[slab.start + rank * part :][:part]
        wanted = [(r, 0, c) for r in range(start, stop) for c in range(width)]
        assert received[: len(wanted)] == wanted and not any(received[len(wanted) :])


@st.composite
def layouts(draw):
    """Ranks, tokens, batch, heads, head dim, head groups and speeds, the last two even or by shares."""
    size, heads = draw(ranks), draw(st.integers(1, 10))
    heads += size - 1
    speeds = draw(st.sampled_from([None, tuple(draw(st.integers(1, 4)) for _ in range(size))]))
    groups = draw(st.integers(1, min(share_sizes(heads, speeds or (1,) * size))))
    shares = draw(st.sampled_from([groups, tuple(draw(st.integers(1, 5)) for _ in range(groups))]))
    tokens = draw(st.integers(1, 20)) + (size if speeds else 0)
    return size, tokens, draw(st.integers(1, 3)), heads, draw(st.integers(1, 3)), shares, speeds


@settings(deadline=None)
@given(layouts())
def test_all_to_all(args):
    size, tokens, batch, heads, dim, shares, speeds = args
    layout = [UlyssesLayout(r, size, tokens, batch, heads, dim, shares, speeds) for r in range(size)]
    plans, groups = [one.projection_plan for one in layout], layout[0].groups
    buffers = []
    for one, plan in zip(layout, plans, strict=True):
        if plan.rows == 0:
            assert plan.send_size == 0
            buffers.append([])
            continue
        buffers.append(fill(plan))
        check_cover(plan, buffers[-1])
        start = one.token_ranges[one.rank][0]
        local = one.local_tokens  # name elements by what they are: token, batch item, projection, head, channel
        buffers[-1] = [
            (start + row % local, row // local, weight, col // dim, col % dim) for row, weight, col in buffers[-1]
        ]
    for rank in range(size):
        for group in range(groups):
            received = []
            for source in range(size):
                slab = plans[source].slabs[group]
                begin = slab.start + sum(slab.send_sizes[:rank])
                part = buffers[source][begin : begin + slab.send_sizes[rank]]
                assert len(part) == plans[rank].slabs[group].recv_sizes[source], "sender and receiver agree"
                received += part
            first, last = layout[rank].head_ranges[rank][group]
            assert received == [
                (t, b, w, h, c)
                for t in range(tokens)
                for b in range(batch)
                for w in range(3)
                for h in range(first, last)
                for c in range(dim)
            ]
    for group in range(groups):
        for a in range(size):
            for b in range(size):
                assert layout[a].return_sizes(group)[0][b] == layout[b].return_sizes(group)[1][a]


@settings(deadline=None)
@given(layouts(), st.sampled_from([1, 3, 8]), st.sampled_from([1, 2, 5]), st.integers(1, 4))
def test_tile_program(args, tile_m, tile_n, band):
    size, tokens, batch, heads, dim, shares, speeds = args
    layout = UlyssesLayout(0, size, tokens, batch, heads, dim, shares, speeds)
    plans = [
        layout.projection_plan,
        all_reduce_plan(tokens, heads, size, layout.groups),
        reduce_scatter_plan(tokens, heads, size, layout.groups),
    ]
    for plan in plans:
        program = tile_program(plan, tile_m, tile_n, band)
        wanted, got, width = fill(plan), [None] * plan.send_size, len(TILE_FIELDS)
        counts = [0] * len(plan.slabs)
        order = []
        for index in range(program.tiles):
            tile = dict(zip(TILE_FIELDS, program.table[index * width : (index + 1) * width], strict=False))
            assert 1 <= tile["rows"] <= tile_m and 1 <= tile["cols"] <= tile_n
            offset = (tile["offset_high"] << 32) + (tile["offset_low"] & 0xFFFFFFFF)
            counts[tile["slab"]] += 1
            order.append(tile["slab"])
            for row in range(tile["rows"]):
                for col in range(tile["cols"]):
                    address = offset + row * tile["ld"] + col
                    assert got[address] is None
                    got[address] = (tile["m0"] + row, tile["weight"], tile["n0"] + col)
        assert got == wanted
        assert tuple(counts) == program.tiles_per_slab and order == sorted(order)


@pytest.mark.parametrize(
    "rows, heights", [(128 * 17, [17]), (128 * 41, [14, 14, 13]), (100, [1]), (128 * 64, [16] * 4)]
)
def test_bands_of_a_slab_are_nearly_even(rows, heights):
    """A band reads all weights, so none is thin; neighbouring tiles share them, so heights are even."""
    table = tile_program(all_reduce_plan(rows, 512, 1), 128, 256).table
    tiles = [tuple(table[at : at + 2]) for at in range(0, len(table), len(TILE_FIELDS))]
    assert [sum(n0 == 0 for _, n0 in band) for band in _bands(tiles)] == heights


def _bands(tiles):
    """Bands: a new one starts where the columns start again."""
    bands, last = [], -1
    for tile in tiles:
        if tile[1] < last or not bands:
            bands.append([])
        bands[-1].append(tile)
        last = tile[1]
    return bands


def test_large_offsets_keep_64_bits():
    plan = all_reduce_plan(75_600 * 4, 15_360, 2, slabs=2)
    program = tile_program(plan, 128, 256)
    last = program.table[-len(TILE_FIELDS) :]
    assert (last[9] << 32) + (last[8] & 0xFFFFFFFF) > 2**32


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: UlyssesLayout(0, 8, 10, 1, 3, 16), "ulysses <= 3"),
        (lambda: UlyssesLayout(0, 2, 10, 1, 5, 16, 3), "1 to 2 head groups, got 3"),
        (lambda: UlyssesLayout(0, 2, 10, 1, 6, 16, 3, (2, 1)), "1 to 2 head groups, got 3"),
        (lambda: UlyssesLayout(0, 2, 10, 1, 6, 16, 1, (2, 1, 1)), r"2 ranks need as many speeds >= 1, got \(2, 1, 1\)"),
        (lambda: UlyssesLayout(0, 2, 10, 1, 5, 16, (1, 0)), r"1 to 2 head groups, got \(1, 0\)"),
        (lambda: all_reduce_plan(0, 4, 2), "rows >= 1"),
        (lambda: reduce_scatter_plan(4, 4, 2, (1, 2, 1)), "cannot split 2 in proportion to"),
        (lambda: all_reduce_plan(4, 4, 2, slabs=0), "at least one slab"),
        (lambda: split_sizes(4, 0), "parts >= 1"),
    ],
)
def test_bad_input_says_what_would_work(make, words):
    with pytest.raises(ValueError, match=words):
        make()
