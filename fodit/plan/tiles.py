"""Tile programs: the order in which a kernel computes output tiles, and where each one is stored."""

from array import array
from dataclasses import dataclass

from fodit.plan.slabs import Plan

LOCAL = -1  # slab of the tiles that are not sent
# One tile is twelve int32, the layout of FoditTile in csrc/fodit.h; the 64-bit offset takes two of them.
TILE_FIELDS = ("m0", "n0", "rows", "cols", "weight", "slab", "ld", "unused", "offset_low", "offset_high", "-", "-")


@dataclass(frozen=True)
class TileProgram:
    """The table a kernel follows, and for each slab the number its counter reaches when the slab is complete.

    Tiles of what stays on this rank come last; they are of slab -1, which has no counter.
    """

    table: array  # int32, len(TILE_FIELDS) per tile
    tiles_per_slab: tuple[int, ...]

    @property
    def tiles(self) -> int:
        return len(self.table) // len(TILE_FIELDS)


def tile_program(plan: Plan, tile_m: int, tile_n: int, band: int = 16) -> TileProgram:
    """Cut a plan's slabs into tiles of at most [tile_m, tile_n], slab after slab.

    Within a slab the tiles run in bands of about `band` tile rows, down the band first and then across the columns:
    tiles that are in flight together share rows of A and of the weights, which keeps both in the L2 cache. The bands
    of a slab are nearly even, since a thin one would read all weights for little, and have an even number of tile
    rows, since the two blocks of a cluster share the weights of neighbouring tiles.
    """
    if min(tile_m, tile_n, band) < 1:
        raise ValueError(f"tile_m, tile_n and band must be >= 1, got {tile_m}, {tile_n}, {band}")
    table, counts = array("i"), []
    for index, segments in [*enumerate(slab.segments for slab in plan.slabs), (LOCAL, plan.local)]:
        tiles = []
        for segment in segments:
            for m0 in range(segment.row_start, segment.row_stop, tile_m):
                rows = min(tile_m, segment.row_stop - m0)
                for n0 in range(segment.col_start, segment.col_stop, tile_n):
                    cols = min(tile_n, segment.col_stop - n0)
                    offset = segment.offset + (m0 - segment.row_start) * segment.ld + n0 - segment.col_start
                    tiles.append((m0, n0, rows, cols, segment.weight, index, segment.ld, 0, offset))
        starts = sorted({tile[0] for tile in tiles})
        bands = max(round(len(starts) / band), 1)
        height = -(-len(starts) // (2 * bands)) * 2
        band_of = {m0: position // height for position, m0 in enumerate(starts)}
        tiles.sort(key=lambda tile: (band_of[tile[0]], tile[4], tile[1], tile[0]))
        for *fields, offset in tiles:
            low = offset & 0xFFFFFFFF
            table.extend((*fields, low - (1 << 32) if low >> 31 else low, offset >> 32, 0, 0))
        if index != LOCAL:
            counts.append(len(tiles))
    return TileProgram(table, tuple(counts))
