"""Overlapped operations: products and collectives that run at the same time."""

from fodit.ops.communicator import Communicator, GatheredRows, Pending
from fodit.ops.gemm import (
    Arrivals,
    all_to_all_products,
    gemm_all_reduce,
    gemm_all_to_all,
    gemm_reduce_scatter,
)

__all__ = [
    "Arrivals",
    "Communicator",
    "GatheredRows",
    "Pending",
    "all_to_all_products",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_reduce_scatter",
]
