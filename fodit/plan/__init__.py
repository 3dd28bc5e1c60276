"""Plans: which part of a product is computed when, where it is stored and what is sent. Pure Python, no torch."""

from fodit.plan.slabs import Plan, Segment, Slab, all_reduce_plan, reduce_scatter_plan
from fodit.plan.split import rank_ranges, share_sizes, split_ranges, split_sizes
from fodit.plan.sums import SumPlan, sum_plan
from fodit.plan.tiles import TILE_FIELDS, TileProgram, tile_program
from fodit.plan.ulysses import UlyssesLayout, most_head_groups

__all__ = [
    "TILE_FIELDS",
    "Plan",
    "Segment",
    "Slab",
    "SumPlan",
    "TileProgram",
    "UlyssesLayout",
    "all_reduce_plan",
    "most_head_groups",
    "rank_ranges",
    "reduce_scatter_plan",
    "share_sizes",
    "split_ranges",
    "split_sizes",
    "sum_plan",
    "tile_program",
]
