"""Slabs: the parts of a product's output that are sent by one collective call each.

The product is D = A @ [W_0; W_1; ...].T with A of shape [rows, K] and W_i of shape [widths[i], K]. A plan cuts D
into segments, stores every segment at an address of one buffer, and groups segments that are contiguous there into
slabs. Nothing needs reordering after a collective, because the order is already in the store addresses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

from fodit.plan.split import ranges, share_sizes, split_sizes


@dataclass(frozen=True)
class Segment:
    """D[row_start:row_stop, col_start:col_stop] of weight `weight` (columns counted inside that weight).

    Row r of the segment is stored at `offset + r * ld` of the plan's buffer; units are elements.
    """

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    weight: int
    offset: int
    ld: int

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def cols(self) -> int:
        return self.col_stop - self.col_start


@dataclass(frozen=True)
class Slab:
    """One collective call: elements [start, stop) of the plan's buffer are sent, [recv_start, recv_stop) received.

    `send_sizes` and `recv_sizes` are elements per rank for an all-to-all, empty for the reducing collectives. A rank
    sends itself nothing, but `recv_sizes` counts its own share of what it will have.
    """

    segments: tuple[Segment, ...]
    start: int
    stop: int
    recv_start: int
    recv_stop: int
    send_sizes: tuple[int, ...] = ()
    recv_sizes: tuple[int, ...] = ()

    @cached_property
    def elements(self) -> int:
        """That the product computes for this slab."""
        return sum(one.rows * one.cols for one in self.segments)


@dataclass(frozen=True, eq=False)
class Plan:
    """How one product is cut into slabs.

    `size` is the length of the buffer that the product is stored in, `recv_size` of what is received. An all-to-all
    receives into the first part of that same buffer, an all-reduce in place, a reduce-scatter into another buffer.
    `local` are segments that no other rank needs. They are computed last, for they hide what the others wait for; a
    product stores them where they belong in what is received.
    Plans are compared by identity: what is derived from one (a tile program on a device) is kept for as long as it.
    """

    op: str
    ranks: int
    rows: int
    widths: tuple[int, ...]
    slabs: tuple[Slab, ...]
    size: int
    recv_size: int
    local: tuple[Segment, ...] = ()

    @property
    def segments(self) -> Iterator[Segment]:
        """In the order in which they are computed."""
        return chain(*(slab.segments for slab in self.slabs), self.local)

    @property
    def by_rows(self) -> bool:
        """Whether all slabs are rows of one product as they lie, so that a plain product fills them."""
        return len(self.widths) == 1 and all(one.cols == one.ld == self.widths[0] for one in self.segments)


def slab_rows(rows: int, slabs: int | tuple[int, ...], align: int = 1) -> tuple[int, ...]:
    """Rows of each slab, whose borders are multiples of `align`.

    `slabs` is a number of nearly even slabs, of which there are never more than fit, or their relative sizes.
    """
    units = -(-rows // align)
    if isinstance(slabs, int):
        if slabs < 1:
            raise ValueError(f"a plan needs at least one slab, got {slabs}")
        slabs = (1,) * min(slabs, units)
    sizes = [size * align for size in share_sizes(units, slabs)]
    sizes[-1] -= units * align - rows
    return tuple(sizes)


@lru_cache(maxsize=256)
def all_reduce_plan(rows: int, width: int, ranks: int, slabs: int | tuple[int, ...] = 1, align: int = 1) -> Plan:
    """GEMM + all-reduce: a slab is a range of rows of D [rows, width], reduced in place.

    `slabs` is a number of slabs or their relative sizes; `align` is the tile height the borders should fall on. The
    same arguments give the same object.
    """
    _positive(rows=rows, width=width, ranks=ranks)
    made = []
    for start, stop in ranges(slab_rows(rows, slabs, align)):
        segment = Segment(start, stop, 0, width, 0, start * width, width)
        made.append(Slab((segment,), start * width, stop * width, start * width, stop * width))
    return Plan("all_reduce", ranks, rows, (width,), tuple(made), rows * width, rows * width)


@lru_cache(maxsize=256)
def reduce_scatter_plan(rows: int, width: int, ranks: int, slabs: int | tuple[int, ...] = 1, align: int = 1) -> Plan:
    """GEMM + reduce-scatter by rows: rank p keeps the p-th of `split_ranges(rows, ranks)`.

    Slab j holds, for each rank in turn, the j-th range of that rank's rows, so what a rank receives is contiguous
    rows of its result. Where `rows` does not divide evenly, shorter ranks have one unused row in the last slab.
    `slabs` is a number of slabs of one rank's share, or their relative sizes. The same arguments give the same object.
    """
    _positive(rows=rows, width=width, ranks=ranks)
    owned = ranges(split_sizes(rows, ranks))
    share = max(stop - start for start, stop in owned)
    made, offset = [], 0
    for first, last in ranges(slab_rows(share, slabs, align)):
        segments = []
        for rank, (start, stop) in enumerate(owned):
            row_start, row_stop = min(start + first, stop), min(start + last, stop)
            if row_start < row_stop:
                address = offset + rank * (last - first) * width
                segments.append(Segment(row_start, row_stop, 0, width, 0, address, width))
        size = ranks * (last - first) * width
        made.append(Slab(tuple(segments), offset, offset + size, first * width, last * width))
        offset += size
    return Plan("reduce_scatter", ranks, rows, (width,), tuple(made), offset, share * width)


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"a plan needs {name} >= 1, got {name}={value}")
