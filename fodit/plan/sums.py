"""Sums over ranks by exchanges: how a product is cut where the ranks send each other parts and add them themselves.

Copy engines cannot add, and a collective that can takes SMs. So every rank sums up its own rows. It computes those of
the others first and sends them slab by slab, then its own rows piece by piece, to which the kernel adds what the others
have sent. For an all-reduce the finished pieces go to all others:

    compute   [ slab 0 ][ slab 1 ][ piece 0 ][ piece 1 ]
    comm                [ slab 0 ][ slab 1 ] [ piece 0 ][ piece 1 ]

As much is sent as by the ring algorithms of NCCL. Each piece is a product of its own, started when the slab of the
same rows has arrived: no kernel ever waits for another rank. Of an all-reduce the last piece is sent in two parts, so
that little is left to send when all is computed.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from fodit.plan.slabs import Plan, Segment, Slab, slab_rows
from fodit.plan.split import ranges, split_ranges

LAST = (3, 1)  # parts of the last piece of an all-reduce

Rows = tuple[int, int]  # half-open


@dataclass(frozen=True, eq=False)
class SumPlan:
    """How one rank sums up a product of [rows, K] and [width, K] over all ranks.

    Args:
        op: all_reduce or reduce_scatter.
        rank, ranks: this rank, and how many there are.
        rows, width: of the product.
        others: the rows of the other ranks, as an all-to-all; slab j holds the j-th piece of each one's rows. It
            receives, from each other rank in turn, the j-th piece of this rank's rows.
        own: this rank's rows; piece j is a product stored from 0 on, with a slab for each of its parts.
        parts: `parts[rank][j]`, the rows of the j-th piece of a rank's rows, part by part.
    """

    op: str
    rank: int
    ranks: int
    rows: int
    width: int
    others: Plan
    own: tuple[Plan, ...]
    parts: tuple[tuple[tuple[Rows, ...], ...], ...]

    @property
    def widths(self) -> tuple[int]:
        return (self.width,)

    @cached_property
    def kept(self) -> Rows:
        """The rows of the result on this rank: all of an all-reduce, of a reduce-scatter its own."""
        mine = self.parts[self.rank]
        return (0, self.rows) if self.op == "all_reduce" else (mine[0][0][0], mine[-1][-1][1])


@lru_cache(maxsize=256)
def sum_plan(
    op: str, rows: int, width: int, ranks: int, rank: int, slabs: int | tuple[int, ...] = 1, align: int = 1
) -> SumPlan:
    """The plan of an all_reduce or a reduce_scatter on one rank; rank p has the p-th of `split_ranges(rows, ranks)`.

    `slabs` is a number of slabs of one rank's rows, or their relative sizes; `align` is the tile height the borders
    should fall on. The same arguments give the same object.
    """
    if op not in ("all_reduce", "reduce_scatter"):
        raise ValueError(f"there are sums for all_reduce and reduce_scatter, not for {op}")
    if min(rows, width) < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"a sum needs rows and width >= 1 and a rank below ranks, got {rows}, {width}, {rank}, {ranks}"
        )
    owned = split_ranges(rows, ranks)
    pieces = ranges(slab_rows(owned[0][1], slabs, align))  # the first rank has the most rows
    cuts = [[piece] for piece in pieces]
    if op == "all_reduce":
        cuts[-1] = _cut(pieces[-1], align)
    parts = tuple(
        tuple(tuple((min(start + first, stop), min(start + last, stop)) for first, last in piece) for piece in cuts)
        for start, stop in owned
    )
    own = tuple(_own(rows, width, ranks, piece) for piece in parts[rank])
    return SumPlan(op, rank, ranks, rows, width, _others(rows, width, rank, parts), own, parts)


def _cut(piece: Rows, align: int) -> list[Rows]:
    """Into its last parts, if it is high enough."""
    first, last = piece
    if last - first < len(LAST) * align:
        return [piece]
    return [(first + start, first + stop) for start, stop in ranges(slab_rows(last - first, LAST, align))]


def _own(rows: int, width: int, ranks: int, piece: tuple[Rows, ...]) -> Plan:
    begin, slabs = piece[0][0], []
    for start, stop in piece:
        offset, end = (start - begin) * width, (stop - begin) * width
        segments = (Segment(start, stop, 0, width, 0, offset, width),) if start < stop else ()
        slabs.append(Slab(segments, offset, end, offset, end))
    return Plan("sum", ranks, rows, (width,), tuple(slabs), slabs[-1].stop, slabs[-1].stop)


def _others(rows: int, width: int, rank: int, parts: tuple[tuple[tuple[Rows, ...], ...], ...]) -> Plan:
    """As an all-to-all: received are the first elements of the buffer, behind them lies what is sent."""
    ranks = len(parts)
    pieces = [[(piece[0][0], piece[-1][1]) for piece in one] for one in parts]
    mine = [(stop - start) * width for start, stop in pieces[rank]]
    recv_size = (ranks - 1) * sum(mine)
    made, received, stored = [], 0, recv_size
    for index, size in enumerate(mine):
        segments, first, sends = [], stored, [0] * ranks
        for other in range(ranks):
            start, stop = pieces[other][index]
            if other == rank or start == stop:
                continue
            sends[other] = (stop - start) * width
            segments.append(Segment(start, stop, 0, width, 0, stored, width))
            stored += sends[other]
        receives = [size if other != rank else 0 for other in range(ranks)]
        last = received + sum(receives)
        made.append(Slab(tuple(segments), first, stored, received, last, tuple(sends), tuple(receives)))
        received = last
    return Plan("all_to_all", ranks, rows, (width,), tuple(made), stored, recv_size)
