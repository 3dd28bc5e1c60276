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
    sum_plan,
    tile_program,
)
from fodit.plan.slabs import slab_rows
from fodit.plan.tiles import LOCAL

ranks = st.integers(1, 8)
small = st.integers(1, 40)


def fill(plan: Plan) -> list:
    """The plan's buffer with every element named (row, weight, column); None where nothing is stored."""
    buffer: list = [None] * plan.size
    places = [(slab.segments, slab.start, slab.stop) for slab in plan.slabs] + [(plan.local, 0, plan.recv_size)]
    for segments, start, stop in places:
        for segment in segments:
            for row in range(segment.rows):
                for col in range(segment.cols):
                    address = segment.offset + row * segment.ld + col
                    assert start <= address < stop, "a segment leaves its slab"
                    assert buffer[address] is None, "two elements share an address"
                    buffer[address] = (segment.row_start + row, segment.weight, segment.col_start + col)
    assert [one for segments, *_ in places for one in segments] == list(plan.segments)
    return buffer


def check_cover(plan: Plan, buffer: list) -> None:
    wanted = {(r, w, c) for r in range(plan.rows) for w, n in enumerate(plan.widths) for c in range(n)}
    stored = [element for element in buffer if element is not None]
    assert len(stored) == len(wanted) and set(stored) == wanted
    first = plan.recv_size if plan.op == "all_to_all" else 0
    assert [slab.start for slab in plan.slabs] == [first, *(slab.stop for slab in plan.slabs[:-1])]
    assert plan.slabs[-1].stop == plan.size
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


@given(
    st.sampled_from(["all_reduce", "reduce_scatter"]),
    small,
    st.integers(1, 5),
    st.integers(2, 6),
    st.integers(1, 5),
    st.sampled_from([1, 4]),
)
def test_sums(op, rows, width, size, slabs, align):
    """Every rank computes all rows once, and gets its own from all others where its pieces expect them."""
    plans = [sum_plan(op, rows, width, size, rank, slabs, align) for rank in range(size)]
    buffers = [fill(plan.others) for plan in plans]
    for rank, (plan, (start, stop)) in enumerate(zip(plans, split_ranges(rows, size), strict=True)):
        own = [one for piece in plan.own for one in fill(piece)]
        assert own == [(r, 0, c) for r in range(start, stop) for c in range(width)]
        stored = [one for one in buffers[rank] if one is not None]
        assert sorted(own + stored) == [(r, 0, c) for r in range(rows) for c in range(width)]
        assert plan.kept == ((0, rows) if op == "all_reduce" else (start, stop))
        for index, piece in enumerate(plan.own):
            slab = plan.others.slabs[index]
            received: list = []
            for other, elements in enumerate(slab.recv_sizes):
                sent, sizes = plans[other].others.slabs[index], plans[other].others.slabs[index].send_sizes
                assert sizes[rank] == elements
                first = sent.start + sum(sizes[:rank])
                received += buffers[other][first : first + elements]
            assert received == fill(piece) * (size - 1)
            assert len(received) == slab.recv_stop - slab.recv_start
    covered = [row for one in plans[0].parts for piece in one for part in piece for row in range(*part)]
    assert covered == list(range(rows))


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
        buffer = fill(plan)
        check_cover(plan, buffer)
        buffers.append([None if element is None else meaning(one, *element) for element in buffer])
    for rank in range(size):
        for group in range(groups):
            exchange(plans, buffers, rank, group)
            slab = plans[rank].slabs[group]
            first, last = layout[rank].head_ranges[rank][group]
            assert buffers[rank][slab.recv_start : slab.recv_stop] == [
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
                sent, received = layout[a].return_sizes(group)[0][b], layout[b].return_sizes(group)[1][a]
                assert received == (0 if a == b else sent), "a rank's own part stays"


def meaning(layout, row, weight, col):
    """What an element is: token, batch item, projection, head, channel."""
    item, token = divmod(row, layout.local_tokens)
    return (layout.token_ranges[layout.rank][0] + token, item, weight, *divmod(col, layout.head_dim))


def exchange(plans, buffers, rank, group):
    """What the other ranks send to this one is put beside its own part, which is there."""
    slab = plans[rank].slabs[group]
    target = slab.recv_start
    for source, size in enumerate(slab.recv_sizes):
        if source != rank:
            sender = plans[source].slabs[group]
            begin = sender.start + sum(sender.send_sizes[:rank])
            assert sender.send_sizes[rank] == size, "sender and receiver agree"
            assert buffers[rank][target : target + size] == [None] * size, "only the rank's own part is there"
            buffers[rank][target : target + size] = buffers[source][begin : begin + size]
        target += size
    assert target == slab.recv_stop and slab.send_sizes[rank] == 0
    assert slab.elements == slab.stop - slab.start


@settings(deadline=None)
@given(layouts())
def test_matrices(args):
    """They are where the plan stores what is for one rank's heads of one group."""
    size, tokens, batch, heads, dim, shares, speeds = args
    for rank in range(size):
        layout = UlyssesLayout(rank, size, tokens, batch, heads, dim, shares, speeds)
        buffer = fill(layout.projection_plan)
        begin, end = layout.token_ranges[rank]
        for group, places in enumerate(layout.projection_matrices):
            for other, (offset, width) in enumerate(places):
                first, last = layout.head_ranges[other][group]
                found = buffer[offset : offset + layout.local_tokens * batch * 3 * width]
                assert [meaning(layout, *element) for element in found] == [
                    (t, b, w, h, c)
                    for t in range(begin, end)
                    for b in range(batch)
                    for w in range(3)
                    for h in range(first, last)
                    for c in range(dim)
                ]


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
        wanted, got, width = fill(plan), [None] * plan.size, len(TILE_FIELDS)
        counts = [0] * len(plan.slabs)
        order = []
        for index in range(program.tiles):
            tile = dict(zip(TILE_FIELDS, program.table[index * width : (index + 1) * width], strict=False))
            assert 1 <= tile["rows"] <= tile_m and 1 <= tile["cols"] <= tile_n
            offset = (tile["offset_high"] << 32) + (tile["offset_low"] & 0xFFFFFFFF)
            if tile["slab"] != LOCAL:
                counts[tile["slab"]] += 1
            order.append(tile["slab"] % (len(counts) + 1))  # what is not sent comes last
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
        (lambda: sum_plan("all_to_all", 4, 4, 2, 0), "not for all_to_all"),
        (lambda: sum_plan("all_reduce", 4, 4, 2, 2), "a rank below ranks"),
        (lambda: split_sizes(4, 0), "parts >= 1"),
    ],
)
def test_bad_input_says_what_would_work(make, words):
    with pytest.raises(ValueError, match=words):
        make()
